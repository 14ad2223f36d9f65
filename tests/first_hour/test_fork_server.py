"""The workers of a cluster that raysgd starts are forks of a process that has imported torch, and behave like others."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from raysgd.workers import fork_server
from raysgd.workers.processes import LocalProcess
from tests.background import Background

ROOT = Path(__file__).resolve().parents[2]

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

TRAINING = """
import json, os, signal, sys, threading, time
os.environ.pop("OMP_NUM_THREADS", None)
import numpy as np
import torch
from torch import nn

from raysgd import TorchTrainer, TrainingOperator
from raysgd.train import Trainer

class Facts(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.criterion = self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
        data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None] / 64, torch.ones(64, 1))
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=4))

    def facts(self):
        weights = [value.tolist() for value in self.model.state_dict().values()]
        numbers = dict(pid=os.getpid(), parent=os.getppid(), session=os.getsid(0), drawn=int(np.random.randint(1 << 30)))
        texts = dict(command=sys.orig_argv[2], executable=sys.executable, folder=os.getcwd(), mine=os.environ.get("MINE"))
        interrupt, threads = repr(signal.getsignal(signal.SIGINT)), torch.get_num_threads()
        def files(process):
            return [line.split()[3] for line in open(f"/proc/{process}/limits") if line.startswith("Max open files")]

        limits = files("self") == files(os.environ["RAY_RAYLET_PID"]), open("/proc/self/oom_score_adj").read().strip()
        return dict(**numbers, limits=limits, **texts, paths=sys.path, threads=threads, interrupt=interrupt, weights=weights)

os.environ["MINE"] = "set by the script"
made = []
thread = threading.Thread(target=lambda: made.append(TorchTrainer(training_operator_cls=Facts, num_workers=2)))
thread.start()
thread.join()
import ray
processes = [each.process for kind in ray._private.worker._global_node.all_processes.values() for each in kind]
with made[0] as trainer:
    trainer.train()
    first = trainer.apply_all_operators(Facts.facts)
    os.kill(first[0]["pid"], signal.SIGKILL)
    until = time.monotonic() + 120
    while len(trainer.recoveries) < 2 and time.monotonic() < until:  # the failure, and the replacement worker that joins
        samples = trainer.train()["num_samples"]
    second = trainer.apply_all_operators(Facts.facts)
functions = Trainer("torch", num_workers=2)
functions.start()
threads = functions.run(lambda: torch.get_num_threads())
functions.shutdown()
ended = [each.pid for each in processes if each.poll() is not None]
ray.shutdown()
server = f"/proc/{first[0]['parent']}"
until = time.monotonic() + 60
while os.path.exists(server) and time.monotonic() < until:
    time.sleep(0.1)
left = os.path.exists(server)
print("FACTS", json.dumps([first, second, samples, threads, ended, left, os.listdir(os.environ["TMPDIR"])]))
"""


def train(background: Background) -> dict[str, Any]:
    """Run the script, which starts a cluster of its own, with a folder for temporary files of its own."""
    folder = background.folder()
    done = background.run(
        *("-c", TRAINING),
        folder=folder,
        RAYSGD_FORK_WORKERS="1",
        TMPDIR=str(folder),
        PYTHONPATH=str(ROOT),  # without the interpreter of `forked_workers.py`
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert done.returncode == 0 and lines, done.stderr
    names = ("first", "second", "samples", "threads", "ended", "left", "files")
    return {**dict(zip(names, json.loads(lines[0][6:]), strict=True)), "folder": str(folder)}


@linux
@pytest.mark.script(run=train)
def test_a_worker_that_is_forked_is_like_one_that_is_started(outcome: Any) -> None:
    run = outcome()
    for each in [*run["first"], *run["second"]]:
        assert "raysgd.workers.fork_server" in each["command"]  # of the process that it was forked from
        assert os.path.realpath(each["executable"]) == os.path.realpath(sys.executable)
        assert each["session"] == each["pid"] and each["folder"] == run["folder"]
        assert each["mine"] == "set by the script" and each["threads"] == 1
        assert "SIG_IGN" not in each["interrupt"]
        assert each["limits"] == [True, "1000"], "limits of open files, and what Ray tells the kernel"
        assert any(path.endswith("ray/_private/workers") for path in each["paths"])
    for facts in (run["first"], run["second"]):
        assert facts[0]["drawn"] != facts[1]["drawn"], "two ranks draw the same random numbers"
        assert facts[0]["weights"] == facts[1]["weights"]
    assert (
        len({each["pid"] for each in [*run["first"], *run["second"]]}) == 3
    )  # one survivor, and one replacement worker
    assert run["samples"] == 64
    assert run["threads"] == [1, 1]  # of workers that have one CPU, and a library that was loaded for all
    assert run["ended"] == [], "the cluster outlives the thread that started it"
    assert not run["left"], "the server did not end with its cluster"
    assert not [name for name in run["files"] if name.startswith("raysgd-forks")]


def test_nothing_is_forked_without_a_framework_or_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.FORK_WORKERS, "0")
    assert fork_server.start_fork_server() == ""
    monkeypatch.setenv(fork_server.FORK_WORKERS, "1")
    monkeypatch.setattr(fork_server, "REPLICAS", {"not_imported": "nor.this"})
    assert fork_server.start_fork_server() == ""


@linux
def test_an_interpreter_starts_if_the_server_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.FORK_WORKERS, "1")
    monkeypatch.setattr("tempfile.tempdir", os.environ["RAY_TMPDIR"])  # the path of a socket must be short
    monkeypatch.setattr(
        fork_server, "REPLICAS", {"sys": "no_such_module"}
    )  # the server fails with its imports, and ends
    launcher = Path(fork_server.start_fork_server())
    assert stat.S_IMODE(launcher.parent.stat().st_mode) == 0o700
    script = tmp_path / "default_worker.py"
    script.write_text("import sys; print(sys.argv[1:], sys.flags.isolated)")
    for name in (script, tmp_path / "another.py"):
        name.write_text(script.read_text())
        ran = subprocess.run([launcher, name, "a b", "--c"], capture_output=True, text=True, timeout=60, check=True)
        assert ran.stdout == "['a b', '--c'] 0\n"


@linux
def test_a_client_that_sends_nothing_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script does that is stopped after it has connected, or in the middle of its request."""
    address = os.path.join(os.environ["RAY_TMPDIR"], uuid.uuid4().hex[:8])  # the path of a socket must be short
    monkeypatch.setattr(fork_server, "SILENT_S", 2.0, raising=False)
    driver = os.getpid()
    score = Path(fork_server.OOM_SCORE).read_text()
    request = json.dumps([["worker.py"], {}, "/", os.nice(0), {}, score]).encode()

    def connected(*, sends: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        clients.enter_context(client)
        client.settimeout(20)
        client.connect(address)
        if sends:
            head = fork_server.HEAD.pack(len(request), driver)
            with open(os.devnull, "r+b") as null:
                socket.send_fds(client, [head], [null.fileno()] * 3)
            client.sendall(sends)
        return client

    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as clients:
        listening.bind(address)
        listening.listen(64)
        server = os.fork()
        if server == 0:
            try:
                fork_server.serve(listening, LocalProcess(driver), str(tmp_path / "none"))
            finally:
                os._exit(0)  # the forks, too
        try:
            silent = [connected(sends=b""), connected(sends=request[:5])]
            assert connected(sends=request).recv(1) == b"1", "a worker was forked"
            assert [client.recv(1) for client in silent] == [b"", b""], "they start an interpreter then"
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
            os.unlink(address)


def test_paths_of_a_worker_where_raysgd_is_installed_beside_ray() -> None:
    own = ["/site-packages", "/servers", "/lib/python3", "/site-packages"]
    paths = fork_server.worker_paths(
        "/site-packages/ray/default_worker.py", {"PYTHONPATH": "/theirs:"}, own, {"PYTHONPATH": "/servers"}
    )
    assert paths == ["/site-packages/ray", "/theirs", "/lib/python3", "/site-packages"]


@linux
def test_a_socket_that_cannot_be_made_costs_the_forks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setenv(fork_server.FORK_WORKERS, "1")
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert fork_server.start_fork_server() == ""
    assert not list(long.iterdir())
