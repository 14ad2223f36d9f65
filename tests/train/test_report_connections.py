"""Reports use a connection that is open already."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.core.messages import OpenBulk
from raysgd.train import Trainer

REPORTS = 10


def function() -> None:
    for step in range(REPORTS):
        train.report(step=step)
        train.save_checkpoint(step=step)


def test_a_report_opens_no_connection(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer("torch", num_workers=2, logdir=tmp_path)
    trainer.start()
    server: Any = trainer._executor._engine.group.control  # type: ignore[union-attr]
    opened: Counter[str] = Counter()
    hand_over = server._hand_over

    def counted(peer: Any, first: Any) -> None:
        opened[f"{type(first).__name__} {getattr(first, 'worker', '')}"] += 1
        hand_over(peer, first)

    monkeypatch.setattr(server, "_hand_over", counted)
    for _ in range(2):
        trainer.run(function)
    assert len(opened) == 2 and set(opened.values()) == {1}
    assert all(name.startswith(OpenBulk.__name__) for name in opened)
    trainer.shutdown()
