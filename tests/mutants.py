"""Break saves, loads, steps with NCCL and training functions in named ways. Each mutant names a test that detects it: it fails.

`python -m tests.mutants [NAME ...]` runs them, each in a process of its own, and prints the tier of the test. With
`-p tests.mutants`, pytest applies the mutant that RAYSGD_MUTANT names. Those of the engine and of the rounds of
functions are in `tests/simulation`, those of a replica's steps in `tests/local/test_faults.py`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["MUTANTS", "detected"]

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "RAYSGD_MUTANT"
NONE_SELECTED, SOME_FAILED = 5, 1  # exit statuses of pytest

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def mutant(test: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def kept(breaks: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[breaks.__name__] = test, breaks
        return breaks

    return kept


def instead(name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(name, value)


def detected(name: str) -> str | None:
    """Return the tier in which the test of this mutant fails, None if it passes. Raise an error if it cannot be run."""
    test, _ = MUTANTS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--timeout", "120", "-p", "tests.mutants"]
    for tier in ("test", "more", "nightly"):
        given = {VARIABLE: name, "RAYSGD_TIER": tier, "PYTHONPATH": str(ROOT)}
        command_of_tier = [*command, "-p", "no:cacheprovider", test]
        done = subprocess.run(command_of_tier, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True)
        if done.returncode == SOME_FAILED and " failed" in done.stdout.splitlines()[-1]:
            return tier
        if done.returncode == pytest.ExitCode.OK:
            return None
        if done.returncode != NONE_SELECTED:
            raise AssertionError(f"{test} cannot be run: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    raise AssertionError(f"no tier has {test}")


def pytest_collection_finish(session: pytest.Session) -> None:
    if VARIABLE in os.environ:
        patch = pytest.MonkeyPatch()
        MUTANTS[os.environ[VARIABLE]][1](patch)
        session.config.add_cleanup(patch.undo)


# -- random numbers by place -------------------------------------------------------------------------


PLACES = "tests/local/test_random_numbers.py::"
BY_HAND = f"{PLACES}test_a_loop_by_hand_with_the_same_places_ends_with_the_same_weights"


@mutant(f"{BY_HAND}[2-here]")
def read_here_without_a_place(patch: Patch) -> None:
    instead("raysgd.torch.data.sampling.seed_generators", lambda seed: None)(patch)


@mutant(f"{BY_HAND}[2-processes]")
def read_in_loader_processes_without_a_place(patch: Patch) -> None:
    instead("raysgd.torch.data.sampling._units_to_read", units_to_read)(patch)


def units_to_read(seed: int, units: Any) -> Any:
    return units


@mutant("tests/local/test_equal_runs.py::test_two_parts_are_equal_bit_by_bit[dropout]")
def seed_parts_by_rank(patch: Patch) -> None:
    from raysgd.replica.steps.feed import Feed

    def enter(feed: Feed, seed: Any) -> None:
        seed(epoch=feed.position.epoch, offset=feed.position.offset, part=feed.rank_info.world_rank)

    patch.setattr(Feed, "_enter_part", enter)


@mutant(
    "tests/local/test_equal_runs.py::test_whatever_happens_to_four_parts_numbers_differ_by_rounding_at_most"
    "[augmentation in loader processes-kills]"
)
def seed_once_per_epoch(patch: Patch) -> None:
    instead("raysgd.replica.steps.feed.Feed._enter_part", lambda feed, seed: None)(patch)


# -- buffers ------------------------------------------------------------------------------------------


@mutant("tests/torch/test_buffers.py::test_all_ranks_have_those_of_rank_0[False-per_worker]")
def send_no_buffers(patch: Patch) -> None:
    instead("raysgd.torch.state.buffers.RestoreBuffers._send", lambda self: None)(patch)


@mutant("tests/torch/test_auto_batch.py::test_running_statistics_are_those_of_the_first_part[2-0-sends-1]")
def send_buffers_after_the_step(patch: Patch) -> None:
    for name in ("on_whole_step", "on_other_step"):
        instead(f"raysgd.torch.state.buffers.RestoreBuffers.{name}", lambda self, step, optimizer: None)(patch)


# -- what a save writes -------------------------------------------------------------------------------


SAVED = "tests/local/test_faults.py::test_states_that_are_saved_and_loaded"


@mutant(SAVED)
def leave_one_shard_out_of_a_save(patch: Patch) -> None:
    from raysgd.torch.state import shard_files

    original = shard_files.write

    def write(folder: Any, state: Any, *, later: bool) -> Any:
        report = original(folder, state, later=later)

        def without_the_second() -> Any:
            files = report()
            for name in [name for name in files if name.startswith("__1_")]:
                (folder / name).unlink()
                del files[name]
            return files

        return without_the_second

    patch.setattr(shard_files, "write", write)


@mutant("tests/training/test_background_saves.py::test_save_returns_before_the_file_exists_and_shutdown_waits_for_it")
def store_the_live_tensors_in_the_background(patch: Patch) -> None:
    uncopied = lambda state, memory, *, in_shards: (state, contextlib.nullcontext())  # noqa: E731
    instead("raysgd.torch.state.states.unchanging", uncopied)(patch)


@mutant(
    "tests/contracts/test_replica.py::test_no_step_waits_until_a_snapshot_is_packed_which_has_the_bits_of_its_step[torch]"
)
def pack_the_live_tensors_later(patch: Patch) -> None:
    from raysgd.torch.replica import TorchReplica
    from raysgd.torch.state.packing import packed

    class Later(contextlib.ExitStack):
        def __init__(self, state: Any) -> None:
            super().__init__()
            self.size, self.state = 1, state

        def __enter__(self) -> Any:
            return [packed(self.state)]

    patch.setattr(TorchReplica, "copy", lambda self, state: (Later(state), len(packed(state))))


@mutant(
    "tests/torch/checkpoint/test_host_memory.py::test_later_steps_do_not_change_a_copy_and_its_memory_is_used_again"
)
def use_the_memory_of_a_copy_that_is_not_sent_yet(patch: Patch) -> None:
    from raysgd.torch.state.host_memory import HostMemory

    original = HostMemory.copy

    def copy(self: Any, layout: Any) -> Any:
        made = original(self, layout)
        self._rooms[:] = [made.room]
        return made

    patch.setattr(HostMemory, "copy", copy)


@mutant("tests/torch/checkpoint/test_host_memory.py::test_only_another_thread_waits_for_a_gpu")
def send_before_the_device_has_copied(patch: Patch) -> None:
    from raysgd.torch.state.host_memory import HostCopy

    patch.setattr(HostCopy, "__enter__", lambda self: [self.room.numpy().data[: self.size]])


@mutant("tests/torch/checkpoint/test_states.py::test_every_save_has_the_versions_of_modules")
def leave_the_versions_of_modules_out_of_shards(patch: Patch) -> None:
    instead("raysgd.torch.state.shard_files.with_module_versions", lambda state, source: state)(patch)


@mutant("tests/torch/checkpoint/test_damage.py::test_every_save_has_checksums")
def write_no_checksums(patch: Patch) -> None:
    from raysgd.torch.state import states

    patch.setattr(states, "write", lambda state, file: states.torch.save(state, file))


# -- when a save is complete --------------------------------------------------------------------------


@mutant("tests/contracts/test_saves.py::test_a_draft_that_something_else_has_changed_does_not_replace_the_old_file")
def keep_a_draft_that_is_not_what_was_written(patch: Patch) -> None:
    instead("raysgd.trainer.saves.FileDraft._compare", lambda self, draft, report: None)(patch)


@mutant("tests/contracts/test_saves.py::test_a_worker_that_seemed_to_fail_never_mixes_its_bytes_with_another_ones")
def let_the_worker_after_a_failure_write_to_the_same_draft(patch: Patch) -> None:
    from raysgd.trainer.saves import _Save

    original = _Save.begin

    def begin(self: Any, *given: Any, **named: Any) -> Any:
        if (draft := self._draft) is not None:
            self._draft, self._make = None, lambda where: draft
        return original(self, *given, **named)

    patch.setattr(_Save, "begin", begin)


@mutant("tests/contracts/test_saves.py::test_a_save_that_was_abandoned_does_not_replace_the_old_file")
def complete_a_save_that_was_abandoned(patch: Patch) -> None:
    instead("raysgd.trainer.saves._Save.close", lambda self, error: None)(patch)


@mutant("tests/storage/test_atomic_writes.py::test_a_file_is_on_the_disk_before_it_is_renamed_and_the_new_name_after")
def rename_a_file_before_it_is_on_the_disk(patch: Patch) -> None:
    instead("raysgd.storage.durable.DurableFile.sync", lambda self: None)(patch)


@mutant("tests/torch/checkpoint/test_sharded_saves.py::test_a_save_that_fails_at_its_end_leaves_the_old_shards")
def delete_the_old_shards_before_the_new_ones_are_listed(patch: Patch) -> None:
    from raysgd.storage import locations
    from raysgd.torch.state import shard_files
    from raysgd.torch.state.sharded import _ShardedDraft

    original = _ShardedDraft._replace

    def replace(self: Any, files: Any) -> None:
        locations.delete(self.where / shard_files.read_manifest(self.where)[0])
        original(self, files)

    patch.setattr(_ShardedDraft, "_replace", replace)


@mutant("tests/train/test_function_checkpoints.py::test_metadata_and_the_list_agree_at_every_moment")
def write_the_list_before_its_files(patch: Patch) -> None:
    from raysgd.storage import folders, locations
    from raysgd.train import checkpoint

    def write_listed(folder: Path, name: str, data: bytes) -> None:
        entries = {**(folders.read_list(folder) or {}), name: folders.entry_of_bytes(data)}
        locations.write(folder / folders.MARKER, folders.dump_list(entries))
        locations.write(folder / name, data)

    patch.setattr(checkpoint, "_write_listed", write_listed)


@mutant("tests/training/test_background_saves.py::test_each_failed_save_is_reported")
def forget_the_error_of_a_save_in_the_background(patch: Patch) -> None:
    instead("raysgd.trainer.saves.Saves.raise_failed", lambda self: None)(patch)


# -- which checkpoints stay ---------------------------------------------------------------------------


@mutant("tests/training/test_auto_checkpoint.py::test_the_newest_and_the_best_stay")
def delete_the_best_of_the_automatic_checkpoints(patch: Patch) -> None:
    from raysgd.trainer.auto_checkpoint import CheckpointFolder

    def prune(self: CheckpointFolder) -> None:
        for place in self.newest_first()[self.settings.keep :]:
            self.forget(place)

    patch.setattr(CheckpointFolder, "_prune", prune)


@mutant("tests/training/test_auto_checkpoint.py::test_a_damaged_or_incomplete_checkpoint_is_never_taken")
def resume_from_a_damaged_checkpoint(patch: Patch) -> None:
    instead("raysgd.trainer.auto_checkpoint.CheckpointFolder.is_damaged", lambda self, place: False)(patch)


@mutant("tests/training/test_auto_checkpoint.py::test_a_folder_belongs_to_one_trainer")
def let_two_trainers_use_one_folder(patch: Patch) -> None:
    instead("raysgd.storage.claims.fcntl.flock", lambda descriptor, how: None)(patch)


@mutant("tests/train/test_checkpoint_manager.py::test_as_many_are_kept_as_the_strategy_says")
def keep_the_worst_checkpoints_of_a_function(patch: Patch) -> None:
    from raysgd.train.run.checkpoint_manager import CheckpointManager

    original = CheckpointManager._score
    patch.setattr(CheckpointManager, "_score", lambda self, *given: -original(self, *given))


@mutant("tests/train/test_checkpoint_manager.py::test_checkpoints_of_an_earlier_run_are_adopted")
def number_checkpoints_again_after_a_resume(patch: Patch) -> None:
    from raysgd.train.run.checkpoint_manager import CheckpointManager

    original = CheckpointManager.adopt

    def adopt(self: CheckpointManager, *given: Any, **named: Any) -> None:
        latest = self.latest_id
        original(self, *given, **named)
        self.latest_id = latest

    patch.setattr(CheckpointManager, "adopt", adopt)


# -- what a load verifies -----------------------------------------------------------------------------


@mutant("tests/torch/checkpoint/test_damage.py::test_a_flipped_bit_in_any_part_is_detected")
def compare_no_checksum_of_a_file(patch: Patch) -> None:
    instead("raysgd.storage.checksums.verify", lambda source: True)(patch)


@mutant("tests/local/test_faults.py::test_each_file_of_a_sharded_checkpoint_is_verified")
def compare_no_digest_of_a_shard(patch: Patch) -> None:
    instead("raysgd.torch.state.shard_files.verify", lambda folder, files: None)(patch)


@mutant("tests/train/test_function_checkpoints.py::test_added_files_are_ignored_and_changed_files_are_reported")
def compare_no_digest_of_a_functions_folder(patch: Patch) -> None:
    instead("raysgd.storage.folders.check_entry", lambda where, name, found, listed: None)(patch)


@mutant("tests/torch/checkpoint/test_trust.py::test_no_code_from_a_file_runs")
def trust_every_file(patch: Patch) -> None:
    import torch

    original = torch.load
    patch.setattr(torch, "load", lambda *given, **named: original(*given, **{**named, "weights_only": False}))


@mutant("tests/torch/checkpoint/test_contents.py::test_what_does_not_fit_is_refused_and_changes_nothing")
def load_a_state_that_does_not_fit(patch: Patch) -> None:
    instead("raysgd.torch.replica.TorchReplica.check", lambda self, state: None)(patch)


# -- what a load changes ------------------------------------------------------------------------------


@mutant(SAVED)
def load_on_one_rank_only(patch: Patch) -> None:
    from raysgd.torch.replica import TorchReplica

    original = TorchReplica.adopt
    patch.setattr(TorchReplica, "adopt", lambda self, state: self.rank or original(self, state))


@mutant("tests/torch/checkpoint/test_contents.py::test_after_an_error_in_load_state_dict_only_a_load_is_accepted")
def accept_any_call_in_an_undefined_state(patch: Patch) -> None:
    instead("raysgd.engine.call_loop.CallLoop._check_defined", lambda self: None)(patch)


@mutant("tests/contracts/test_replica.py::test_a_state_of_which_a_part_was_loaded_is_none")
def pass_on_a_state_that_a_failed_load_has_left(patch: Patch) -> None:
    from raysgd.replica.replica_base import ReplicaBase

    always = property(lambda self: False, lambda self, value: None)
    patch.setattr(ReplicaBase, "undefined", always, raising=False)


@mutant("tests/torch/checkpoint/test_contents.py::test_no_worker_loads_what_one_refuses")
def check_no_position(patch: Patch) -> None:
    instead("raysgd.torch.state.checks.check_counters", lambda state: None)(patch)


@mutant("tests/local/test_faults.py::test_after_an_error_of_one_rank_in_a_load_only_a_load_is_accepted")
def let_each_rank_decide_about_a_load(patch: Patch) -> None:
    instead("raysgd.torch.replica.TorchReplica.all_succeeded", lambda self, here: here)(patch)


REPEATS = "tests/torch/checkpoint/test_states.py::test_training_after_a_load_equals_uninterrupted_training"


@mutant(REPEATS)
def load_no_schedules(patch: Patch) -> None:
    instead("torch.optim.lr_scheduler.LRScheduler.load_state_dict", lambda self, state: None)(patch)


@mutant(REPEATS)
def load_no_place_in_the_data(patch: Patch) -> None:
    instead("raysgd.replica.replica_base.ReplicaBase._adopt_positions", lambda self, state: None)(patch)


# -- training functions -------------------------------------------------------------------------------


ROUNDS = "tests/train/test_rounds.py::test_"


@mutant(f"{ROUNDS}the_ranks_wait_for_slow_storage_and_the_driver_does_not")
def acknowledge_a_report_before_it_is_stored(patch: Patch) -> None:
    from raysgd.train.run.rounds import FunctionRun, Round

    original = FunctionRun._close_round

    def close_round(self: FunctionRun, round_: Round) -> None:
        original(self, round_)
        self._let_everyone_continue()

    patch.setattr(FunctionRun, "_close_round", close_round)


@mutant(f"{ROUNDS}a_rank_waits_until_all_have_reported")
def acknowledge_a_report_when_it_arrives(patch: Patch) -> None:
    from raysgd.train.run.rounds import FunctionRun

    original = FunctionRun.receive

    def receive(self: FunctionRun, message: Any, body: Any, acknowledge: Any) -> None:
        original(self, message, body)
        acknowledge()

    patch.setattr(FunctionRun, "receive", receive)


@mutant(f"{ROUNDS}a_rank_does_not_wait_for_one_that_has_returned")
def wait_for_a_rank_that_has_returned(patch: Patch) -> None:
    instead("raysgd.train.run.rounds.FunctionRun.note_return", lambda self, rank: None)(patch)


@mutant(f"{ROUNDS}slow_storage_delays_no_recovery_and_a_round_is_visible_after_its_checkpoint_is_stored")
def show_a_round_before_the_checkpoints_of_earlier_ones_are_stored(patch: Patch) -> None:
    from raysgd.train.run.checkpoint_manager import BackgroundWriter

    original = BackgroundWriter.put

    def put(self: BackgroundWriter, work: Any, *, stores: bool) -> None:
        original(self, work, stores=stores) if stores else work()

    patch.setattr(BackgroundWriter, "put", put)


@mutant("tests/simulation/test_functions.py::test_schedules_of_faults_break_no_guarantee")
def mix_the_rounds_of_two_attempts(patch: Patch) -> None:
    from raysgd.train.run.rounds import FunctionRun

    begin = FunctionRun.begin_attempt

    def begin_attempt(self: FunctionRun, world_size: int, nodes: Any = ()) -> Any:
        old = self._round
        attempt = begin(self, world_size, nodes)
        self._round._reports |= old._reports
        return attempt

    patch.setattr(FunctionRun, "begin_attempt", begin_attempt)


@mutant(f"{ROUNDS}after_a_mismatch_nothing_is_a_round")
def show_rounds_after_a_mismatch(patch: Patch) -> None:
    instead("raysgd.train.run.rounds.FunctionRun._end_with", lambda self, error: self._fail(error))(patch)


@mutant("tests/train/test_run_session.py::test_restore_discards_uncommitted_changes")
def commit_the_live_objects(patch: Patch) -> None:
    instead("raysgd.train.elastic_state.copied", lambda value: value)(patch)


@mutant("tests/train/test_run_session.py::test_another_run_begins_without_the_commits_of_the_one_before")
def take_over_the_commit_of_an_earlier_run(patch: Patch) -> None:
    from raysgd.train.replica import FunctionReplica

    original = FunctionReplica.function

    def function(self: FunctionReplica, task: Any, attempt: Any, checkpoint: Any, **engines: Any) -> Any:
        self._run_number = attempt.run
        return original(self, task, attempt, checkpoint, **engines)

    patch.setattr(FunctionReplica, "function", function)


# -- what has arrived whole ---------------------------------------------------------------------------


NCCL = "tests/torch/test_nccl.py::test_"
HOST = "tests/workers/test_replica_host.py::test_"


@mutant(f"{NCCL}after_an_abort_nothing_is_whole_but_what_was_seen")
def take_what_an_abort_has_cut_off_for_whole(patch: Patch) -> None:
    instead("raysgd.torch.group.process_group.TorchBackend._check_not_aborted", lambda self: None)(patch)


@mutant(f"{NCCL}a_look_waits_for_the_device_and_then_for_nothing_that_was_seen")
def look_for_an_abort_without_the_device(patch: Patch) -> None:
    from raysgd.torch.group.process_group import TorchBackend

    instead(
        "raysgd.torch.group.process_group.TorchBackend.ensure_whole",
        lambda self, **_: TorchBackend._check_not_aborted(self),
    )(patch)


@mutant(f"{NCCL}a_step_with_broken_gradients_changes_nothing")
def let_steps_act_on_broken_gradients(patch: Patch) -> None:
    for look in ("on_whole_step", "on_other_step", "look_again", "before_commit"):
        instead(f"raysgd.torch.step.whole_gradients.WholeGradients.{look}", lambda self, *_: None)(patch)


@mutant(f"{HOST}while_a_failure_is_handled_every_exception_is_an_interruption")
def blame_the_user_for_what_a_failure_has_caused(patch: Patch) -> None:
    def is_interruption(self: Any, error: BaseException, verb: str) -> bool:
        return self._control.interrupted and isinstance(error, (RuntimeError, OSError))

    instead("raysgd.workers.replica_host.ReplicaHost._is_interruption", is_interruption)(patch)


if __name__ == "__main__":
    for each in sys.argv[1:] or MUTANTS:
        print(f"{detected(each) or 'NOT DETECTED':12}  {each}: {MUTANTS[each][0]}", flush=True)
