"""The command `raysgd`. Both."""

from __future__ import annotations

from pathlib import Path

import click

from raysgd.core.audit import AuditError
from raysgd.core.audit import verify as verified
from raysgd.version import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="raysgd")
def main() -> None:
    """Tools for trainings with raysgd."""


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify(folder: Path) -> None:
    """Check the audit log in FOLDER, which ElasticConfig(audit=FOLDER) wrote.

    Print what it shows, and exit with 0, if the log is complete and unchanged, each sample of each epoch was used exactly once,
    and the weights of all ranks were equal. Otherwise name the first violation, and exit with 1."""
    try:
        verdict = verified(folder)
    except AuditError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(verdict.lines()))
