"""Saves something over an older one, when a line arrives: `killed_save.py KIND PATH`. The process that starts it kills it there."""

import sys
from pathlib import Path
from typing import Any

from tests import storing


def file(where: Path, content: str) -> None:
    storing.write(where, content.encode() * 1000)


def trained(where: Path, content: str, **given: Any) -> None:
    import torch

    from tests.torch.small import Line, inline

    def fill(operator: Line) -> None:
        for parameter in operator.model.parameters():
            torch.nn.init.constant_(parameter, float(content == "new"))

    with inline(Line) as trainer:
        trainer.apply_all_operators(fill)
        trainer.save(where, **given)


def sharded(where: Path, content: str) -> None:
    trained(where, content, sharded=True)


KINDS = {"file": file, "trained": trained, "sharded": sharded}

if __name__ == "__main__":
    save, where = KINDS[sys.argv[1]], Path(sys.argv[2])
    save(where, "old")
    print("ready", flush=True)
    sys.stdin.readline()
    save(where, "new")
