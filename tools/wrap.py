"""Fill paragraphs: of pages to 120 columns, of docstrings to 100. `make fix` does it, and `make check` compares.

Only running text is filled. Tables, code, headings, directives and HTML stay as they are; a list item, a row of a table of
arguments and a definition are paragraphs of their own. `python tools/wrap.py --check` names the files that would change.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE_WIDTH, DOCSTRING_WIDTH = 120, 100
SKIPPED = ("_build", "api", "notebooks", ".venv")

ATOM = re.compile(r"(?:`+[^`]+`+|\S)+")  # a code span is not broken
AMBIGUOUS = re.compile(r"(?:[-+*=:|>]+|#{1,6}|\d+[.)])$|[<|]|:::|```")  # means something else at the start of a line


def fill(text: str, width: int, first: str = "", rest: str = "", used: int = 0) -> list[str]:
    """Return the lines of a paragraph. `used` columns of the first line are taken, in addition to its prefix."""
    lines: list[str] = []
    line, length, begun = first, len(first) + used, False
    for word in ATOM.findall(text):
        if begun and length + 1 + len(word) > width and not AMBIGUOUS.match(word):
            lines.append(line)
            line, length, begun = rest, len(rest), False
        line += f" {word}" if begun else word
        length += len(word) + begun
        begun = True
    return [*lines, line]


# -- Pages --------------------------------------------------------------------------------------------

FENCE = re.compile(r" *(`{3,}|~{3,})")
GENERATED = re.compile(r"<!-- (?:table|matrix|plots|picture|summary): ")  # up to `<!-- end -->`, by fill_page.py
ITEM = re.compile(r" *(?:(?:[-*+]|\d+[.)]|:|\[\^\w+\]:) +)+(?=\S)")
VERBATIM = re.compile(r" *(?:#{1,6} |\||<|:::|:[\w-]+:|>|!\[|---|===|\[[^]^][^]]*\]: |\$\$|%)")


def filled_page(text: str) -> str:
    """Return a page of Markdown with filled paragraphs."""
    out: list[str] = []
    paragraph: list[str] = []
    prefix, indent, fence, generated = "", 0, "", False

    def end() -> None:
        if paragraph:
            rest = " " * (4 if prefix.lstrip().startswith("[^") else len(prefix))
            out.extend(fill(" ".join(each.strip() for each in paragraph), PAGE_WIDTH, prefix, rest))
            paragraph.clear()

    for line in text.splitlines():
        mark = FENCE.match(line)
        blank = not line.strip()
        spaces = len(line) - len(line.lstrip())
        generated = bool(GENERATED.match(line)) or (generated and line != "<!-- end -->")
        if fence or mark or blank or generated or VERBATIM.match(line) or line.endswith(("  ", "\\")):
            end()
            out.append(line)
            if mark:
                fence = "" if fence and line.strip().startswith(fence) else fence or mark[1]
            if not blank and not fence and not mark and spaces == 0:
                indent = 0
        elif item := ITEM.match(line):
            end()
            prefix, indent = item[0], len(item[0])
            paragraph.append(line[len(prefix) :])
        elif paragraph:
            paragraph.append(line)
        elif spaces >= indent + 4:  # code
            out.append(line)
        else:
            prefix, indent = " " * spaces, min(indent, spaces)
            paragraph.append(line)
    end()
    return "\n".join(out) + "\n"


# -- Docstrings ---------------------------------------------------------------------------------------

ROW = re.compile(r"( *\*{0,2}\w+(?:, \w+)* {2,})(?=\S)")  # as in docs/conf.py
BULLET = re.compile(r" *(?:-|\d+\.) +(?=\S)")
SESSION = ">>> "  # of the interpreter: what follows, up to an empty line, stays as it is


def filled_docstring(raw: str, column: int) -> str:
    """Return the content of a docstring, as it is in a file, whose quotes begin in this column."""
    margin = " " * column
    lines = raw.split("\n")
    out: list[str] = []
    paragraph: list[str] = []
    first, rest, session = "", margin, False

    def end(last: bool = False) -> None:
        if paragraph:
            used = column + 3 if not out else 0
            text = " ".join(each.strip() for each in paragraph) + ('"""' if last else "")
            out.extend(fill(text, DOCSTRING_WIDTH, first, rest, used))
            paragraph.clear()

    for number, line in enumerate(lines):
        body = line if number == 0 else line.removeprefix(margin)
        spaces = len(body) - len(body.lstrip())
        row = ROW.match(body) if spaces < 4 else None
        session = bool(body.strip()) and (session or body.startswith(SESSION))
        if session:
            end()
            out.append(line)
        elif not body.strip():
            end()
            out.append("")
            first = rest = margin
        elif begun := row or BULLET.match(body):
            end()
            deeper = max(6, len(begun[0])) if row else len(begun[0])
            first, rest = ("" if number == 0 else margin) + begun[0], margin + " " * deeper
            paragraph.append(body[len(begun[0]) :])
        elif paragraph and (spaces < 4 or len(rest) > column):
            paragraph.append(body)
        elif spaces >= 2:  # code
            end()
            out.append(line)
        else:
            first, rest = ("" if number == 0 else margin), margin
            paragraph.append(body)
    end(last=True)
    return "\n".join(out).removesuffix('"""') if lines[-1].strip() else "\n".join(out).rstrip() + f"\n{margin}"


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


def filled_code(code: str) -> str:
    """Return a Python file with filled docstrings."""
    lines = code.split("\n")
    for each in sorted(docstrings(ast.parse(code)), key=lambda each: -each.lineno):
        start, stop = each.lineno - 1, each.end_lineno or each.lineno
        source = "\n".join(lines[start:stop])
        begin = source.index('"""') + 3 if '"""' in source else -1
        if begin < 0 or source[: begin - 3].strip() or not source.endswith('"""'):
            continue
        content = filled_docstring(source[begin:-3], each.col_offset)
        lines[start:stop] = (source[:begin] + content + '"""').split("\n")
    return "\n".join(lines)


def pages() -> Iterator[Path]:
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        if not {*SKIPPED} & {*path.relative_to(ROOT).parts}:
            yield path


def main(arguments: list[str]) -> str | None:
    check = "--check" in arguments
    named = [Path(each).resolve() for each in arguments if each != "--check"]
    different: list[str] = []
    for path in named or [*pages(), *sorted((ROOT / "raysgd").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        filled = filled_page(text) if path.suffix == ".md" else filled_code(text)
        if filled != text:
            different.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(filled, encoding="utf-8")
    if check and different:
        return f"paragraphs are not filled in {', '.join(different)}: run `make fix`"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
