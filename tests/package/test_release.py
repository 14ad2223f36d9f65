"""What `make release` asks for before a version can be published."""

import pytest

from tools.release import missing

DATED = "# Changelog\n\n## 1.2.3 (2027-01-02)\n\n## 1.2.2 (2026-12-01)\n"


def test_nothing_is_missing_of_a_version_with_a_dated_heading() -> None:
    assert list(missing("1.2.3", DATED, "v1.2.2\n", "")) == []


@pytest.mark.parametrize(
    ("version", "changelog", "tags", "status", "said"),
    [
        ("1.2", DATED, "", "", "is not a version such as"),
        ("1.2.4", DATED, "", "", "the first heading is not '## 1.2.4 (DATE)'"),
        ("1.2.3", DATED.replace("2027-01-02", "not yet released"), "", "", "has no date"),
        ("1.2.3", DATED, "v1.2.3", "", "the tag v1.2.3 exists"),
        ("1.2.3", DATED, "", " M setup.py", "not committed"),
    ],
)
def test_what_is_missing_is_said(version: str, changelog: str, tags: str, status: str, said: str) -> None:
    assert any(said in each for each in missing(version, changelog, tags, status))
