"""End a trainer whose script has ended: `raysgd end NAME`. Both."""

from __future__ import annotations

import logging

import click

from raysgd.errors import RaysgdError, counted
from raysgd.workers.cluster.connecting import join_running
from raysgd.workers.cluster.keeper import end_trainer


@click.command("end", short_help="End the workers of a trainer whose script has ended.")
@click.argument("name")
def command(name: str) -> None:
    """End the workers of the trainer NAME, which wait for its script to be started again."""
    logging.getLogger("raysgd").setLevel(logging.ERROR)  # what it says about joining a cluster is for trainers
    try:
        if not join_running():
            raise click.ClickException("no Ray cluster is running here: set RAY_ADDRESS to one")
        ended = end_trainer(name)
    except RaysgdError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"ended {counted(ended, 'worker')} of the trainer {name}")
