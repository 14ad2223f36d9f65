"""Hosts a training function in one worker: runs and stops it, and keeps its commit. Worker."""

from __future__ import annotations

import copy
import logging
import operator
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from raysgd.core.control import Control
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import DataLoaderFailure, Interrupted
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.train.elastic_state import Commit, Kept
from raysgd.train.sessions import Attempt, Codec, Session, Stopped, running

logger = logging.getLogger("raysgd")

KERAS_3 = (
    "Keras 3 cannot run `fit` under a tf.distribute strategy for several workers, and fails with TensorFlow's error about a PerReplica "
    "value. Loop over the batches with strategy.run, as examples/function_keras.py does, or train this model with raysgd.tf.TFTrainer"
)
FROM_THE_BEGINNING = (
    "the training function starts again from its beginning, because it has saved no checkpoint: what it had reported is made and reported "
    "again. Save some with train.report(metrics, checkpoint=...), and begin with train.get_checkpoint()"
)
STOP_SIGNAL = signal.SIGUSR2
SIGNAL_INTERVAL_S = 0.05
WAITS_IN_RAY = re.compile(r"ray\.(?!cloudpickle)")  # modules whose code calls Ray's core, which cloudpickle does not
DATA_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")


def _is_data_loaders(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(DATA_LOADER)


def _must_finish(frame: FrameType | None) -> bool:
    """Whether an exception would do harm here: a module whose import is stopped stays broken in
    this process, Python ignores exceptions in a finalizer, and the processes of a DataLoader that
    is being made or ended would be left over."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename == "<frozen importlib._bootstrap>":
            return True
        if code.co_name in ("__init__", "_shutdown_workers") and _is_data_loaders(frame):
            return True
        frame = frame.f_back
    return False


def torch_modes() -> Callable[[], None]:
    """Make what restores torch's modes of this thread, if torch has been imported then. A signal
    can end `torch.no_grad()` or `torch.autocast()` in the middle of their own code."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None

    def depth() -> int:
        torch.autocast_increment_nesting()
        return int(torch.autocast_decrement_nesting())

    enabled, caches, before = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), depth()
    autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}

    def restore() -> None:
        torch.set_grad_enabled(enabled)
        for device, (on, dtype) in autocast.items():
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caches)
        while depth() > before:  # otherwise, copies of the weights would stay in the cache
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()

    return restore


def is_keras_3_under_a_strategy(error: ValueError) -> bool:
    """Whether Keras 3 has raised the error about a value of a strategy."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "PerReplica" in str(error) and any(module.startswith("keras.") for module in modules)


def convert_result(result: Any) -> Any:
    """Convert what a function returned for the driver, which may have no GPU and has no process
    group. Containers keep their classes, and stay as they are if nothing in them was converted."""
    if "torch" not in sys.modules:
        return result
    if isinstance(result, dict):
        converted = {key: convert_result(each) for key, each in result.items()}
        if changed := {key: each for key, each in converted.items() if each is not result[key]}:
            result = copy.copy(result)
            for key, each in changed.items():
                result[key] = each
        return result
    if isinstance(result, (list, tuple)):
        items = [convert_result(each) for each in result]
        if all(map(operator.is_, items, result)):
            return result
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    from raysgd.torch.group.function_backend import to_cpu

    return to_cpu(result)


class FunctionReplica:
    """Owns the user's object and the last commit. At each commit and checkpoint, which are the
    steps of its progress, the function can continue with other workers. `make` creates the object,
    for `execute`."""

    def __init__(self, codec: Codec, make: Callable[[], Any] | None, rank_info: RankInfo, control: Control) -> None:
        self._rank_info, self._control, self._codec = rank_info, control, codec
        self.instance = make() if make is not None else None
        self._commit = Commit()
        self._objects: dict[str, Any] = {}  # of `train.once`
        self._run_number = -1
        self._stoppable = False
        self._main = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            signal.signal(STOP_SIGNAL, self._on_signal)
            control.on_interrupt = self._interrupt

    @property
    def progress(self) -> Progress:
        content, _, number, _ = self._commit.kept
        # Within a step, a rank that has begun the newest run is ahead, and then one that has kept its first state.
        applied = 2 * self._run_number + (content is not None)
        return Progress(step=number, batches=number, applied=applied, phase=self._control.phase)

    def run(self, call: Call) -> Any:
        self._control.phase = call.name
        try:
            return call.method(self, **call.arguments)
        finally:
            self._control.phase = "idle"

    # -- calls ----------------------------------------------------------------------------------------

    def function(self, task: Any, attempt: Attempt, checkpoint: Any, **engines: Any) -> Any:
        """Run the training function, and pickle its result: that may be the user's error."""
        if attempt.run != self._run_number:
            self._run_number = attempt.run
            self._commit.kept, self._objects = Kept(number=self._commit.kept.number), {}
        if (
            attempt.number > 1
            and checkpoint is None
            and self._commit.kept.content is None
            and self._rank_info.world_rank == 0
        ):
            logger.warning(FROM_THE_BEGINNING)
        session = Session(
            self._rank_info,
            self._control,
            replace(attempt, checkpoint=None if checkpoint is None else bytes(checkpoint.data)),
            self._codec,
            at_boundary=self._at_boundary,
            commit=self._commit,
            objects=self._objects,
        )
        self._control.begun = self._commit.kept.number + 1
        try:
            with running(session):
                result = self._codec.dumps(convert_result(self._call(*task)))
                self._report(last=True)
                return result
        except Stopped as stop:
            return Interrupted(None, "the function was stopped", self.progress, asked=stop.asked)
        except DataLoaderFailure as failure:
            return failure.interrupted("the function's data loader", None, self.progress)
        except (KeyboardInterrupt, SystemExit):  # Lightning ends its process after what it takes for Ctrl-C
            if not self._control.interrupted:
                raise
            return Interrupted(None, "the function was stopped in a call of Ray", self.progress)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call the function. Only meanwhile, and only once, may `_on_signal` stop it."""
        restore_modes = torch_modes()
        if "accelerate" in sys.modules:  # it would keep the ranks of the attempt before
            from raysgd.torch.foreign import reset_accelerate

            reset_accelerate()
        self._stoppable = True
        try:
            if self._control.interrupted:
                raise Stopped(asked=False)
            return function(*arguments)
        except BaseException as error:
            self._stoppable = False
            restore_modes()
            if any(_is_data_loaders(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
                from raysgd.torch.data.loading import end_iterators_of

                end_iterators_of(error)
            if isinstance(error, ValueError) and is_keras_3_under_a_strategy(error):
                raise ConfigError(KERAS_3) from error
            raise
        finally:
            self._stoppable = False
            self._commit.settle()

    def apply(self, function: Callable[[], Any], only: int | None = None) -> Any:
        return function() if only is None or only == self._rank_info.world_rank else None

    def apply_object(self, function: Callable[[Any], Any], only: int | None = None) -> Any:
        return function(self.instance) if only is None or only == self._rank_info.world_rank else None

    # -- stopping -------------------------------------------------------------------------------------

    def _at_boundary(self) -> None:
        """Stop the function here if the ranks have agreed on this boundary."""
        self._report()
        if not self._control.begin(self._commit.kept.number + 1):
            raise Stopped(asked=not self._control.interrupted)

    def _report(self, *, last: bool = False) -> None:
        """Send a progress message, if it is time for one."""
        if self._control.due(last=last):
            # A signal in the middle of a message would send half of it. The caller looks for a stop after it.
            stoppable, self._stoppable = self._stoppable, False
            try:
                self._control.report(self.progress)
            finally:
                self._stoppable = stoppable

    def _interrupt(self) -> None:
        """Stop the function, because the generation has ended. Called by the control thread."""
        threading.Thread(target=self._send_signals, name="raysgd-stop", daemon=True).start()

    def _send_signals(self) -> None:
        """Send signals until the function stops: some code must not be interrupted."""
        while self._stoppable and self._control.interrupted:
            signal.pthread_kill(self._main, STOP_SIGNAL)
            time.sleep(SIGNAL_INTERVAL_S)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Raise an exception in the main thread, unless code there must be finished."""
        if self._stoppable and self._control.interrupted and not _must_finish(frame):
            self._stoppable = False
            if frame is not None and WAITS_IN_RAY.match(str(frame.f_globals.get("__name__", ""))):
                raise KeyboardInterrupt  # `ray.get` ignores all other exceptions, and keeps waiting
            raise Stopped(asked=False)

    # -- membership -----------------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info

    def partial(self) -> None:
        """Nothing: the driver already has the reports of a function."""

    def state(self) -> bytes:
        return self._codec.dumps((self._run_number, self._commit.kept))

    def share_state(self, giver: int, *, takes: bool, is_new: bool) -> None:
        from raysgd.torch.group.function_backend import share_bytes

        data = share_bytes(self.state, giver, self._control)
        if takes:
            self.load(data)

    def load(self, data: bytes | bytearray) -> None:
        self._run_number, self._commit.kept = pickle.loads(data)

    def close(self) -> None:
        """Drop the user's object, whose `__del__` may release resources."""
        self.instance = None
        self._control.on_interrupt = lambda: None
