"""The command `raysgd`. Both."""

from __future__ import annotations

from pathlib import Path

import click

from raysgd.cli.info import describe
from raysgd.core.audit import AuditError
from raysgd.core.audit import verify as verified
from raysgd.errors import CheckpointError
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


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--tensors", is_flag=True, help="List each tensor of the models, with its type and shape.")
def info(path: Path, tensors: bool) -> None:
    """Say what is in the checkpoint at PATH: a file or folder that a trainer, AutoCheckpoint or raysgd.train wrote.

    Its digests are verified, and no code from it runs. Exit with 1 if it is damaged, or nothing that raysgd wrote."""
    click.echo(path)
    try:
        rows = list(describe(path, tensors=tensors))
    except (CheckpointError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"  {name:<{width}}  {text}")
