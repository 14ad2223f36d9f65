"""Keep the lease of a trainer with a name in an actor, and hold it for this driver. Both.

The actor is the only part of a trainer that knows who its driver is. It reserves nothing, and runs
on the head node, without which a cluster ends anyway. It ends itself when nobody has renewed the
lease for as long as orphans wait."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.core.lease import PATIENCE_S, RENEW_EVERY_S, WITNESSED_S, Lease
from raysgd.errors import ClusterError, ConfigError, SupersededError, TrainerBusyError

logger = logging.getLogger("raysgd")

NAMESPACE = "raysgd"
HEAD = {"node:__internal_head__": 0.001}
ANSWER_S = 30.0


def keeper_name(name: str) -> str:
    return f"raysgd:{name}"


def worker_name(name: str, worker: str) -> str:
    return f"raysgd:{name}:{worker}"


def boot_time() -> float:
    """Return a time that also passes while this machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class KeeperActor:
    """Owns the lease of one trainer. Its calls are performed one at a time."""

    def __init__(self, orphan_s: float) -> None:
        self._lease = Lease(until=boot_time())
        self._orphan_s = orphan_s
        threading.Thread(target=self._end_if_abandoned, daemon=True).start()

    def perform(self, method: str, *given: Any) -> Any:
        """Call a method of the lease."""
        return getattr(self._lease, method)(*given, boot_time())

    def workers(self) -> list[str]:
        return list(self._lease.workers)

    def _end_if_abandoned(self) -> None:
        while boot_time() < self._lease.until + self._orphan_s + PATIENCE_S:
            time.sleep(RENEW_EVERY_S)
        os._exit(0)


class Tenure:
    """Owns this driver's term, and the thread that renews its lease. `record` is what the driver
    before has committed, b"" if there was none."""

    def __init__(self, name: str, orphan_s: float) -> None:
        import ray

        self.name, self.orphan_s = name, orphan_s
        actor: Any = ray.remote(KeeperActor)
        self._keeper = actor.options(
            name=keeper_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=HEAD,
        ).remote(orphan_s)
        self._over, self._superseded = threading.Event(), False
        self.on_renewed: Callable[[], None] = lambda: None
        self._renewed_at = boot_time()
        self.term, self.record = self._take()
        threading.Thread(target=self._renew_often, name="raysgd-lease", daemon=True).start()

    def _take(self) -> tuple[int, bytes]:
        """Wait a few seconds for a driver that has just ended. Raise TrainerBusyError if it has
        not."""
        until = boot_time() + PATIENCE_S
        while True:
            self._renewed_at = boot_time()
            grant = self._ask("take")
            if grant.term:
                return grant.term, grant.record
            if boot_time() > until:
                raise TrainerBusyError(
                    f"another script is the driver of the trainer {self.name!r}. If it has ended, or was stopped, its lease ends "
                    f"in {grant.wait_s:.0f} s: try again then, or choose another name"
                )
            time.sleep(0.2)

    def _ask(self, method: str, *given: Any) -> Any:
        import ray

        try:
            return ray.get(self._keeper.perform.remote(method, *given), timeout=ANSWER_S)
        except Exception as error:
            raise ClusterError(
                f"the actor that keeps the lease of the trainer {self.name!r} has failed: {error}"
            ) from error

    def _renew_often(self) -> None:
        while not self._over.wait(RENEW_EVERY_S):
            try:
                self._renew()
            except SupersededError:
                return
            except Exception as error:  # `check` raises it where it matters
                logger.debug("the lease was not renewed: %s", error)

    def _renew(self, record: bytes | None = None) -> None:
        sent = boot_time()
        if self._superseded or not self._ask("renew", self.term, record):
            self._superseded = True
            raise SupersededError(
                f"another script has taken over the workers of the trainer {self.name!r}: this one cannot use them any more"
            )
        self._renewed_at = sent
        self.on_renewed()

    @property
    def superseded(self) -> bool:
        return self._superseded

    def options(self, worker: str) -> dict[str, Any]:
        """Return the options of the actor that is this worker."""
        return {"name": worker_name(self.name, worker), "namespace": NAMESPACE, "lifetime": "detached"}

    def for_workers(self) -> WorkerTenure:
        return WorkerTenure(self.name, self.term, self.orphan_s)

    def check(self) -> None:
        """Raise SupersededError if another driver has taken over."""
        if self._superseded or boot_time() - self._renewed_at > WITNESSED_S:
            self._renew()

    def commit(self, record: bytes) -> None:
        """Store what the next driver needs, before the call that it is about returns."""
        self._renew(record)

    def left_workers(self) -> dict[str, Any]:
        """Return the handles of the workers that are left, by their names."""
        return _left_workers(self._keeper, self.name)

    def stop(self, *, end: bool) -> None:
        """Renew no longer. With `end`, the trainer has ended, and so does its keeper."""
        import ray

        self._over.set()
        if end and not self._superseded and ray.is_initialized():
            ray.kill(self._keeper)


def end_trainer(name: str) -> int:
    """End the workers of a trainer, and its keeper. Return how many there were. Raise ConfigError
    if there is no such trainer."""
    import ray

    try:
        keeper = ray.get_actor(keeper_name(name), namespace=NAMESPACE)
    except ValueError:
        found = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        names = sorted(each.removeprefix("raysgd:") for each in found if each.count(":") == 1 and "raysgd:" in each)
        raise ConfigError(f"there is no trainer {name!r} in this cluster: its trainers are {names}") from None
    workers = _left_workers(keeper, name)
    ray.kill(keeper)
    for worker in workers.values():
        ray.kill(worker)
    return len(workers)


def _left_workers(keeper: Any, name: str) -> dict[str, Any]:
    """Return the handles of a trainer's workers that have not ended, by their names. End those that
    were still starting."""
    import ray

    found, prefix = {}, worker_name(name, "")
    started = ray.get(keeper.workers.remote(), timeout=ANSWER_S)
    for each in ray.util.list_named_actors(all_namespaces=True):
        worker = each["name"].removeprefix(prefix)
        if each["namespace"] != NAMESPACE or worker == each["name"]:
            continue
        with contextlib.suppress(ValueError):  # it has ended since then
            found[worker] = ray.get_actor(each["name"], namespace=NAMESPACE)
            if worker not in started:
                ray.kill(found.pop(worker))
    return found


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
        """Return whether the driver that has launched this worker is still the driver."""
        import ray

        return bool(ray.get(self._keeper().perform.remote("enlist", self.term, worker), timeout=ANSWER_S))

    def witness(self, term: int) -> None:
        """Say that this term's driver has ended its connection. Without Ray, nobody needs to
        know."""
        try:
            self._keeper().perform.remote("witness", term)
        except Exception as error:
            logger.debug("the keeper of the lease was not told of the driver's end: %s", error)
