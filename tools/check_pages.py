"""Check the pages: `python tools/check_pages.py`, a part of `make check`.

Links have a text, because GitHub shows none for an empty one, and lead to a page and a section,
which has the same anchor on GitHub and on the site; pictures exist. Blocks are Python, or of a
known language, and fit on the page. The API reference has each public class, and a docstring
describes each argument that a page shows. Versions are the tested ones everywhere, figures those of
the benchmarks' stored results, and the tests that hold a promise are run for each change. The track
record is that of its rows and of the tests.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

from raysgd.version import __repository__

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])


# -- Blocks -------------------------------------------------------------------------------------------

FENCE = re.compile(r"^ *(?P<ticks>`{3,}|~{3,}) *(?P<language>[^`]*?) *$")
BLOCK_WIDTH = 85
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
LANGUAGE = re.compile(r"python|text|bash|console|diff|toml|json|yaml|ini|make|\{(?!.*python)[\w-]+\}.*")


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # the line number of the block's first line of code
    language: str
    code: str
    not_run: str  # the reason, or an empty string


def blocks(text: str, page: str) -> list[Block]:
    found: list[Block] = []
    opening: re.Match[str] | None = None
    start, reason = 0, ""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if opening is None:
            if fence:
                opening, start = fence, number + 1
            elif line.strip():  # a reason is only for the next block
                mark = NOT_RUN.search(line)
                reason = mark["reason"] if mark else ""
        elif fence and not fence["language"] and fence["ticks"].startswith(opening["ticks"]):
            code = dedent("\n".join(lines[start - 1 : number - 1])) + "\n"
            found.append(Block(page, start, opening["language"], code, reason))
            opening, reason = None, ""
    assert opening is None, f"{page}:{start - 1} opens a block that nothing closes"
    return found


def wrong_blocks(page: Path) -> Iterator[str]:
    for block in blocks(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))):
        if not LANGUAGE.fullmatch(block.language):
            yield f"line {block.line}: a block is ```python (and run) or {LANGUAGE.pattern}, not ```{block.language}"
        if not block.language.startswith("{"):
            for number, line in enumerate(block.code.splitlines(), start=block.line):
                if len(line) > BLOCK_WIDTH:
                    yield f"line {number}: a block's line has {len(line)} columns, and {BLOCK_WIDTH} fit on the page"
        try:
            compile(block.code if block.language == "python" else "", "block", "exec")
        except SyntaxError as error:
            yield f"line {block.line - 1 + (error.lineno or 1)}: {error.msg}"


# -- Links --------------------------------------------------------------------------------------------

LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<page>[^():#\s]*\.md)?(?:#(?P<section>[^()\s]+))?\)")
PICTURE = re.compile(r"!\[[^]]*\]\((?P<a>[^):]+)\)|^```\{image\} (?P<b>\S+)|(?:src|srcset)=\"(?P<c>[^\":]+)\"", re.M)
CARD = re.compile(r"(?m)^:link: (\S+)$")


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))


def headings(page: Path) -> list[str]:
    return re.findall(r"(?m)^#+ (.+)$", prose(page))


def sections(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the built pages name them: repeated
    ones are numbered."""
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)]
    before = [slugs[:number].count(slug) for number, slug in enumerate(slugs)]
    return {f"{slug}-{count}" if count else slug for slug, count in zip(slugs, before, strict=True)}


def wrong_links(page: Path) -> Iterator[str]:
    from myst_parser.mdit_to_docutils.base import default_slugify

    for link in LINK.finditer(prose(page)):
        target = page.parent / link["page"] if link["page"] else page
        if not link["text"].strip():
            yield f"{link[0]} has no text"
        elif not target.is_file():
            yield f"{link[0]}: there is no such page"
        elif link["section"] and link["section"] not in sections(target):
            yield f"{link[0]}: the page has no such section"
    text = page.read_text(encoding="utf-8")
    named = [next(filter(None, picture.groups())) for picture in PICTURE.finditer(text)]
    named += [f"{card}.md" for card in CARD.findall(text)]
    yield from (f"there is no {name}" for name in named if not (page.parent / name).is_file())
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings(page)]
    different = {default_slugify(title) for title in titles} - sections(page)
    yield from (f"GitHub and the site name the anchor {anchor} differently" for anchor in sorted(different))


def wrong_pages_in_errors() -> Iterator[str]:
    """An installed package has no folder docs/: its messages have addresses, of pages and sections
    that exist."""
    for path in (ROOT / "raysgd").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(code)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
        if files := [text for text in texts if isinstance(text, str) and re.search(r"\w\.md\b", text)]:
            yield f"{path}: name a page with version.page() instead: {files}"
        for name, section in re.findall(r"\{page\([\"'](\w+)[\"']\)\}(?:#([\w-]+))?", code):
            page = ROOT / "docs" / f"{name}.md"
            if not page.is_file() or (section and section not in sections(page)):
                yield f"{path}: there is no {name}#{section}"


def wrong_readme() -> Iterator[str]:
    """The first example needs only what its pip line installs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A first example")[2]
    line, code = re.findall(r"(?ms)^```bash\n(pip install .*?)\n```.*?^```python\n(.*?)^```", text)[0]
    installed = {
        "raysgd",
        *line.partition("#")[0].split()[3:],
        *re.findall(r"\[(\w+)\]", line),
    }  # an extra is named after its package
    nodes = list(ast.walk(ast.parse(code)))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    needed = {module.partition(".")[0].replace("sklearn", "scikit-learn") for module in modules}
    yield from (f"README.md: the pip line does not install {each}" for each in sorted(needed - installed))


NOTEBOOK = "examples/notebooks/kill_a_worker.ipynb"


def source_lines(address: str) -> Iterator[tuple[str, str]]:
    """What each page must have when the source has this address."""
    for page in ("README.md", "docs/getting_started.md", "docs/index.md"):
        yield page, f'pip install "raysgd[torch] @ git+{address}"'
    _, is_github, path = address.removesuffix(".git").partition("https://github.com/")
    if is_github:
        colab = "https://colab.research.google.com"
        notebook = f"{colab}/github/{path}/blob/main/{NOTEBOOK}"
        yield "README.md", f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({notebook})"
        yield NOTEBOOK, f"git+{address}"  # in a cell that installs raysgd there


def wrong_source() -> Iterator[str]:
    """As soon as the source has an address, the first pages install from there, and a notebook opens in Colab."""
    for page, line in source_lines(__repository__) if __repository__ else ():
        if line not in (ROOT / page).read_text(encoding="utf-8"):
            yield f"{page}: no line {line}"


# -- The API reference --------------------------------------------------------------------------------

PACKAGES = ("raysgd", "raysgd.train", "raysgd.train.torch", "raysgd.callbacks", "raysgd.data", "raysgd.tune")
# raysgd or Tune creates these, so users do not pass the arguments of their constructors.
NOT_CREATED = {"TrainingOperator", "CreatorOperator", "TrainingIterator", "ElasticState", "TrainContext"}
NOT_CREATED |= {"ElasticLoader", "BaseTorchTrainable", "TFTrainable"}
# Older names for a class that has a page, and what Tune calls.
NO_PAGE = {"SGDCallback", "SGDIterator", "DistributedTrainable"}


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # named tuples look their module up
    spec.loader.exec_module(module)
    return module


@cache
def conf() -> ModuleType:
    return loaded(ROOT / "docs" / "conf.py")


def documented(name: str) -> Any:
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last, None) or importlib.import_module(name)


def methods(of: type, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions that the page of a class shows."""
    options = conf().shown_methods(name)
    if not options:
        return
    named = re.findall(r"\w+", options.partition(":members:")[2].partition("\n")[0])
    for method in named or [each for each in dir(of) if not each.startswith("_")]:
        static = inspect.getattr_static(of, method)
        function = getattr(static, "__func__", static)
        if inspect.isfunction(function) and function.__module__.startswith("raysgd"):
            yield method, function


def callables(name: str, of: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield what has arguments on a page: where, its signature, and the docstring that describes
    them."""
    if inspect.ismodule(of):
        errors = any(isinstance(each, type) and issubclass(each, Exception) for each in vars(of).values())
        for each in getattr(of, "__all__", ()):
            if each not in conf().PUBLIC_LAST and not errors:
                yield from callables(f"{name}.{each}", getattr(of, each))
    elif inspect.isclass(of):
        if not issubclass(of, BaseException):
            shared = [base for base in of.__mro__[:-1] if base.__init__ is of.__init__]  # type: ignore[misc]
            bases = " ".join(inspect.getdoc(base) or "" for base in shared)
            made: Any = (lambda: None) if of.__name__ in NOT_CREATED else of.__init__
            yield name, inspect.signature(made), f"{inspect.getdoc(of)}\n{bases}"
        for method, function in methods(of, name):
            yield f"{name}.{method}", inspect.signature(function), inspect.getdoc(function) or ""
    elif callable(of):
        yield name, inspect.signature(of), inspect.getdoc(of) or ""


def undescribed(signature: inspect.Signature, docstring: str) -> list[str]:
    """Return the arguments that are neither in a table of the docstring nor in backticks."""
    quoted = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", docstring))))
    rows = filter(None, map(conf().ROW.fullmatch, docstring.splitlines()))
    described = quoted | {name for row in rows for name in row[1].split(", ")} | {"self", "cls"}
    catch_all = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [name for name, each in signature.parameters.items() if each.kind not in catch_all]
    return [name for name in names if not name.startswith("_") and name not in described]


def wrong_reference() -> Iterator[str]:
    pages = {name.rpartition(".")[2] for name in conf().PUBLIC}
    for name in conf().PUBLIC:
        try:
            of = documented(name)
        except ImportError as error:
            print(f"not checked here: {name}: {error}", file=sys.stderr)
            continue
        pages |= set(getattr(of, "__all__", ()))
        for where, signature, text in callables(name, of):
            if missing := undescribed(signature, text):
                yield f"{where}: arguments without a description: {missing}"
            elif not text:
                yield f"{where} has no docstring"
    for package in map(importlib.import_module, PACKAGES):
        for name in sorted({*package.__all__} - pages - NO_PAGE):
            if inspect.isclass(of := getattr(package, name)) and not issubclass(of, Exception):
                yield f"docs/api.md does not list {name}"


# -- Versions -----------------------------------------------------------------------------------------


def required_once(pattern: str, path: str) -> Iterator[str]:
    if not re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M):
        yield f"{path} has no {pattern}, which tools/try_versions.py tries"


def wrong_versions() -> Iterator[str]:
    """What setup.py and the documentation say is what `make versions` tries."""
    tried = loaded(ROOT / "tools" / "try_versions.py").COMBINATIONS
    oldest, newest = tried["oldest"], tried["newest"]
    yield from required_once(rf'python_requires=">={oldest.python}"', "setup.py")
    yield from required_once(rf'Python :: {newest.python}",\n(?!.*Python :: 3\.)', "setup.py")
    yield from required_once(f"Python {oldest.python} to {newest.python}", "docs/getting_started.md")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for package, name in (("torch", "PyTorch"), ("ray", "Ray")):
        (minimum,) = (each.split("==")[1].removesuffix(".0") for each in oldest.packages if each.startswith(package))
        if (required := set(re.findall(rf'"{package}(?:\[data\])?>=([\d.]+)"', setup))) != {minimum}:
            yield f"setup.py requires {package} {required}, and tools/try_versions.py tries {minimum}"
        yield from required_once(f"{name} {minimum} or newer", "docs/getting_started.md")
        yield from required_once(rf"^{package}==", "constraints.txt")


def wrong_results() -> Iterator[str]:
    """The tables of the benchmarks are those of the stored results, and pictures are described with
    their medians."""
    fill_page = loaded(ROOT / "examples" / "benchmarks" / "fill_page.py")
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in fill_page.RESULTS.glob("*.json")}
    for page in (fill_page.PAGE, *fill_page.OTHER_PAGES):
        text = page.read_text(encoding="utf-8")
        if fill_page.filled(text, {each["benchmark"]: each for each in results.values()}) != text:
            yield f"{page.name} does not show the results: run examples/benchmarks/fill_page.py"
    gaps = {row["case"]: row["gap_s"]["median"] for row in results["recovery"]["rows"]}
    said = [f"{gaps[case]:.2g} s without a step" for case in fill_page.REPEATED.values()]
    for name in (
        "README.md",
        "docs/index.md",
        *(f"docs/benchmarks/kill_curve_{mode}.svg" for mode in ("light", "dark")),
    ):
        if re.findall(r"[\d.]+ s without a step", (ROOT / name).read_text(encoding="utf-8"))[:3] != said:
            yield f"{name} does not say {said}"


def wrong_guarantees() -> Iterator[str]:
    """A promise is held by tests that each change runs, in `make test` or `make more`
    (tests/tiers.py)."""
    for name in sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "guarantees.md").read_text("utf-8")))):
        body = ast.parse((ROOT / name).read_text(encoding="utf-8")).body if (ROOT / name).is_file() else []
        tests = [each for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
        of_file = [ast.unparse(each) for each in body if isinstance(each, ast.Assign)]
        nightly = any(each.startswith("pytestmark") and "mark.nightly" in each for each in of_file)
        if nightly or all("pytest.mark.nightly" in map(ast.unparse, test.decorator_list) for test in tests):
            yield f"docs/guarantees.md names {name}, which has no test in `make test` or `make more`"


def wrong_track_record() -> Iterator[str]:
    """The track record is that of its rows and of the pinned schedules."""
    if wrong := loaded(ROOT / "tools" / "track_record.py").main(["--check"]):
        yield wrong


def findings() -> Iterator[str]:
    for page in PAGES:
        yield from (f"{page}: {wrong}" for wrong in [*wrong_blocks(page), *wrong_links(page)])
    yield from wrong_readme()
    yield from wrong_source()
    yield from wrong_pages_in_errors()
    yield from wrong_reference()
    yield from wrong_versions()
    yield from wrong_results()
    yield from wrong_guarantees()
    yield from wrong_track_record()


if __name__ == "__main__":
    # The reference imports TensorFlow, which talks.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")
    sys.exit("\n".join(findings()) or None)
