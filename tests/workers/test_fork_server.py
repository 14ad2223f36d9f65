"""Workers are forks of a process that has imported torch, and behave like others."""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from raysgd.workers.cluster import fork_server
from raysgd.workers.cluster.processes import LocalProcess
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
        imported = list(sys.modules)
        each = [name for name in imported[imported.index("ray"):] if name in ("pydantic.v1", "torch._dynamo", "raysgd.workers.actor")]
        return dict(**numbers, limits=limits, **texts, each=each, paths=sys.path, threads=threads, interrupt=interrupt, weights=weights)

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
    until = time.monotonic() + 300
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
        SGD_PLACEMENT_GROUP_TIMEOUT_S="300",
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
        assert "raysgd.workers.cluster.fork_server" in each["command"]  # of the process that it was forked from
        assert os.path.realpath(each["executable"]) == os.path.realpath(sys.executable)
        assert each["session"] == each["pid"] and each["folder"] == run["folder"]
        assert each["mine"] == "set by the script" and each["threads"] == 1
        assert each["each"] == [], "a module that takes long is imported by each worker"
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


IN_A_CLUSTER = """
import json, os, time
import torch, ray
from raysgd.train import Trainer

environment = json.loads(os.environ["OF_THE_JOB"])
ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", runtime_env=environment)

def facts():
    import sys
    return dict(command=sys.orig_argv[1:3], parent=os.getppid(), mine=os.environ.get("MINE"), given="found" in os.listdir("."))

found = []
for _ in range(2):
    trainer = Trainer("torch", num_workers=2)
    trainer.start()
    found += trainer.run(facts)
    trainer.shutdown()

@ray.remote
def other():
    return facts()

found.append(ray.get(other.remote()))
ray.shutdown()
server = f"/proc/{found[0]['parent']}"
until = time.monotonic() + 60
while os.path.exists(server) and time.monotonic() < until:
    time.sleep(0.1)
print("FACTS", json.dumps([found, os.path.exists(server), os.listdir(os.environ["TMPDIR"])]))
"""


def train_in_a_cluster(background: Background, environment: dict[str, Any]) -> Any:
    """Run the script, which starts a cluster with this runtime environment before it has a trainer, and then two trainers.
    Return the facts of their four workers and of a task."""
    folder = background.folder()
    (folder / "job").mkdir()
    (folder / "job" / "found").touch()
    done = background.run(
        *("-c", IN_A_CLUSTER),
        folder=folder,
        RAYSGD_FORK_WORKERS="1",
        SGD_PLACEMENT_GROUP_TIMEOUT_S="300",
        TMPDIR=str(folder),
        PYTHONPATH=str(ROOT),
        OF_THE_JOB=json.dumps(environment),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert done.returncode == 0 and lines, done.stderr
    return json.loads(lines[0][6:])


@linux
@pytest.mark.script(run=train_in_a_cluster)
@pytest.mark.parametrize("environment", [{"working_dir": "job", "env_vars": {"MINE": "of the job"}}])
def test_trainers_share_a_fork_server_in_a_cluster_of_the_user(environment: dict[str, Any], outcome: Any) -> None:
    (*workers, task), left, files = outcome()
    assert len({each["parent"] for each in workers}) == 1
    for each in workers:
        assert "raysgd.workers.cluster.fork_server" in each["command"][1]
    assert "fork_server" not in task["command"][1], "Ray starts other processes as before"
    for each in (*workers, task):
        assert each["mine"] == "of the job" and each["given"]
    assert not left, "the server did not end with its cluster"
    assert not [name for name in files if name.startswith("raysgd-forks")]


def start_server(monkeypatch: pytest.MonkeyPatch, module: str) -> Path:
    """Start a server that imports this module. Return its launcher."""
    monkeypatch.setenv(fork_server.FORK_WORKERS, "1")
    monkeypatch.setattr("tempfile.tempdir", os.environ["RAY_TMPDIR"])  # the path of a socket must be short
    monkeypatch.setattr(fork_server, "REPLICAS", {"sys": module})
    return Path(fork_server.start_fork_server())


@linux
def test_a_worker_with_variables_that_libraries_read_once_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = start_server(monkeypatch, "json")
    script = tmp_path / "default_worker.py"
    script.write_text("import os, sys; print(os.getppid(), 'fork_server' in sys.orig_argv[2], os.environ['MINE'])")

    def run(**variables: str) -> list[str]:
        environment = {**os.environ, "MINE": "yes", **variables}
        command = [launcher, script, "--a"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout.split()

    server, *forked = run(OMP_NUM_THREADS="3", PYTHONPATH="/none")
    try:
        assert forked == ["True", "yes"]
        assert run(MKL_CBWR="COMPATIBLE")[1:] == ["False", "yes"]
        assert run(PYTHONHASHSEED="17")[1:] == ["False", "yes"]
    finally:
        os.kill(int(server), signal.SIGKILL)
        shutil.rmtree(launcher.parent)


@pytest.mark.parametrize(
    ("worker", "launcher", "expected"),
    [
        ("here", "launcher", "launcher"),
        ("here", "none", "interpreter"),
        ("there", "launcher", "interpreter"),
        pytest.param("here", "others", "interpreter", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_workers_of_another_machine_environment_or_user_have_its_interpreter(
    tmp_path: Path, worker: str, launcher: str, expected: str
) -> None:
    for name in ("launcher", "others", "here/bin/python3", "there/bin/python3"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {"interpreter" if "bin" in name else "launcher"} "$0" "$@"\n')
        path.chmod(0o700)
        if name == "others" and os.geteuid() == 0:
            os.chown(path, 12345, 12345)
    command = fork_server.command_to_fork(str(tmp_path / launcher), str(tmp_path / "here/lib/python3.11/ray"))
    script = f"{tmp_path}/{worker}/lib/python3.11/ray/workers/default_worker.py"
    ran = subprocess.run(
        ["bash", "-c", f"exec {command} {script} --a 'b c'"], capture_output=True, text=True, check=True
    )
    own = tmp_path / (launcher if expected == "launcher" else f"{worker}/bin/python3")
    assert ran.stdout == f"{expected} {own} {script} --a b c\n"


def test_nothing_is_forked_without_a_framework_or_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.FORK_WORKERS, "0")
    assert fork_server.start_fork_server() == ""
    monkeypatch.setenv(fork_server.FORK_WORKERS, "1")
    monkeypatch.setattr(fork_server, "REPLICAS", {"not_imported": "nor.this"})
    assert fork_server.start_fork_server() == ""


@linux
def test_an_interpreter_starts_if_the_server_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = start_server(monkeypatch, "no_such_module")  # the server fails with its imports, and ends
    assert stat.S_IMODE(launcher.parent.stat().st_mode) == 0o700
    script = tmp_path / "default_worker.py"
    script.write_text("import sys; print(sys.argv[1:], sys.flags.isolated)")
    for name in (script, tmp_path / "another.py"):
        name.write_text(script.read_text())
        ran = subprocess.run([launcher, name, "a b", "--c"], capture_output=True, text=True, timeout=60, check=True)
        assert ran.stdout == "['a b', '--c'] 0\n"


IMPORTED = """
import sys, threading, types
from raysgd.workers.cluster import fork_server
fork_server.GPUS = [{gpu!r} + "*"]
gpu = open({gpu!r} + "0", "w")
torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: {cuda}))
sys.modules.update(dict.fromkeys(["torch", "torch._dynamo", "raysgd.torch.group.process_group"], torch))
{more}
"""
STAYS = "threading.Thread(target=threading.Event().wait, name='stays', daemon=True).start()"


@linux
@pytest.mark.parametrize(
    ("more", "cuda", "why"),
    [
        ("gpu.close()", False, ""),
        ("", False, "an import has opened {gpu}0, which a fork cannot use"),
        ("gpu.close()", True, "an import has initialized CUDA, which a fork cannot use"),
        (f"gpu.close(); {STAYS}", False, "an import has started the thread 'stays', which a fork does not have"),
    ],
)
def test_workers_are_forked_unless_an_import_has_used_a_gpu_or_left_a_thread(
    more: str,
    cuda: bool,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    gpu, script = str(tmp_path / "gpu"), tmp_path / "default_worker.py"
    (tmp_path / "imported.py").write_text(IMPORTED.format(gpu=gpu, cuda=cuda, more=more))
    script.write_text("import os, sys; print(os.getppid(), 'fork_server' in sys.orig_argv[2])")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    launcher = start_server(monkeypatch, "imported")
    ran = subprocess.run([launcher, script, "--a"], capture_output=True, text=True, timeout=60, check=True)
    server, forked = ran.stdout.split()
    try:
        assert forked == str(not why)
        logged, until = "", time.monotonic() + 60
        while why and not logged.endswith("\n") and time.monotonic() < until:
            logged += capfd.readouterr().err
            time.sleep(0.05)
        assert logged == (fork_server.NO_FORKS % why.format(gpu=gpu) + "\n" if why else "")
    finally:
        if forked == "True":
            os.kill(int(server), signal.SIGKILL)
        shutil.rmtree(launcher.parent)


@linux
def test_with_gpus_workers_of_tensorflow_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu0").touch()
    monkeypatch.setenv(fork_server.FORK_WORKERS, "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(fork_server, "GPUS", [])
    monkeypatch.setattr(fork_server, "_start", lambda folder, python, modules: " ".join(modules))
    assert fork_server.start_fork_server(["tensorflow"]) == "raysgd.tf.replica"
    monkeypatch.setattr(fork_server, "GPUS", [str(tmp_path / "gpu*")])
    assert fork_server.start_fork_server(["tensorflow"]) == ""
    assert fork_server.start_fork_server(["torch", "tensorflow"]) == "raysgd.torch.replica"


@linux
def test_a_client_that_sends_nothing_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script does that is stopped after it has connected, or in the middle of its request."""
    address = os.path.join(os.environ["RAY_TMPDIR"], uuid.uuid4().hex[:8])  # the path of a socket must be short
    monkeypatch.setattr(fork_server, "SILENT_S", 5.0, raising=False)
    monkeypatch.setattr(fork_server, "find_what_forks_lack", str)  # whatever other tests have imported here
    driver = os.getpid()
    score = Path(fork_server.OOM_SCORE).read_text()
    request = json.dumps([["worker.py"], {}, "/", os.nice(0), {}, score]).encode()

    def connected(*, sends: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        clients.enter_context(client)
        client.settimeout(60)
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
    paths = fork_server.find_worker_paths(
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
