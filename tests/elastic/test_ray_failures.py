"""Parts of Ray are killed, or the user ends Ray: there is a clear error within a stated time, and no process is left.

Each of these has a Ray of its own, in a process of its own.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from raysgd import TorchTrainer
from tests.background import Background
from tests.faults import LedgerOperator, alive, ended

pytestmark = [pytest.mark.elastic, pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")]

# Ray ends a process that has not reached its control service (GCS) for this long. raysgd raises an error after half of it.
RAY_GIVES_UP_S = 30

HEAD = """
import json, logging, os, signal, sys, threading, time
from collections import Counter
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from raysgd import ElasticConfig
from tests.faults import Ground

logging.basicConfig(level=logging.WARNING)
marks = Path(marks)
if elsewhere:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    node = cluster.add_node(num_cpus=4)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    started = node.all_processes
else:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    started = ray._private.worker._global_node.all_processes
ours = {name: [each.process.pid for each in found] for name, found in started.items()}

def say(**facts):
    print("FACTS " + json.dumps(facts), flush=True)

def kill(name, number=signal.SIGKILL):
    for pid in ours[name]:
        os.kill(pid, number)

def trainer_of(**arguments):
    config = {"samples": 400, "pace": 0.01}
    made = {"num_workers": 2, "config": config, "elastic": ElasticConfig(batch="per_worker", hang_timeout_s=60), **arguments}
    return Ground(marks / str(time.monotonic()), **made)

ground = trainer_of()
workers = ground.trainer.apply_all_workers(os.getpid)
print("PIDS " + json.dumps([*workers, *(pid for pids in ours.values() for pid in pids)]), flush=True)
ground.trainer.train()
ground.trained()

def raised(call):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["", "", time.monotonic() - began]

def left(pids):
    found = []
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat.rpartition(")")[2].split()[0] not in "ZX":
            found.append(f"{pid} {stat[:60]}")
    return found

def left_after(pids, seconds):
    until = time.monotonic() + seconds
    while left(pids) and time.monotonic() < until:
        time.sleep(0.1)
    return left(pids)
"""

SCRIPTS = {
    "raylet": """
kill("raylet")
time.sleep(1)
ground.trainer.train()
exact = ground.trained() == Counter(range(400))
began = time.monotonic()
ground.trainer.shutdown()
say(exact=exact, took=time.monotonic() - began, left=left(workers))
""",
    # The workers are on another node. Its raylet is a child of this process, so no process there notices that it ends.
    "raylet of another node": """
kill("raylet")
ground.trainer.shutdown()
say(left=left_after(workers, 15))
""",
    "gcs": """
ground.trainer.save(marks / "before.pt")
kill("gcs_server")
def on():
    while True:
        ground.trainer.train()
error = raised(on)
again = raised(ground.trainer.train)
saved = raised(lambda: ground.trainer.save(marks / "after.pt"))
ended = raised(ground.trainer.shutdown)
say(error=error, again=again, saved=saved, ended=ended, left=left(workers))
""",
    "gcs stopped": """
kill("gcs_server", signal.SIGSTOP)
threading.Timer(6, kill, ("gcs_server", signal.SIGCONT)).start()
began = time.monotonic()
while time.monotonic() - began < 9:
    ground.trainer.train()
    exact = ground.trained() == Counter(range(400))
say(exact=exact, recoveries=len(ground.trainer.recoveries), ended=raised(ground.trainer.shutdown), left=left(workers))
""",
    "gcs, then a worker": """
kill("gcs_server")
os.kill(workers[1], signal.SIGKILL)
first = raised(ground.trainer.train)
reasons = [r.reason for r in ground.trainer.recoveries]
exact = first[0] or ground.trained() == Counter(range(400))
error = raised(lambda: ground.trainer.resize(3))
say(first=first, exact=exact, reasons=reasons, error=error,
    ended=raised(ground.trainer.shutdown), left=left(workers))
""",
    "ray.shutdown": """
other = trainer_of(num_workers=1, use_ray=True)
ray.shutdown()
errors = [raised(ground.trainer.train), raised(ground.trainer.validate), raised(lambda: ground.trainer.resize(3)),
          raised(lambda: ground.trainer.save(marks / "x.pt")), raised(lambda: ground.trainer.apply_all_workers(os.getpid))]
ended = raised(ground.trainer.shutdown)
none = ray.is_initialized()
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
errors += [raised(other.trainer.train), raised(other.trainer.shutdown)[:2] + [0]]
ground = trainer_of()
ground.trainer.train()
exact = ground.trained() == Counter(range(400))
ground.trainer.shutdown()
say(errors=errors, ended=ended, started_anew=none, left=left_after(workers, 10), exact=exact)
""",
    "ray.shutdown in a call": """
threading.Timer(1.5, ray.shutdown).start()
def on():
    while True:
        ground.trainer.train()
say(error=raised(on), ended=raised(ground.trainer.shutdown), started_anew=ray.is_initialized(), left=left_after(workers, 10))
""",
}
Outcome = Callable[[], dict[str, Any]]


def run(background: Background, name: str) -> dict[str, Any]:
    """Run the script as a driver. Return the facts that it printed, and its processes that are left at the end."""
    folder = background.folder()
    file = folder / "driver.py"
    elsewhere = "another node" in name
    file.write_text(f"elsewhere, marks = {elsewhere}, {str(folder)!r}\n{HEAD}{SCRIPTS[name]}")
    done = background.run(
        str(file), RAY_gcs_rpc_server_reconnect_timeout_s=str(RAY_GIVES_UP_S), RAY_raylet_start_wait_time_s="120"
    )
    if name.startswith("ray.shutdown"):
        # A trainer of one worker that is first used after another ray.init() may still say it.
        assert "preemption: rank 1" not in done.stderr, "no machine was preempted"
    said = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("FACTS ", "PIDS "))]
    pids = [pid for word, rest in said if word == "PIDS" for pid in json.loads(rest)]
    ended(*pids)
    for pid in (left := [pid for pid in pids if alive(pid)]):
        os.kill(pid, signal.SIGKILL)
    facts = [json.loads(rest) for word, rest in said if word == "FACTS"]
    assert facts, f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return {**facts[-1], "at last": left, "folder": folder}


@pytest.mark.script("raylet", run=run)
def test_the_raylet_is_killed(outcome: Outcome) -> None:
    facts = outcome()
    assert facts["exact"] is True
    assert facts["left"] == [] and facts["at last"] == [] and facts["took"] < 30


@pytest.mark.nightly
@pytest.mark.script("raylet of another node", run=run)
def test_workers_without_a_raylet_end_themselves(outcome: Outcome) -> None:
    facts = outcome()
    assert facts["left"] == [] and facts["at last"] == []


@pytest.mark.script("gcs", run=run)
@pytest.mark.more
def test_the_control_service_is_killed(outcome: Outcome) -> None:
    facts = outcome()
    kind, text, seconds = facts["error"]
    assert kind == "ClusterError" and "GCS" in text and "save" in text
    assert seconds < RAY_GIVES_UP_S
    assert facts["again"][0] == "ClusterError"
    assert facts["saved"][0] == "" and facts["ended"][0] == ""
    with TorchTrainer(training_operator_cls=LedgerOperator, config={"samples": 400}) as trainer:
        for name in ("before.pt", "after.pt"):
            trainer.load(facts["folder"] / name, trusted=True)
            ledger = trainer.get_local_operator().ledger
            assert len(ledger) >= 400 and set(Counter(ledger[:400]).values()) == {1}
    assert facts["left"] == [] and facts["at last"] == []


@pytest.mark.nightly
@pytest.mark.script("gcs stopped", run=run)
def test_the_control_service_pauses(outcome: Outcome) -> None:
    facts = outcome()
    assert facts["exact"] is True and facts["recoveries"] == 0
    assert facts["ended"][0] == "" and facts["left"] == [] and facts["at last"] == []


@pytest.mark.nightly
@pytest.mark.script("gcs, then a worker", run=run)
def test_a_worker_dies_after_the_control_service(outcome: Outcome) -> None:
    """Training continues with the others. Only what needs new workers raises an error."""
    facts = outcome()
    assert facts["reasons"] == ["worker death"]
    assert facts["exact"] in (True, "ClusterError")
    assert facts["error"][0] == "ClusterError" and facts["error"][2] < RAY_GIVES_UP_S
    assert facts["ended"][0] == "" and facts["left"] == [] and facts["at last"] == []


@pytest.mark.nightly
@pytest.mark.script("ray.shutdown", run=run)
def test_ray_is_shut_down_while_a_trainer_is_idle(outcome: Outcome) -> None:
    facts = outcome()
    *errors, last = facts["errors"]
    assert {kind for kind, _, _ in errors} == {"NotActiveError"}
    assert all("ray.shutdown" in text and seconds < 10 for _, text, seconds in errors)
    assert last[0] == "" and facts["ended"][0] == ""
    assert facts["started_anew"] is False, "none of it may start another Ray"
    assert facts["left"] == [] and facts["exact"] is True and facts["at last"] == []


@pytest.mark.script("ray.shutdown in a call", run=run)
@pytest.mark.nightly
def test_ray_is_shut_down_during_a_call(outcome: Outcome) -> None:
    facts = outcome()
    assert facts["error"][0] == "NotActiveError" and facts["ended"][0] == ""
    assert facts["started_anew"] is False
    assert facts["left"] == [] and facts["at last"] == []
