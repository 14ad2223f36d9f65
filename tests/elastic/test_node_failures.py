"""Nodes fail, return and are drained; if no resources are free, training waits for them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.background import Background

pytestmark = pytest.mark.elastic

# A cluster of several nodes needs its own Ray, in its own process.
HEAD = """
import json, logging, sys, threading, time
import ray
from collections import Counter
from pathlib import Path
from ray.cluster_utils import Cluster
from raysgd import ElasticConfig, TrainingFailedError
from tests.faults import Fault, Ground, LedgerOperator

logging.basicConfig(level=logging.WARNING)
ray._private.utils.set_sigterm_handler = lambda handler: None  # nodes are added from timers, not from the main thread
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
cluster.wait_for_nodes()

def later(seconds, action):
    # In a thread that does not end, because Ray ends the processes of a node with the thread that started them.
    done = threading.Event()
    def run():
        time.sleep(seconds)
        action()
        done.set()
        threading.Event().wait()
    threading.Thread(target=run, daemon=True).start()
    return done

def lose(node):
    cluster.remove_node(node, allow_graceful=False)

def say(**facts):
    print("FACTS " + json.dumps(facts), flush=True)

def reasons(ground):
    return [[r.reason, r.world_size_before, r.world_size_after, r.in_place] for r in ground.trainer.recoveries]
"""


SCRIPTS = {
    # A node is drained and dies, and another one joins. Then one fails without a notice. At the end there are too few.
    "come and go": """
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
class Listening(LedgerOperator):
    def on_preemption_notice(self, deadline_s):
        with open(marks / f"notice-{ray.get_runtime_context().get_node_id()}", "a") as file:
            file.write(f"{deadline_s} ")
settings = {"num_workers": 3, "operator": Listening, "config": {"samples": 1500, "pace": 0.02}}
ground = Ground(marks, elastic=ElasticConfig(hang_timeout_s=60), **settings)
def drain():
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline = int((time.time() + 60) * 1000)
    gcs.drain_node(nodes[0].node_id, autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "spot", deadline)
samples, exact = [], []
def epoch():
    samples.append(ground.trainer.train(max_retries=-1)["num_samples"])
    exact.append(ground.trained() == Counter(range(1500)))
def until(recoveries):
    for _ in range(40):
        if len(ground.trainer.recoveries) < recoveries:
            epoch()
later(1.5, drain)
until(1)
told = {path.name: path.read_text().split() for path in marks.glob("notice-*")}
lose(nodes[0])
nodes.append(cluster.add_node(num_cpus=1))
until(2)
later(2, lambda: lose(nodes[1]))
until(3)
nodes.append(cluster.add_node(num_cpus=1))
until(4)
facts = dict(exact=exact, samples=samples, reasons=reasons(ground), told=told, drained=nodes[0].node_id,
             redone=ground.trainer.recoveries[0].batches_redone)
ground.trainer.shutdown()
elastic = ElasticConfig(min_workers=3, backoff_s=0.2, backoff_max_s=0.5, max_attempts=3, hang_timeout_s=60)
ground = Ground(marks / "few", elastic=elastic, **settings)
later(1.5, lambda: lose(nodes[2]))
try:
    for _ in range(40):
        ground.trainer.train(max_retries=-1)
    say(**facts, error="none")
except TrainingFailedError as error:
    say(**facts, error=str(error))
ground.trainer.shutdown()
""",
    "nothing free": """
lose(nodes.pop())
while sum(node["Alive"] for node in ray.nodes()) > 2:
    time.sleep(0.2)
elastic = ElasticConfig(backoff_s=4.0, backoff_max_s=30.0, max_attempts=5, hang_timeout_s=60)
@ray.remote(num_cpus=1)
class Other:
    def ready(self): return True
ground = None
others = []
import os
head = Other.options(scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
    ray.get_runtime_context().get_node_id(), soft=False)).remote()
ray.get(head.ready.remote())
ground = Ground(marks, num_workers=1, use_ray=True, config={"samples": 400, "pace": 0.02}, elastic=elastic)
ground.trainer.train()
ground.trained()
time.sleep(0.5)
timers = [later(0.5, lambda: lose(nodes[0])), later(9, lambda: cluster.add_node(num_cpus=1))]
started = time.monotonic()
ground.trainer.train(max_retries=-1)
seconds = time.monotonic() - started
for timer in timers:
    timer.wait()
say(exact=ground.trained() == Counter(range(400)), reasons=reasons(ground), seconds=seconds)
ground.trainer.shutdown()
""",
}
Outcome = Callable[[], tuple[dict[str, Any], str]]


def run(background: Background, name: str) -> tuple[dict[str, Any], str]:
    """Run the script as a driver. Return the facts that it printed, and its log."""
    folder = background.folder()
    file = folder / "driver.py"
    file.write_text(HEAD + f"marks = Path({str(folder / 'marks')!r})\n" + SCRIPTS[name])
    done = background.run(str(file))
    facts = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert done.returncode == 0 and facts, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return json.loads(facts[-1][6:]), done.stderr


@pytest.mark.more
@pytest.mark.script("come and go", run=run)
def test_nodes_are_drained_fail_and_join_until_there_are_too_few(outcome: Outcome) -> None:
    facts, _ = outcome()
    assert set(facts["exact"]) == {True} and set(facts["samples"]) == {1500}
    growth = ["growth", 2, 3, True]
    assert facts["reasons"] == [["preemption", 3, 2, True], growth, ["node failure", 3, 2, True], growth]
    assert facts["redone"] == 0, "the draining node was left before it died"
    ((where, seconds),) = facts["told"].items()
    assert where == f"notice-{facts['drained']}"
    assert [0 < float(each) <= 60 for each in seconds] == [True]
    assert "3 waits" in str(facts["error"]) and "min_workers=3" in str(facts["error"])


@pytest.mark.more
@pytest.mark.script("nothing free", run=run)
def test_training_waits_for_a_new_node(outcome: Outcome) -> None:
    facts, log = outcome()
    assert facts["exact"] is True
    assert facts["reasons"] == [["node failure", 1, 1, False]]
    assert "waiting" in log and "1 CPU (" in log
