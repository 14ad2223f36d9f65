"""The command `raysgd`. Both."""

from __future__ import annotations

import click

from raysgd.cli import doctor, drill, end, info
from raysgd.version import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="raysgd")
def main() -> None:
    """Tools for trainings with raysgd."""


for each in (doctor, drill, end, info):
    main.add_command(each.command)
