"""Links between pages have a text, because GitHub shows none for an empty one, and lead to a page and a section; pictures
exist. A section has the same anchor on GitHub and on the site."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])
LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<page>[^():#\s]*\.md)?(?:#(?P<section>[^()\s]+))?\)")
PICTURE = re.compile(r"!\[[^]]*\]\((?P<a>[^):]+)\)|^```\{image\} (?P<b>\S+)|(?:src|srcset)=\"(?P<c>[^\":]+)\"", re.M)
CARD = re.compile(r"(?m)^:link: (\S+)$")
IMPORTED_AS = {"sklearn": "scikit-learn"}


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))


def sections(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the built pages name them: repeated ones are numbered."""
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)]
    before = [slugs[:number].count(slug) for number, slug in enumerate(slugs)]
    return {f"{slug}-{count}" if count else slug for slug, count in zip(slugs, before, strict=True)}


def headings(page: Path) -> list[str]:
    return re.findall(r"(?m)^#+ (.+)$", prose(page))


def missing_files(page: Path) -> list[str]:
    """Return the pictures, and the pages of cards, that do not exist."""
    text = page.read_text(encoding="utf-8")
    named = [next(filter(None, picture.groups())) for picture in PICTURE.finditer(text)]
    named += [f"{card}.md" for card in CARD.findall(text)]
    return [name for name in named if not (page.parent / name).is_file()]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_and_cards(page: Path) -> None:
    assert not missing_files(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_site_has_the_anchors_of_github(page: Path) -> None:
    """`wrong_links` knows GitHub's anchors; MyST must make the same of each title."""
    slugify = pytest.importorskip("myst_parser.mdit_to_docutils.base").default_slugify
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings(page)]
    assert {slugify(title) for title in titles} <= sections(page)


def test_missing_files_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text('![x](b.png) ![y](a.md)\n```{image} c.svg\n```\n:link: d\n:link: a\n<img src="e.png">\n')
    assert missing_files(page) == ["b.png", "c.svg", "e.png", "d.md"]


def test_repeated_titles_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n## A\n## A\n")
    assert sections(tmp_path / "a.md") == {"a", "a-1", "a-2"}


def test_wrong_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# A title\n[](a.md), [x](b.md), [x](#no), [x](a.md#no), [x](a.md#a-title), [x](#a-title), [x](https://a.b/c.md)\n"
    )
    assert [each.partition(")")[0] for each in wrong_links(page)] == ["[](a.md", "[x](b.md", "[x](#no", "[x](a.md#no"]


def strings(code: str) -> set[str]:
    """Return the strings of a module that are not docstrings."""
    nodes = list(ast.walk(ast.parse(code)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return {node.value for node in constants if isinstance(node.value, str)}


def test_errors_name_pages_of_the_site() -> None:
    """An installed package has no folder docs/: its messages have addresses, of pages and sections that exist."""
    for path in (ROOT / "raysgd").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        files = [text for text in strings(code) if re.search(r"\w\.md\b", text)]
        assert not files, f"{path}: name a page with version.page() instead: {files}"
        for name, section in re.findall(r"\{page\([\"'](\w+)[\"']\)\}(?:#([\w-]+))?", code):
            page = ROOT / "docs" / f"{name}.md"
            assert page.is_file() and (not section or section in sections(page)), f"{path}: {name}#{section}"


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
