"""What `raysgd doctor` and `raysgd drill` found, and how it is printed. Both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import click

from raysgd.errors import counted


@dataclass(frozen=True)
class Finding:
    """One line of a report. `todo` is empty if all is well; with `fails` False, it is advice."""

    check: str
    text: str
    todo: str = ""
    fails: bool = True


def show(findings: Iterable[Finding]) -> None:
    """Print each finding as soon as it is there. End the command with 1 if a check has failed."""
    failed = 0
    for each in findings:
        mark = "ok" if not each.todo else "FAIL" if each.fails else "note"
        click.echo(f"{mark:<4}  {each.check:<10}  {each.text}" + f"\n{'':<16}  -> {each.todo}" * bool(each.todo))
        failed += mark == "FAIL"
    if failed:
        raise click.ClickException(f"{counted(failed, 'check')} failed")
