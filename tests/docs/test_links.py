"""Links between pages have a text, because GitHub shows none for an empty one, and lead to a page and a section."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])
LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<page>[^():#\s]*\.md)?(?:#(?P<section>[^()\s]+))?\)")
IMPORTED_AS = {"sklearn": "scikit-learn"}


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))


def sections(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the built pages name them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_links(page: Path) -> list[str]:
    found = []
    for link in LINK.finditer(prose(page)):
        target = page.parent / link["page"] if link["page"] else page
        if not link["text"].strip():
            found.append(f"{link[0]} has no text")
        elif not target.is_file():
            found.append(f"{link[0]}: there is no such page")
        elif link["section"] and link["section"] not in sections(target):
            found.append(f"{link[0]}: the page has no such section")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert not wrong_links(page)


def test_wrong_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# A title\n[](a.md), [x](b.md), [x](#no), [x](a.md#no), [x](a.md#a-title), [x](#a-title), [x](https://a.b/c.md)\n"
    )
    assert [each.partition(")")[0] for each in wrong_links(page)] == ["[](a.md", "[x](b.md", "[x](#no", "[x](a.md#no"]


def test_the_readmes_example_needs_only_what_its_pip_line_installs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A first example")[2]
    line, code = re.findall(r"(?ms)^```bash\n(pip install .*?)\n```.*?^```python\n(.*?)^```", text)[0]
    installed = {re.sub(r"\[.*", "", word.strip('"')) for word in line.partition("#")[0].split()[2:]}
    installed |= set(re.findall(r"raysgd\[(\w+)\]", line))  # an extra has the name of what it adds
    nodes = ast.walk(ast.parse(code))
    modules = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    modules |= {alias.name for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Import) for alias in n.names}
    needed = {IMPORTED_AS.get(each.partition(".")[0], each.partition(".")[0]) for each in modules}
    assert needed <= installed, needed - installed
