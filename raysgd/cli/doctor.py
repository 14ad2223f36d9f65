"""Say whether this machine, or each node of its cluster, is ready: `raysgd doctor`. Both."""

from __future__ import annotations

import logging
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement

from raysgd.cli.printing import Finding, show
from raysgd.core.channel.network import own_address
from raysgd.environment import GLOO_INTERFACE
from raysgd.errors import RaysgdError, counted, described
from raysgd.torch.group.interfaces import interface_towards
from raysgd.version import page
from raysgd.workers.cluster.connecting import join_running
from raysgd.workers.cluster.keeper import trainers
from raysgd.workers.cluster.nodes import driver_address
from raysgd.workers.cluster.ray_control_service import ask

# Each is imported in a process of its own, because an import can end its process. It prints how many GPUs it sees.
IMPORTS = {
    "torch": "import torch.distributed as d; d.is_gloo_available() or exit('it has no gloo'); print(d.torch.cuda.device_count())",
    "tensorflow": "import tensorflow; print(0)",
    "horovod": "import horovod.torch; print(0)",
}
COMPARED = ("raysgd", "ray", *IMPORTS)
ANSWER_S, CONNECT_S, SEEN_S = 180.0, 5.0, 5.0
FEWEST_FILES, LEAST_SHARED = 4096, 1 << 28
Facts = Mapping[str, Any]


def describe(driver: str) -> Facts:
    import psutil  # Ray brings it

    # What an interrupted installation has left has no name.
    installed = {each.name.lower(): each.version for each in metadata.distributions() if each.name}
    tried = {name: try_import(IMPORTS[name]) if name in installed else "0" for name in IMPORTS}
    interface = os.environ.get(GLOO_INTERFACE) or interface_towards(driver, variable=GLOO_INTERFACE)
    addresses = [each.address for each in psutil.net_if_addrs().get(interface, ()) if each.family == socket.AF_INET]
    nvidia = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True, check=False)
    try:
        name_at = [str(each[4][0]) for each in socket.getaddrinfo(platform.node(), 0, type=socket.SOCK_STREAM)]
    except OSError:
        name_at = []
    return {
        "versions": {"Python": platform.python_version(), **{n: installed[n] for n in COMPARED if n in installed}},
        "broken": {name: answer for name, answer in tried.items() if not answer.isdecimal()},
        "cpus": os.cpu_count() or 1,
        "gpus": int(tried["torch"]) if tried["torch"].isdecimal() else 0,
        "listed_gpus": nvidia.stdout.count("GPU "),
        "name": platform.node(),
        "name_at": name_at,  # the addresses to which the name resolves
        "address": addresses[0] if addresses else f"no address of {interface}",  # at which gloo listens
        "interface": interface,
        "chosen": bool(os.environ.get(GLOO_INTERFACE)),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 63),  # -1: unlimited
        "shared_free": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else LEAST_SHARED,
    }


def try_import(code: str) -> str:
    """Find how many GPUs a package sees, or why it cannot be imported."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"its import ends the process with {done.returncode}"])[-1]
    return done.stdout.split()[-1]


def listen(host: str) -> int:
    """Listen until this process ends. The kernel accepts connections."""
    server = socket.create_server((host, 0))
    port: int = server.getsockname()[1]
    server.detach()
    return port


def connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=CONNECT_S).close()


def see(path: Path) -> None:
    """Look for a file for some seconds, because network file systems show new files late."""
    until = time.monotonic() + SEEN_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    path.stat()


class Runner:
    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def start_on_nodes() -> dict[str, Any]:
    """Start an actor, which reserves no CPU, on each node that is alive; the keys are addresses."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actors: dict[str, Any] = {}
    for node in ask(ray.nodes):
        if node["Alive"]:
            name, place = node["NodeManagerAddress"], NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor: Any = ray.remote(Runner).options(num_cpus=0, scheduling_strategy=place)
            actors[name if name not in actors else f"{name} ({node['NodeID'][:6]})"] = actor.remote()
    return dict(sorted(actors.items()))  # Ray lists them in another order each time


def ask_nodes(
    nodes: Mapping[str, Any], limit_s: float, function: Callable[..., Any], *arguments: Any
) -> dict[str, Any]:
    """Call a function on these nodes at once (None: this process). Return its values, or errors."""
    import ray

    answers: dict[str, Any] = {name: actor and actor.run.remote(function, *arguments) for name, actor in nodes.items()}
    for name, answer in answers.items():
        try:
            answers[name] = ray.get(answer, timeout=limit_s) if answer is not None else function(*arguments)
        except Exception as error:  # the caller judges it; Ray wraps what a function raises
            answers[name] = RuntimeError(described(getattr(error, "cause", error)))
    return answers


def judge(machines: Mapping[str, Facts], requirements: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with single machines, or differs between them."""
    needed = {each.name: each.specifier for each in map(Requirement, requirements) if each.specifier}
    for node, machine in machines.items():
        for name, version in machine["versions"].items():
            if name in needed and not needed[name].contains(version, prereleases=True):
                text = f"{node}: {name} {version}, and raysgd needs {needed[name]}"
                yield Finding("versions", text, f"Install one that fits: pip install '{name}{needed[name]}'")
        for name, error in machine["broken"].items():
            yield Finding("versions", f"{node}: {name} cannot be imported: {error}", "Fix that, or install it again")
        if machine["listed_gpus"] > machine["gpus"] and "torch" in machine["versions"]:
            text = (
                f"{node}: nvidia-smi lists {counted(machine['listed_gpus'], 'GPU')}, and torch sees {machine['gpus']}"
            )
            yield Finding("devices", text, "Install a torch that fits the driver, or correct CUDA_VISIBLE_DEVICES")
        if machine["open_files"] < FEWEST_FILES:
            text = f"{node}: {machine['open_files']:,} at most, and {FEWEST_FILES:,} are needed"
            todo = "Before Ray starts: `ulimit -Hn 65536`, LimitNOFILE= of systemd, or Docker's --ulimit nofile=65536"
            yield Finding("open files", text, todo)
        if machine["shared_free"] < LEAST_SHARED:
            text = f"{node}: {machine['shared_free'] >> 20:,} MiB are free, and {LEAST_SHARED >> 20} are needed"
            todo = "Docker: --shm-size=8g. Kubernetes: emptyDir with medium: Memory at /dev/shm. Or remove files there"
            yield Finding("/dev/shm", text, todo)
        yield from judge_name(node, machine, [each for other, each in machines.items() if other != node])
    for name in ("Python", *COMPARED):
        versions = {node: each["versions"].get(name, "none") for node, each in machines.items()}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{version} on {node}" for node, version in versions.items())
            yield Finding("versions", f"{name} differs: {text}", f"Install the same {name} on all machines")


def judge_name(node: str, machine: Facts, others: Sequence[Facts]) -> Iterator[Finding]:
    """The name need not resolve to gloo's address, because raysgd chooses the interface."""
    text = f"{node}: its name {machine['name']}"
    todo = f"Let it resolve to {machine['address']} there, in /etc/hosts or DNS"
    if not machine["name_at"]:
        text += " does not resolve: Horovod needs that, torch and TensorFlow do not"
        yield Finding("names", text, todo, fails="horovod" in machine["versions"])
    elif others and machine["address"] not in machine["name_at"]:
        same = any(set(machine["name_at"]) & set(each["name_at"]) for each in others)
        text += f" resolves to {machine['name_at'][0]}{', as that of another node does' * same}"
        yield Finding("names", f"{text}. raysgd does not use that address, but other programs may", todo, fails=False)


def examine(folders: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what was found on this machine, or on all nodes of its cluster or RAY_ADDRESS's."""
    problems: list[Finding] = []
    try:
        cluster = join_running()
    except RaysgdError as error:
        cluster, (text, _, todo) = "", str(error).partition(". ")
        problems.append(Finding("cluster", text, todo or "Correct that"))
    nodes = start_on_nodes() if cluster else {"this machine": None}
    machines = ask_nodes(nodes, ANSWER_S, describe, driver_address() if cluster else own_address())
    for node in [node for node, answer in machines.items() if isinstance(answer, Exception)]:
        todo = f"Install raysgd {metadata.version('raysgd')} there, and look at Ray's logs on that node"
        problems.append(Finding("cluster", f"{node} does not answer: {machines.pop(node)}", todo))
        del nodes[node]
    problems += [*judge(machines, metadata.requires("raysgd") or []), *(try_ports(machines, nodes) if cluster else ())]
    problems += [each for folder in folders for each in try_folder(folder, nodes)]
    every = list(machines.values())
    named = (
        {name: f"waits {s:.0f} s for its script" if s else "its script runs" for name, s in trainers().items()}
        if cluster
        else {}
    )
    uses = ", ".join(f"{each['address']} ({each['interface']})" for each in every)
    for check, text in {
        "cluster": f"{cluster}: {counted(len(every), 'node')}" if cluster else "none: only this machine is checked",
        "versions": ", ".join(f"{name} {version}" for each in every[:1] for name, version in each["versions"].items()),
        "devices": ", ".join(counted(sum(each[f"{kind.lower()}s"] for each in every), kind) for kind in ("CPU", "GPU")),
        "names": ", ".join(f"{each['name']} is {each['name_at'][0]}" for each in every if each["name_at"]),
        "ports": f"gloo uses {uses}" if cluster else "",
        "open files": f"{min((each['open_files'] for each in every), default=0):,}",
        "/dev/shm": f"{min((each['shared_free'] for each in every), default=0) >> 20:,} MiB free",
        "trainers": ", ".join(f"{name} ({text})" for name, text in named.items()),
        "folder": f"{', '.join(folders)}: each node reads what the others write" if folders else "",
    }.items():
        findings = [each for each in problems if each.check == check]
        yield from findings or [Finding(check, text)] * bool(text)


def try_ports(machines: Mapping[str, Facts], nodes: Mapping[str, Any]) -> Iterator[Finding]:
    for target, machine in machines.items():
        port = ask_nodes({target: nodes[target]}, ANSWER_S, listen, machine["address"])[target]
        errors = (
            ask_nodes(nodes, ANSWER_S, connect, machine["address"], port) if isinstance(port, int) else {target: port}
        )
        failed = {source: error for source, error in errors.items() if error}
        todo = f"Let the firewall pass all TCP ports between the nodes ({page('security')})"
        if machine["chosen"]:
            todo = f"{GLOO_INTERFACE} is {machine['interface']} there: name the interface of the nodes' network, or unset it"
        elif target in failed:
            todo = "Correct the routes or the firewall of that node, which cannot reach its own address"
        if failed:
            text = f"from {', '.join(failed)} to {target} at {machine['address']} ({machine['interface']})"
            yield Finding("ports", f"{text}: {next(iter(failed.values()))}", todo)


def try_folder(folder: str, nodes: Mapping[str, Any]) -> Iterator[Finding]:
    for writer, actor in nodes.items():
        path = Path(folder, f"raysgd-doctor-{secrets.token_hex(8)}")
        if error := ask_nodes({writer: actor}, ANSWER_S, Path.touch, path)[writer]:
            todo = "Create it, mount it there, and let the user write to it"
            yield Finding("folder", f"{writer} cannot write to {folder}: {error}", todo)
            continue
        if blind := [reader for reader, error in ask_nodes(nodes, ANSWER_S, see, path).items() if error]:
            todo = "Mount the same file system on all nodes, or save to a URI such as s3://bucket/folder"
            yield Finding("folder", f"what {writer} wrote to {folder} is not seen by {', '.join(blind)}", todo)
        ask_nodes({writer: actor}, ANSWER_S, Path.unlink, path)


@click.command("doctor", short_help="Check this machine, or all nodes of a cluster.")
@click.option("--folder", "folders", multiple=True, help="A folder that all nodes should share. Can be repeated.")
def command(folders: tuple[str, ...]) -> None:
    """Check this machine, or all nodes of the Ray cluster that runs on it or that RAY_ADDRESS
    names.

    Each line says "ok", or what to do. Exit with 1 if one says FAIL. A "note" is advice. Files in a
    --folder are removed."""
    logging.getLogger("raysgd").setLevel(logging.ERROR)  # what it says about joining a cluster is for trainers
    show(examine(folders))
