"""The command `raysgd`. Both."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import click

from raysgd.cli import info
from raysgd.cli.doctor import examine
from raysgd.cli.drill import Drill, checked_config, findings, load_operator
from raysgd.cli.findings import Finding, lines
from raysgd.errors import RaysgdError
from raysgd.version import __version__

__all__ = ["main"]


class _WithCompleteLines(click.Group):
    """Lists commands with the complete first sentence of their help, which click would cut at the terminal's width."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        first, _, _ = inspect.cleandoc(cmd.help or "").partition("\n")
        cmd.short_help = cmd.short_help or first
        super().add_command(cmd, name)


@click.group(cls=_WithCompleteLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="raysgd")
def main() -> None:
    """Tools for trainings with raysgd."""


main.add_command(info.command)


@main.command("doctor")
@click.option("--folder", "folders", multiple=True, help="A folder that all nodes should share. Can be repeated.")
def check_machines(folders: tuple[str, ...]) -> None:
    """Check this machine, or all nodes of the Ray cluster that runs on it or that RAY_ADDRESS names.

    Each line says "ok", or what to do. Exit with 1 if one says FAIL. A "note" is advice. Nothing is changed: the files that
    are written to a --folder are removed."""
    try:
        with _logging(logging.ERROR):  # what raysgd logs while it joins a cluster is for trainers
            _print(examine(folders))
    except RuntimeError as error:  # a node has ended meanwhile
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _logging(level: int) -> Iterator[None]:
    """Let raysgd log from this level on in this block."""
    logger = logging.getLogger("raysgd")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def _print(found: Iterable[Finding]) -> None:
    """Print a report. Exit with 1 if a check has failed."""
    failed = 0
    for line, failure in lines(found):
        click.echo(line)
        failed += failure
    if failed:
        raise click.ClickException(f"{failed} check(s) failed")


@main.command("drill")
@click.argument("operator", metavar="SCRIPT:OPERATOR")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=2))
@click.option("--config", help="The trainer's config: a JSON object, or @FILE.")
@click.option("--minutes", default=2.0, show_default=True, type=click.FloatRange(min=0.1))
@click.option("--seed", default=0, show_default=True, help="Of the schedule of faults.")
@click.option(
    "--hang-timeout",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=1.0),
    help="Seconds, as ElasticConfig(hang_timeout_s=...).",
)
@click.option("--ignore", multiple=True, help="An attribute of the operator that need not survive. Can be repeated.")
@click.option("--verbose", is_flag=True, help="Show what raysgd logs.")
def drill_operator(operator: str, config: str | None, ignore: tuple[str, ...], verbose: bool, **more: Any) -> None:
    """Train an operator of your script under faults, on this machine, and say what it does wrong.

    Workers are killed and stopped, get preemption notices, run out of memory, and hold Python's lock, in an order that the seed
    gives. OPERATOR is a subclass of raysgd.TrainingOperator in a SCRIPT (train.py) or in a module (package.module). The script
    is imported, so what it runs must be under `if __name__ == "__main__":`."""
    os.environ["RAY_ADDRESS"] = "local"  # the workers of a cluster that others use must not be killed
    try:
        settings = {"workers": more["workers"], "minutes": more["minutes"], "seed": more["seed"]}
        drill = Drill(load_operator(operator), checked_config(config), hang_s=more["hang_timeout"], **settings)
    except (RaysgdError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    with _logging(logging.INFO if verbose else logging.CRITICAL):
        _print(findings(drill.run(), ignore))
