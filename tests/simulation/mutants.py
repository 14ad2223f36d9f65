"""Break the recovery protocol in named ways. The simulation must detect each of them.

Each function breaks one thing with monkeypatch; its name says what. detected.json has the
number of seeds that each one needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core import hang
from raysgd.core.channel.messages import Interrupt, ProgressReport, ProposeBoundary
from raysgd.core.control import Control
from raysgd.core.decisions import policy
from raysgd.core.decisions.gpu_failures import GpuFailures
from raysgd.core.decisions.policy import PLANNED, Observation, Recovery
from raysgd.core.decisions.sampling_plan import RankShare, SamplingPlan
from raysgd.core.measures import metrics
from raysgd.core.measures.progress import Progress
from raysgd.core.snapshot import Snapshot, SnapshotStore
from raysgd.engine import boundary, call_loop, failure, generation, membership, recovery
from raysgd.engine.call_loop import CallLoop
from raysgd.engine.engine import Engine
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.recovery import RecoveryLog, RecoveryLoop
from raysgd.engine.replacements import Replacements
from raysgd.engine.watchdog import Watchdog
from raysgd.engine.worker_info import Leaver, WorkerInfo
from raysgd.engine.worker_table import WorkerTable
from raysgd.replica import loading
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Step
from raysgd.trainer.within_call import Contents
from raysgd.workers.control_client import ControlClient
from raysgd.workers.events import WorkerEnded
from raysgd.workers.replica_host import ReplicaHost
from tests.simulation.replica import SimReplica
from tests.simulation.seeds import simulate

__all__ = ["MUTANTS", "seeds_needed"]

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(breaks: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[breaks.__name__] = breaks
    return breaks


def seeds_needed(name: str, most: int, *, step: int = 10) -> int | None:
    """Return within how many seeds the simulation detects a mutant, None if it does not."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        for first in range(0, most, step):
            if simulate(first, min(step, most - first)).failed:
                return first + step
    return None


# -- state and samples --------------------------------------------------------------------------------


@mutant
def skip_the_agreement_on_state(patch: Patch) -> None:
    patch.setattr(Generation, "_behind", lambda self, workers: ("", []))


@mutant
def discard_the_most_advanced_state(patch: Patch) -> None:
    def least_advanced(progress: dict[str, Progress], snapshot: Any = None) -> str | None:
        return min(progress, key=lambda worker: progress[worker].order, default=None)

    patch.setattr(generation, "newest_state", least_advanced)
    patch.setattr(recovery, "newest_state", least_advanced)


@mutant
def dismiss_the_most_advanced_survivor(patch: Patch) -> None:
    original = RecoveryLoop._survivors

    def survivors(self: RecoveryLoop, case: Any) -> list[str]:
        found = original(self, case)
        if len(found) > 1:
            best = max(found, key=lambda worker: self._table[worker].progress.order)
            self._table.dismiss(best)
            found.remove(best)
        return found

    patch.setattr(RecoveryLoop, "_survivors", survivors)


@mutant
def forget_what_was_applied(patch: Patch) -> None:
    patch.setattr(Step, "counts", lambda self, *, failed: not failed and self.closing)


@mutant
def assign_a_shard_twice(patch: Patch) -> None:
    original = SamplingPlan.parts_of
    patch.setattr(SamplingPlan, "parts_of", lambda self, rank, offset: original(self, 0, offset))


@mutant
def skip_a_sample(patch: Patch) -> None:
    original = SamplingPlan.parts_of

    def parts_of(self: SamplingPlan, rank: int, offset: int) -> Any:
        found = original(self, rank, offset)
        return ((after, RankShare(part.start + (rank == 0), part.stop, part.fresh)) for after, part in found)

    patch.setattr(SamplingPlan, "parts_of", parts_of)


@mutant
def repeat_a_sample_after_loading(patch: Patch) -> None:
    original = Position.adopt

    def adopt(self: Position, values: Any) -> None:
        original(self, values)
        self.offset = max(self.offset - 1, 0)

    patch.setattr(Position, "adopt", adopt)


@mutant
def lose_a_sample_after_loading(patch: Patch) -> None:
    original = Position.adopt

    def adopt(self: Position, values: Any) -> None:
        original(self, values)
        self.offset += 1

    patch.setattr(Position, "adopt", adopt)


@mutant
def begin_the_call_again_after_a_failure(patch: Patch) -> None:
    original = Position.open_call

    def open_call(self: Position, call: int) -> bool:
        self.call = -1
        return original(self, call)

    patch.setattr(Position, "open_call", open_call)


@mutant
def end_epochs_early(patch: Patch) -> None:
    original = SamplingPlan.steps_left
    patch.setattr(SamplingPlan, "steps_left", lambda self, offset: max(original(self, offset) - 1, 0))


@mutant
def rescue_no_state(patch: Patch) -> None:
    patch.setattr(Generation, "rescue_state", lambda self, worker, call: True)


@mutant
def forget_who_holds_the_state(patch: Patch) -> None:
    patch.setattr(ReplicaHost, "_lacks_state", property(lambda self: False, lambda self, value: None), raising=False)


@mutant
def rank_loaded_states_as_old(patch: Patch) -> None:
    order = property(lambda self: (self.step, self.applied, self.epoch, self.finished))
    patch.setattr(Progress, "order", order)


@mutant
def load_what_another_rank_refuses(patch: Patch) -> None:
    original = loading.agreed

    def agreed(replica: Any, part: Any) -> Any:
        value, refusal = original(replica, part)
        return value, refusal if refusal is not None and refusal.why else None

    patch.setattr(loading, "agreed", agreed)


@mutant
def accept_any_call_in_an_undefined_state(patch: Patch) -> None:
    patch.setattr(CallLoop, "_check_defined", lambda self: None)


@mutant
def pass_on_an_undefined_state(patch: Patch) -> None:
    patch.setattr(SimReplica, "progress", property(lambda self: self._position.progress(self.control.phase)))


# -- generations and members --------------------------------------------------------------------------


@mutant
def accept_an_old_generation(patch: Patch) -> None:
    original = ControlClient._handle

    def handle(self: ControlClient, message: Any) -> None:
        original(self, replace(message, generation=1 << 30) if isinstance(message, Interrupt) else message)

    patch.setattr(ControlClient, "_handle", handle)


@mutant
def number_all_generations_alike(patch: Patch) -> None:
    patch.setattr(Generation, "number", property(lambda self: 1, lambda self, value: None), raising=False)


@mutant
def give_two_workers_one_rank(patch: Patch) -> None:
    original = generation.assign_ranks

    def assign_ranks(nodes: Any, **given: Any) -> Any:
        infos = original(nodes, **given)
        return [*infos[:-1], infos[0]] if len(infos) > 1 else infos

    patch.setattr(generation, "assign_ranks", assign_ranks)


@mutant
def ignore_failures_while_forming(patch: Patch) -> None:
    patch.setattr(Generation, "_all_ok", lambda self, outcomes: True)


@mutant
def let_spares_join(patch: Patch) -> None:
    original = Replacements.take
    patch.setattr(Replacements, "take", lambda self, most: original(self, most + 1))


@mutant
def continue_with_too_few_workers(patch: Patch) -> None:
    original = policy.decide
    patch.setattr(policy, "decide", lambda now, wait_s: original(replace(now, min_workers=1), wait_s=wait_s))


@mutant
def ignore_a_resize(patch: Patch) -> None:
    original = Membership.resize
    patch.setattr(Membership, "resize", lambda self, count: original(self, self.target))


@mutant
def keep_the_size_of_a_change_that_was_given_up(patch: Patch) -> None:
    patch.setattr(Membership, "give_up_change", lambda self, target: None)


@mutant
def call_every_failure_in_a_change_a_preemption(patch: Patch) -> None:
    original = RecoveryLoop._dismiss_failed

    def dismiss_failed(self: RecoveryLoop, case: Any) -> None:
        reason = case.seen.reason
        original(self, case)
        if reason in PLANNED and case.seen.reason not in PLANNED:
            case.seen = replace(case.seen, reason="preemption")

    patch.setattr(RecoveryLoop, "_dismiss_failed", dismiss_failed)


@mutant
def leave_processes_behind(patch: Patch) -> None:
    patch.setattr(Engine, "_end_group", lambda self, **_: None)


# -- the boundary, and preemption ---------------------------------------------------------------------


@mutant
def skip_the_confirmation(patch: Patch) -> None:
    original = Control.propose

    def propose(self: Control, step: int) -> bool:
        accepted = original(self, step)
        self._confirmed = True
        return accepted

    patch.setattr(Control, "propose", propose)


@mutant
def confirm_when_one_rank_agrees(patch: Patch) -> None:
    patch.setattr(boundary, "all", any, raising=False)


@mutant
def accept_a_step_that_has_begun(patch: Patch) -> None:
    original = Control.propose
    patch.setattr(Control, "propose", lambda self, step: original(self, step) or True)


@mutant
def stop_one_rank_a_batch_early(patch: Patch) -> None:
    original = ControlClient._handle

    def handle(self: ControlClient, message: Any) -> None:
        early = isinstance(message, ProposeBoundary) and self._worker.endswith("1")
        original(self, replace(message, step=message.step - 1) if early else message)

    patch.setattr(ControlClient, "_handle", handle)


@mutant
def keep_a_boundary_for_later_calls_and_generations(patch: Patch) -> None:
    def clear(self: Control) -> None:
        self.interrupted = False

    patch.setattr(Control, "withdraw", lambda self: None)
    patch.setattr(Control, "clear", clear)


@mutant
def ignore_a_notice(patch: Patch) -> None:
    patch.setattr(Membership, "look_for_leavers", lambda self: None)


@mutant
def leave_too_late(patch: Patch) -> None:
    patch.setattr(membership, "leave_within_s", lambda deadline_s: 100.0)
    patch.setattr(membership, "is_time_to_leave", lambda **given: given["left_s"] <= 0)


@mutant
def tell_of_a_preemption_twice(patch: Patch) -> None:
    def not_notified(self: Membership) -> Any:
        return {info: leaver for info, leaver in self._leavers().items() if leaver.reason == "preemption"}

    patch.setattr(Membership, "_find_unnotified", not_notified)


@mutant
def announce_a_preemption_to_all(patch: Patch) -> None:
    def not_notified(self: Membership) -> Any:
        if not self._leavers() or any(leaver.notified for leaver in self._leavers().values()):
            return {}
        for worker in self._find_staying():
            self._table.set_leaver(worker, Leaver("preemption"))
        return self._leavers()

    patch.setattr(Membership, "_find_unnotified", not_notified)


# -- failures, hangs and errors of user code ----------------------------------------------------


@mutant
def ignore_the_end_of_a_worker(patch: Patch) -> None:
    original = WorkerTable._take
    patch.setattr(WorkerTable, "_take", lambda self, event: isinstance(event, WorkerEnded) or original(self, event))


@mutant
def never_kill_a_rank_that_hangs(patch: Patch) -> None:
    patch.setattr(Watchdog, "tick", lambda self, running, **given: None)


@mutant
def kill_the_ranks_that_wait(patch: Patch) -> None:
    original = hang.blocking_ranks

    def blocking_ranks(reports: Any, **given: Any) -> list[str]:
        found = original(reports, **given)
        return [worker for worker in reports if worker not in found] if found else []

    patch.setattr(hang, "blocking_ranks", blocking_ranks)


@mutant
def retry_an_error_of_the_user(patch: Patch) -> None:
    original = call_loop.classify

    def classify(outcomes: Any) -> Observation:
        seen = original(outcomes)
        return Observation("broken", reason="network") if seen.kind == "user_error" else seen

    patch.setattr(call_loop, "classify", classify)


@mutant
def raise_a_copy_of_the_users_error(patch: Patch) -> None:
    def raise_copy(outcome: Any, info: Any) -> None:
        raise type(outcome.error)(*outcome.error.args)

    patch.setattr(failure, "raise_user_error", raise_copy)


@mutant
def report_network_faults_that_are_none(patch: Patch) -> None:
    original = call_loop.classify

    def classify(outcomes: Any) -> Observation:
        seen = original(outcomes)
        return Observation("broken", reason="network") if seen.kind == "paused" else seen

    patch.setattr(call_loop, "classify", classify)


@mutant
def run_a_function_twice(patch: Patch) -> None:
    patch.setattr(call_loop, "_collect_answers", lambda outcomes: None)


# -- broken GPUs --------------------------------------------------------------------------------------


@mutant
def use_gpus_that_have_failed_twice(patch: Patch) -> None:
    patch.setattr(GpuFailures, "exclude", lambda self, gpus: False)


@mutant
def raise_the_error_of_a_broken_gpu(patch: Patch) -> None:
    patch.setattr(ReplicaHost, "_broken", lambda self, error, verb: None)


# -- metrics ------------------------------------------------------------------------------------------


@mutant
def merge_a_metric_twice(patch: Patch) -> None:
    original = metrics.merge_measured
    patch.setattr(metrics, "merge_measured", lambda parts: original([*parts, *parts[:1]]))


@mutant
def lose_the_metrics_of_a_part(patch: Patch) -> None:
    original = metrics.merge_measured
    patch.setattr(metrics, "merge_measured", lambda parts: original(parts[-1:]))


@mutant
def count_work_that_is_redone(patch: Patch) -> None:
    patch.setattr(CallLoop, "_drop_repeated_work", lambda self, parts, revived, running: parts)


@mutant
def count_metrics_of_an_earlier_call(patch: Patch) -> None:
    patch.setattr(WorkerTable, "begin_run", lambda self, worker, method: None)


@mutant
def save_without_what_earlier_parts_have_measured(patch: Patch) -> None:
    patch.setattr(Contents, "call", property(lambda self: self.part))


# -- confirmations, numbers and comparisons -----------------------------------------------------------


@mutant
def keep_the_older_snapshot(patch: Patch) -> None:
    def offer(self: SnapshotStore, snapshot: Snapshot) -> None:
        self._latest = self._latest or snapshot

    patch.setattr(SnapshotStore, "offer", offer)


@mutant
def keep_no_snapshot(patch: Patch) -> None:
    patch.setattr(SnapshotStore, "offer", lambda self, snapshot: None)


@mutant
def use_late_replies(patch: Patch) -> None:
    original = WorkerTable._note_call_end

    def call_ended(self: WorkerTable, info: WorkerInfo, event: Any) -> None:
        original(self, info, replace(event, call=info.last_call))

    patch.setattr(WorkerTable, "_note_call_end", call_ended)


@mutant
def let_old_progress_replace_new(patch: Patch) -> None:
    original = WorkerTable._receive_message

    def received(self: WorkerTable, info: WorkerInfo, message: Any) -> None:
        if isinstance(message, ProgressReport):
            message = replace(message, call=info.last_call, progress=replace(message.progress, step=0))
        original(self, info, message)

    patch.setattr(WorkerTable, "_receive_message", received)


@mutant
def allow_one_failure_more(patch: Patch) -> None:
    original = policy.decide

    def decide(now: Any, *, wait_s: float) -> Any:
        return original(replace(now, failures=now.failures - 1), wait_s=wait_s)

    patch.setattr(policy, "decide", decide)


@mutant
def allow_one_failure_less(patch: Patch) -> None:
    original = policy.decide

    def decide(now: Any, *, wait_s: float) -> Any:
        return original(replace(now, failures=now.failures + 1), wait_s=wait_s)

    patch.setattr(policy, "decide", decide)


@mutant
def give_new_workers_no_state(patch: Patch) -> None:
    patch.setattr(Generation, "load", lambda self, workers, state: True)


@mutant
def share_no_state(patch: Patch) -> None:
    original = Generation._rendezvous
    patch.setattr(Generation, "_rendezvous", lambda self, workers, *_: original(self, workers, "", []))


@mutant
def keep_workers_with_a_part_of_a_state(patch: Patch) -> None:
    patch.setattr(Replacements, "dismiss_torn", lambda self: False)


@mutant
def forget_the_rest_of_a_call_that_has_ended(patch: Patch) -> None:
    patch.setattr(CallLoop, "_run_again", lambda self, running: None)


@mutant
def name_the_wrong_number_of_workers(patch: Patch) -> None:
    original = RecoveryLog.record

    def record(self: RecoveryLog, recovery: Recovery, **given: Any) -> None:
        original(self, replace(recovery, world_size_after=recovery.world_size_after + 1), **given)

    patch.setattr(RecoveryLog, "record", record)


@mutant
def divide_an_epoch_among_too_few_ranks(patch: Patch) -> None:
    original = SamplingPlan.offset_after
    patch.setattr(SamplingPlan, "offset_after", lambda self, offset: max(original(self, offset) - 1, offset + 1))


@mutant
def count_repeated_samples(patch: Patch) -> None:
    original = SamplingPlan.of_rank

    def of_rank(self: SamplingPlan, rank: int, offset: int) -> Any:
        return [part._replace(fresh=True) for part in original(self, rank, offset)]

    patch.setattr(SamplingPlan, "of_rank", of_rank)


@mutant
def never_start_replacements(patch: Patch) -> None:
    patch.setattr(Replacements, "launch", lambda self, count: None)


@mutant
def forget_the_failure_of_a_data_loader(patch: Patch) -> None:
    original = call_loop.classify

    def classify(outcomes: Any) -> Observation:
        seen = original(outcomes)
        return Observation("done") if seen.reason == "data loader" else seen

    patch.setattr(call_loop, "classify", classify)


@mutant
def commit_a_batch_before_its_step(patch: Patch) -> None:
    patch.setattr(Step, "counts", lambda self, *, failed: self.closing)
