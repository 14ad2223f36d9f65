"""When the source has an address, the pages need lines that install from there, and a badge for Colab."""

import pytest

from tools import check_pages

BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/me/raysgd/blob/main/examples/notebooks/kill_a_worker.ipynb)"
)


def test_without_an_address_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_pages, "__repository__", "")
    assert list(check_pages.wrong_source()) == []


@pytest.mark.parametrize("address", ["https://github.com/me/raysgd", "https://github.com/me/raysgd.git"])
def test_an_address_needs_lines_and_a_badge(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_pages, "__repository__", address)
    line = f'pip install "raysgd[torch] @ git+{address}"'
    pages = [f"{page}: no line {line}" for page in ("README.md", "docs/getting_started.md", "docs/index.md")]
    notebook = f"{check_pages.NOTEBOOK}: no line git+{address}"
    assert list(check_pages.wrong_source()) == [*pages, f"README.md: no line {BADGE}", notebook]


def test_colab_opens_only_what_is_on_github() -> None:
    assert len(list(check_pages.source_lines("https://example.org/raysgd"))) == 3
