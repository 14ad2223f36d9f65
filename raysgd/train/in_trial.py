"""What a function calls that Tune itself runs: reports to Tune, and the trial's checkpoint. Worker.

Only Tune and its users import Ray Tune here.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd.core.measures.metrics import plain
from raysgd.errors import ConfigError
from raysgd.train.checkpoint import DICT_FILE, Checkpoint, unlist_metadata

NUMBER = "_current_checkpoint_id"


def is_trial() -> bool:
    """Whether Tune runs a function in this process."""
    if "ray.tune" not in sys.modules:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's, if this is not a trial
        return bool(_tune().get_context().get_trial_id())


def describe() -> dict[str, Any]:
    """Collect what `train.get_context()` says about the trial."""
    context = _tune().get_context()
    return {
        "experiment_name": context.get_experiment_name(),
        "trial_name": context.get_trial_name(),
        "trial_id": context.get_trial_id(),
        "trial_dir": context.get_trial_dir(),
        "trial_resources": context.get_trial_resources(),
    }


def newest_checkpoint() -> Checkpoint | None:
    """The trial's checkpoint."""
    checkpoint = _tune().get_checkpoint()
    return None if checkpoint is None else Checkpoint.from_bytes(bytes_of(checkpoint), trusted=True)


def report(metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
    """Report `metrics` from a function that Tune runs, as `ray.tune.report` does. `checkpoint` is
    one of raysgd or Ray, or a dict such as `trainer.latest_checkpoint`."""
    tune, values = _tune(), without_tensors(metrics)
    if checkpoint is None or isinstance(checkpoint, tune.Checkpoint):
        tune.report(values, checkpoint=checkpoint)
        return
    ours = Checkpoint.from_dict(checkpoint) if isinstance(checkpoint, Mapping) else checkpoint
    if not isinstance(ours, Checkpoint):
        raise ConfigError(
            f"checkpoint must be a raysgd.train.Checkpoint, a dict or a checkpoint of Ray, got {checkpoint!r}"
        )
    with stored(ours) as checkpoint:
        tune.report(values, checkpoint=checkpoint)


@contextmanager
def stored(content: Checkpoint, number: int | None = None) -> Iterator[Any]:
    """A context with a checkpoint of Tune, in a temporary folder: this one, and its `number` in the
    run."""
    with tempfile.TemporaryDirectory(prefix="raysgd-trial-") as folder:
        content.to_directory(folder)
        unlist_metadata(Path(folder))
        checkpoint = _tune().Checkpoint.from_directory(folder)
        if number is not None:
            checkpoint.update_metadata({NUMBER: number})
        yield checkpoint


def number_of(checkpoint: Any) -> int | None:
    """The number of a run's checkpoint that Tune has, at which a restart continues."""
    metadata = checkpoint.get_metadata() if hasattr(checkpoint, "get_metadata") and is_trial() else {}
    number: int | None = metadata.get(NUMBER)
    return number


def bytes_of(checkpoint: Any, pickler: Any = pickle.Pickler) -> bytes:
    """Read the trial's checkpoint, which Tune has: a file in its folder, or the folder."""
    with checkpoint.as_directory() as folder:
        file = Path(folder) / DICT_FILE
        return Checkpoint(file if file.is_file() else folder, trusted=True).to_bytes(pickler=pickler)


def without_tensors(value: Any) -> Any:
    """A number for a single number, and arrays for other tensors, which Tune refuses."""
    value = plain(value)
    if isinstance(value, Mapping):
        return {name: without_tensors(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_tensors(each) for each in value)
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _tune() -> Any:
    return sys.modules["ray.tune"]
