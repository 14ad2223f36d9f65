"""The command `raysgd`. Both."""

from __future__ import annotations

import inspect

import click

from raysgd.cli import doctor, drill, end, info
from raysgd.version import __version__

__all__ = ["main"]


class _WithCompleteLines(click.Group):
    """Lists commands with the first line of their help, which click would cut."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        first, _, _ = inspect.cleandoc(cmd.help or "").partition("\n")
        cmd.short_help = cmd.short_help or first
        super().add_command(cmd, name)


@click.group(cls=_WithCompleteLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="raysgd")
def main() -> None:
    """Tools for trainings with raysgd."""


for each in (doctor, drill, end, info):
    main.add_command(each.command)
