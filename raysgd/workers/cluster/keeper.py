"""Keep the lease of a trainer with a name in an actor, and hold it for this driver. Both.

The actor is the only part of a trainer that knows who its driver is. It reserves nothing, and runs
on the head node, without which a cluster ends anyway. It ends itself when the lease was not renewed
for as long as orphans wait."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.decisions.lease import LEASE_S, PATIENCE_S, RENEW_EVERY_S, WITNESSED_S, Lease
from raysgd.errors import ClusterError, ConfigError, SupersededError, TrainerBusyError

logger = logging.getLogger("raysgd")

NAMESPACE = "raysgd"
HEAD = {"node:__internal_head__": 0.001}
ANSWER_S = 30.0
RENEWALS = 3  # at most, before an act


def keeper_name(name: str) -> str:
    return f"raysgd:{name}"


def worker_name(name: str, worker: str) -> str:
    return f"raysgd:{name}:{worker}"


def boot_time() -> float:
    """A time that also passes while this machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class KeeperActor:
    """Owns the lease of one trainer. Its calls are performed one at a time."""

    def __init__(self, orphan_s: float, lease: Lease) -> None:
        self._lease, self._orphan_s = lease, orphan_s
        lease.until = boot_time()
        threading.Thread(target=self._end_if_abandoned, daemon=True).start()

    def perform(self, method: str, *arguments: Any) -> Any:
        """Call a method of the lease."""
        return getattr(self._lease, method)(*arguments, boot_time())

    def workers(self) -> list[str]:
        return list(self._lease.workers)

    def waits_s(self) -> float:
        """For how long the workers wait for a script; 0 if it runs."""
        rest = self._lease.until - boot_time()
        return 0.0 if rest > 0 else max(rest + self._orphan_s, 0.1)

    def _end_if_abandoned(self) -> None:
        while boot_time() < self._lease.until + self._orphan_s + PATIENCE_S:
            time.sleep(RENEW_EVERY_S)
        os._exit(0)


class Tenure:
    """Owns this driver's term, and the thread that renews its lease. `record` is what the newest
    driver has committed, in parts. `leaves` is whether the workers stay when this driver ends:
    otherwise, the trainer ends with them."""

    def __init__(self, name: str, orphan_s: float) -> None:
        self.name, self.orphan_s = name, orphan_s
        self._over, self.superseded, self.leaves = threading.Event(), False, True
        self.on_renewed: Callable[[], None] = lambda: None
        self.on_superseded: Callable[[], None] = lambda: None
        self._renewed_at = boot_time()
        self._launched, self._former = list[str](), list[str]()  # workers: by this driver, and by earlier ones
        # Terms grow also if a keeper fails, and with it the number of the newest one is lost.
        self.term, self.record = int(time.time()), dict[str, bytes]()
        self._keeper = self._make_keeper()
        self.term, self.record = self._take()
        _let_sigterm_kill()
        threading.Thread(target=self._renew_often, name="raysgd-lease", daemon=True).start()

    def _make_keeper(self) -> Any:
        """Find or make the trainer's keeper. A new one begins with what this driver knows."""
        import ray

        workers = [*self._former, *self._launched]
        lease = Lease(self.term, self.record, workers, witnessed=self.term if workers else 0)
        keeper: Any = ray.remote(KeeperActor).options(
            name=keeper_name(self.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=HEAD,
        )
        return keeper.remote(self.orphan_s, lease)

    def _take(self) -> tuple[int, dict[str, bytes]]:
        """Wait a few seconds for a driver that has just ended. Raise TrainerBusyError if it has
        not."""
        until = boot_time() + PATIENCE_S
        while True:
            self._renewed_at = boot_time()
            grant = self._ask("take")
            if grant.term:
                return grant.term, dict(grant.record)
            if boot_time() > until:
                raise TrainerBusyError(
                    f"the trainer {self.name!r} has a driver: another script, or an object of this one. End that, or choose another "
                    f"name. If it was stopped, or its machine has failed, its lease ends in {grant.wait_s:.0f} s: try again then"
                )
            time.sleep(0.2)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        for attempt in (1, 2):
            try:
                return ray.get(self._keeper.perform.remote(method, *arguments), timeout=ANSWER_S)
            except ray.exceptions.RayActorError as error:
                if boot_time() - self._renewed_at > LEASE_S:
                    raise self._lost(
                        f"its lease was not renewed for {boot_time() - self._renewed_at:.0f} s, and the process that kept it has "
                        "ended, so another script may have taken them over"
                    ) from error
                if attempt == 1 and not self._over.is_set():
                    logger.warning(
                        "the process that keeps the lease of the trainer %r has failed: starting another", self.name
                    )
                    self._keeper = self._make_keeper()
                    continue
                failure: Exception = error
            except Exception as error:
                failure = error
            raise ClusterError(
                f"the process that keeps the lease of the trainer {self.name!r} does not answer: {failure}"
            ) from failure

    def _renew_often(self) -> None:
        while not self._over.wait(RENEW_EVERY_S):
            try:
                self._renew()
            except SupersededError:
                return
            except Exception as error:  # `check` raises it where it matters
                logger.debug("the lease was not renewed: %s", error)

    def _renew(self, parts: Mapping[str, bytes] | None = None) -> None:
        sent = boot_time()
        if self.superseded or not self._ask("renew", self.term, parts):
            raise self._lost("another script, or `raysgd end`, has taken them over")
        self._renewed_at = sent
        self.on_renewed()

    def _lost(self, why: str) -> SupersededError:
        self.superseded = True
        self.on_superseded()  # the other driver need not wait until this one makes its next call
        return SupersededError(f"this script cannot use the workers of the trainer {self.name!r} any more: {why}")

    def options(self, worker: str) -> dict[str, Any]:
        """The options of the actor that is this worker."""
        self._launched.append(worker)
        return {"name": worker_name(self.name, worker), "namespace": NAMESPACE, "lifetime": "detached"}

    def for_workers(self) -> WorkerTenure:
        return WorkerTenure(self.name, self.term, self.orphan_s)

    def check(self) -> None:
        """Raise SupersededError if another driver has taken over."""
        for _ in range(RENEWALS):  # this process may be stopped while it asks
            if self.superseded or boot_time() - self._renewed_at > WITNESSED_S:
                self._renew()

    def commit(self, parts: Mapping[str, bytes]) -> None:
        """Store what the next driver needs, before the call that it is about returns: the parts of
        the record that have changed."""
        self.record = {**self.record, **parts}
        self._renew(parts)

    def begin_again(self) -> None:
        """Forget what earlier drivers have committed, and their workers. Raise SupersededError if
        another driver has taken over."""
        self.record, self._former = {}, []
        if not self._ask("begin_again", self.term, self._launched):
            raise self._lost("another script, or `raysgd end`, has taken them over")

    def find_left_workers(self) -> dict[str, Any]:
        """Find the handles of the workers that are left and have not ended, by their names. End
        those that were still starting."""
        import ray

        handles, prefix = {}, worker_name(self.name, "")
        started = ray.get(self._keeper.workers.remote(), timeout=ANSWER_S)
        for each in [each for each in _actors() if each.startswith(prefix)]:
            worker = each.removeprefix(prefix)
            with contextlib.suppress(ValueError):  # it has ended since then
                handles[worker] = ray.get_actor(each, namespace=NAMESPACE)
                if worker not in started:
                    ray.kill(handles.pop(worker))
        self._former += handles
        return handles

    def stop(self) -> None:
        """Renew no longer. The keeper ends with the trainer."""
        import ray

        self._over.set()
        if not (self.leaves or self.superseded) and ray.is_initialized():
            ray.kill(self._keeper)


def _let_sigterm_kill() -> None:
    """Let SIGTERM end this script as SIGKILL does, so that its workers wait. Ray has made it a
    `sys.exit()`, which ends them. A handler that the user has installed stays."""
    made_by = getattr(signal.getsignal(signal.SIGTERM), "__module__", "") or ""
    if made_by.startswith("ray.") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_trainer(name: str) -> int:
    """End the workers of a trainer whose script has ended, and its keeper. Return how many there
    were. Raise ConfigError if no trainer has this name, TrainerBusyError if its script runs."""
    import ray

    if name not in (names := trainers()):
        raise ConfigError(
            f"no trainer of this cluster is called {name!r}: its trainers with a name are {sorted(names)}"
        )
    tenure = Tenure(name, 0.0)
    workers = tenure.find_left_workers()
    for worker in workers.values():
        ray.kill(worker)
    tenure.leaves = False
    tenure.stop()
    return len(workers)


def trainers() -> dict[str, float]:
    """For how many seconds the workers of each trainer with a name still wait for its script; 0 if
    that runs."""
    import ray

    waits: dict[str, float] = {}
    for each in [each for each in _actors() if each.count(":") == 1]:
        with contextlib.suppress(ValueError, ray.exceptions.RayActorError):  # it has ended since then
            keeper: Any = ray.get_actor(each, namespace=NAMESPACE)
            waits[each.removeprefix(keeper_name(""))] = ray.get(keeper.waits_s.remote(), timeout=ANSWER_S)
    return waits


def _actors() -> list[str]:
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in actors if each["namespace"] == NAMESPACE]


@dataclass(frozen=True)
class WorkerTenure:
    """What a worker of a trainer with a name asks the keeper, on any thread."""

    name: str
    term: int
    orphan_s: float

    def _keeper(self) -> Any:
        import ray

        return ray.get_actor(keeper_name(self.name), namespace=NAMESPACE)

    def enlist(self, worker: str) -> bool:
        """Whether the driver that has launched this worker is still the driver."""
        import ray

        return bool(ray.get(self._keeper().perform.remote("enlist", self.term, worker), timeout=ANSWER_S))

    def witness(self, term: int) -> None:
        """Tell the keeper that this term's driver has ended its connection. If Ray does not answer,
        do nothing."""
        import ray

        try:
            ray.get(self._keeper().perform.remote("witness", term), timeout=ANSWER_S)
        except Exception as error:
            logger.debug("the driver's end was not reported to the keeper of the lease: %s", error)
