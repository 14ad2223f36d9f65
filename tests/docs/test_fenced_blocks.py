"""Every Python block of the documentation runs.

A page is one script: its blocks in their order, each on the lines it has in the page, so that a traceback
points into the page. A block that cannot run here says why, in a comment above it:
`<!-- not run: needs a GPU -->`.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.background import Background
from tools.check_pages import Block, blocks

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])


def script(page_blocks: list[Block]) -> str:
    """Return the page as a program, with empty lines in place of prose."""
    text = ""
    for block in page_blocks:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.code
    return text


ALL = [b for path in PAGES for b in blocks(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))]
PYTHON = [block for block in ALL if block.language == "python"]
RUN_PAGES = sorted({block.page for block in PYTHON if not block.not_run})
FIRST_PAGES = ("README.md", "docs/saving.md")  # the others run in `make more`


def program(page: str) -> str:
    return script([block for block in PYTHON if block.page == page and not block.not_run])


def missing(page: str) -> list[str]:
    imported = [
        package for package in ("tensorflow", "horovod", "transformers", "peft") if f"import {package}" in program(page)
    ]
    return [package for package in imported if importlib.util.find_spec(package) is None]


def run(background: Background, page: str) -> str:
    """Run a page with a running cluster, because starting one takes longer than most pages. The README, and pages that call
    ray.init, start their own."""
    if missing(page):
        return "not run"
    folder = background.folder()
    path = folder / (Path(page).stem.replace("-", "_") + "_page.py")
    path.write_text(program(page), encoding="utf-8")
    alone = page == "README.md" or "ray.init(" in program(page)
    done = background.run(str(path), connected=not alone, folder=folder)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{page} failed; its output ended so:\n{output[-4000:]}"
    return output


@pytest.mark.slow
@pytest.mark.script(run=run)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in FIRST_PAGES else [pytest.mark.more]) for page in RUN_PAGES]
)
def test_page_runs(page: str, outcome: Callable[[], str]) -> None:
    if missing(page):
        pytest.skip(f"without {', '.join(missing(page))}")
    outcome()


def test_blocks_are_found_with_their_lines() -> None:
    text = "# A\n\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n\n```python\ny = 2\n```\n"
    text += "~~~text\n```\n~~~\n"
    first, second, third = blocks(text, "a.md")
    assert (first.line, first.code, first.not_run) == (4, "x = 1\n", "")
    assert (second.line, second.not_run) == (9, "needs a GPU")
    assert (third.language, third.code) == ("text", "```\n")
    assert script([first, second]) == "\n\n\nx = 1\n\n\n\n\ny = 2\n"
