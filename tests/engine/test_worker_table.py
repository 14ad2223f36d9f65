"""What is asked about the machines of workers that have failed."""

from tests.engine.fake_group import FakeGroup, WorkerEnded, WorkerStarted


def test_each_failed_machine_is_asked_once_about_all_its_workers() -> None:
    """One that does not answer costs up to 0.3 s, in which nothing else happens in a recovery."""
    group = FakeGroup()
    table = group.table()
    workers = table.launch(4)
    for number, worker in enumerate(workers):
        group.events.append(WorkerStarted(worker, "gone" if number < 3 else "there", 1, "host", local=False))
        group.events.append(WorkerEnded(worker, "its connection was reset"))
    group.dead.add("gone")
    table.pump(0.0)
    failures = [table.failure_of(table[worker]) for worker in workers]
    assert [failure.reason for failure in failures] == ["node failure"] * 3 + ["worker death"]
    assert group.looked == ["gone", "there"]
