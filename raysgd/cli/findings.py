"""What `raysgd doctor` and `raysgd drill` found. Both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Finding", "lines"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `todo` says what to do, and is empty if all is well. With `fails` False, it is advice."""

    check: str
    text: str
    todo: str = ""
    fails: bool = True

    @property
    def mark(self) -> str:
        return "ok" if not self.todo else "FAIL" if self.fails else "note"


def lines(findings: Iterable[Finding]) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a report, and for each whether a check has failed."""
    for each in findings:
        yield f"{each.mark:<4}  {each.check:<14} {each.text}", each.mark == "FAIL"
        if each.todo:
            yield f"      {'':<14} -> {each.todo}", False
