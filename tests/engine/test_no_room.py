"""What can never fit fails at once; a trainer whose room another trainer of this process holds says so at once."""

import re
import time
import types
from typing import Any

import pytest

from raysgd import ResourceError, shutdown_all
from raysgd.config import ElasticConfig, Limits, WorkerResources
from raysgd.engine.engine import Engine
from raysgd.workers.cluster import foreign, nodes
from raysgd.workers.cluster.nodes import Room
from tests.engine.fake_group import FakeGroup, SingleWorkerBackend, started

LIMITS = Limits(start_s=0.5, setup_s=5, join_s=5, collective_s=5, hang_s=60)


class Slots(FakeGroup):
    """A group whose workers start at once, in a cluster of 4 places. `places` says how many of them are free."""

    def __init__(self, places: dict[str, int], *, grows: bool = False) -> None:
        super().__init__(names=(f"{id(self)}-{number}" for number in range(100)))
        self.places, self.grows = places, grows

    def room(self) -> Room:
        free = self.places["free"]
        return Room(free, 4, self.grows, needs={"CPU": (1, free)})

    def launch(self, count: int) -> list[str]:
        names, fit = super().launch(count), min(count, self.places["free"])
        self.places["free"] -= fit
        self.events += map(started, names[:fit])
        return names

    def dismiss(self, worker: str) -> None:
        self.places["free"] = min(self.places["free"] + 1, 4)

    def stop(self) -> None:
        self.places["free"] = 4


def engine_of(group: Slots, target: int, spares: int = 0, **more: Any) -> Engine:
    elastic = ElasticConfig(hot_spares=spares)
    return Engine(group, SingleWorkerBackend(), None, target=target, elastic=elastic, limits=LIMITS, **more)


def test_too_many_workers_fail_before_any_is_launched() -> None:
    group = Slots({"free": 4})
    with pytest.raises(ResourceError) as caught:
        engine_of(group, 5).start()
    text = str(caught.value)
    for part in ("can never hold 5 workers", "5 CPU (4 free)", "could hold 4 such", "SGD_PLACEMENT_GROUP_TIMEOUT_S"):
        assert part in text, text
    assert group.launched == 0


def test_an_autoscaler_may_add_nodes_so_the_start_waits() -> None:
    group = Slots({"free": 4}, grows=True)
    with pytest.raises(ResourceError, match=r"had no room for 1 of 5 workers within 0\.5 s"):
        engine_of(group, 5).start()
    assert group.launched == 5


class Late(Slots):
    """The last worker has a place, and never starts."""

    def launch(self, count: int) -> list[str]:
        names = super().launch(count)
        self.events.pop()
        return names


def test_workers_that_start_too_slowly_do_not_lack_room() -> None:
    with pytest.raises(ResourceError) as caught:
        engine_of(Late({"free": 4}), 3).start()
    text = str(caught.value)
    for part in ("1 of 3 worker processes did not start within 0.5 s", "had room", "SGD_PLACEMENT_GROUP_TIMEOUT_S"):
        assert part in text, text


def test_resize_beyond_the_cluster_changes_nothing() -> None:
    group = Slots({"free": 4})
    engine = engine_of(group, 2)
    engine.start()
    with pytest.raises(ResourceError, match="can never hold 12 workers"):
        engine.resize(12)
    assert (engine.target, engine.world_size, group.launched) == (2, 2, 2)
    assert engine.recoveries == []
    engine.stop(force=True)


def test_a_resize_for_which_there_is_no_room_in_time_leaves_no_workers_over() -> None:
    places = {"free": 4}
    group = Slots(places, grows=True)
    engine = engine_of(group, 2)
    engine.start()
    with pytest.raises(ResourceError, match=r"within 0\.5 s"):
        engine.resize(12)
    assert (engine.target, engine.world_size) == (2, 2)
    assert places["free"] == 2, "the workers that had started meanwhile were dismissed"
    engine.resize(2)
    assert engine.recoveries == [], "no change is left over for the next call"
    engine.stop(force=True)


def test_an_earlier_trainer_that_holds_the_room_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    places = {"free": 4}
    first = engine_of(Slots(places), 3)
    first.start()
    monkeypatch.setattr(__main__, "my_trainer", types.SimpleNamespace(_engine=first), raising=False)
    second = Slots(places)
    with pytest.raises(ResourceError) as caught:
        engine_of(second, 2).start()
    text = str(caught.value)
    for part in (
        "(my_trainer) holds the resources of 3 workers",
        "call my_trainer.shutdown()",
        "raysgd.shutdown_all()",
    ):
        assert part in text, text
    assert second.launched == 0
    first.stop(force=True)


def test_the_spares_of_an_idle_trainer_make_room_for_another_one() -> None:
    places = {"free": 4}
    group = Slots(places)
    first, second = engine_of(group, 2, spares=2), engine_of(Slots(places), 2)
    first.start()
    assert (group.launched, places["free"], first.world_size) == (4, 0, 2)
    second.start()
    assert (second.world_size, first.world_size, places["free"]) == (2, 2, 0)
    first.stop(force=True)
    second.stop(force=True)


def test_spares_never_hold_up_the_start(caplog: pytest.LogCaptureFixture) -> None:
    group = Slots({"free": 4})
    engine = engine_of(group, 4, spares=1)
    engine.start()
    assert (engine.world_size, group.launched) == (4, 4)
    assert "training runs without 1 of 1 hot spare until there is room for 1 CPU (0 free)" in caplog.text
    engine.stop(force=True)


def test_shutdown_all_ends_trainers_without_a_name() -> None:
    places = {"free": 4}
    first = engine_of(Slots(places), 3)
    first.start()
    with pytest.raises(ResourceError, match=re.escape("call raysgd.shutdown_all() and try again")):
        engine_of(Slots(places), 2).start()
    shutdown_all()
    assert not first.calls.active
    second = engine_of(Slots(places), 2)
    second.start()
    assert second.world_size == 2
    second.stop(force=True)


@pytest.mark.parametrize("name", ["SGD_PLACEMENT_GROUP_TIMEOUT_S", "TRAIN_PLACEMENT_GROUP_TIMEOUT_S"])
def test_nodes_may_be_added_to_a_cluster_that_was_joined_or_if_the_user_says_so(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(foreign, "started_here", lambda: False)
    assert nodes.can_grow(), "its other nodes may be starting"
    monkeypatch.setattr(foreign, "started_here", lambda: True)
    assert not nodes.can_grow()
    monkeypatch.setenv(name, "300")
    assert nodes.can_grow()


@pytest.mark.parametrize(
    ("captures", "strategy", "room"), [(True, "PlacementGroupSchedulingStrategy", 1), (False, "str", 6)]
)
def test_workers_run_in_a_placement_group_only_if_it_captures_them(
    ray_cluster: None, captures: bool, strategy: str, room: int
) -> None:
    """Ray calls it placement_group_capture_child_tasks, which is False by default and True in a trial of Tune."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def look() -> tuple[str, int]:
        for _ in range(150):  # workers of other tests may still be ending
            free = nodes.room_for(WorkerResources.parse(1, False, None)).free
            if free == room:
                break
            time.sleep(0.2)
        return type(nodes.choose_placement()).__name__, free

    group = ray.util.placement_group([{"CPU": 2}])
    try:
        inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=captures)
        task = ray.remote(look).options(num_cpus=1, scheduling_strategy=inside)
        assert ray.get(task.remote(), timeout=60) == (strategy, room)
    finally:
        ray.util.remove_placement_group(group)
