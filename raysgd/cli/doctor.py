"""Say whether this machine, and the cluster that it belongs to, are ready for raysgd: `raysgd doctor`. Both.

The functions that return findings get what they judge as values. `examine` asks the machines.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from raysgd.cli.findings import Finding
from raysgd.cli.machine import IMPORT_S, Machine, Probe
from raysgd.errors import RaysgdError
from raysgd.version import page
from raysgd.workers.survey import Node, driver_address, join_running, nodes_with

__all__ = ["Connection", "examine", "token_source"]

Machines = Mapping[str, Machine]

ANSWER_S, CONNECT_S, TRIES = 30.0, 5.0, 3
CLOCKS_S = 1.0
SOFT_FILES, HARD_FILES = 1024, 4096
SHARED_AT_LEAST, MEMORY_AT_LEAST = 1 << 30, 1 << 30
COMPARED = ("raysgd", "ray", "torch", "tensorflow", "horovod")
FILES_ADVICE = (
    "Raise it before Ray starts: with `ulimit -n 65536`, in /etc/security/limits.conf, with LimitNOFILE= of the systemd unit, or "
    "with --ulimit nofile=65536:65536 of the container"
)
SHARED_ADVICE = (
    "Ray's object store and the processes of DataLoaders use it. Docker: --shm-size=8g. Kubernetes: an emptyDir volume with "
    "medium: Memory at /dev/shm"
)
TOKEN_ADVICE = (
    "Run `ray get-auth-token --generate` once, and set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, on every "
    f"machine and where you submit jobs ({page('jobs')}#tokens)"
)


@dataclass(frozen=True)
class Connection:
    """A connection that one machine opened to another one, and why that failed, "" if it did not."""

    source: str
    target: str
    address: str
    error: str = ""


# -- what the values mean -----------------------------------------------------------------------------


def versions(machines: Machines, requirements: Sequence[str]) -> Iterator[Finding]:
    """Judge the installed packages by the requirements of raysgd, such as `torch>=2.8; extra == "torch"`."""
    if not requirements:
        yield Finding("versions", "raysgd is not an installed package", "Install it: pip install 'raysgd[torch]'")
    specifiers = {each.name: each.specifier for each in map(Requirement, requirements) if each.specifier}
    for node, machine in machines.items():
        old = [
            f"{name} {found} (needs {specifiers[name]})"
            for name, found in machine.versions.items()
            if name in specifiers and not specifiers[name].contains(found, prereleases=True)
        ]
        if old:
            wanted = " ".join(f"'{name}{specifiers[name]}'" for name in (each.split()[0] for each in old))
            yield Finding("versions", f"{node}: {', '.join(old)}", f"Install versions that fit: pip install {wanted}")
        for name, error in machine.broken.items():
            again = "build it for the installed torch" if name == "horovod" else "install it again"
            yield Finding("versions", f"{node}: {name} cannot be imported: {error}", f"Correct that, or {again}")
        if not {"torch", "tensorflow"} & machine.versions.keys():
            yield Finding(
                "versions", f"{node}: neither torch nor tensorflow", "Install one: pip install 'raysgd[torch]'"
            )
    for name in ("Python", *COMPARED):
        found = {
            node: each.python if name == "Python" else each.versions.get(name, "none")
            for node, each in machines.items()
        }
        if len(set(found.values())) > 1:
            text = ", ".join(f"{version} on {node}" for node, version in found.items())
            yield Finding("versions", f"{name} differs: {text}", f"Install the same {name} on all machines")


def devices(machines: Machines, ray_gpus: Mapping[str, float]) -> Iterator[Finding]:
    """Judge the GPUs and what the ranks can communicate with. `ray_gpus` are those that Ray counts on each node."""
    for node, machine in machines.items():
        if machine.listed_gpus > len(machine.gpus) and "torch" in machine.versions:
            why = f"is built for CUDA {machine.cuda}" if machine.cuda else "is built without CUDA"
            yield Finding(
                "GPUs",
                f"{node}: nvidia-smi lists {machine.listed_gpus}, torch sees {len(machine.gpus)}, and {why}",
                "Install a torch that fits the driver (https://pytorch.org/get-started), or correct CUDA_VISIBLE_DEVICES",
            )
        elif machine.gpus and ray_gpus.get(node, len(machine.gpus)) != len(machine.gpus):
            text = f"{node}: torch sees {len(machine.gpus)}, and Ray counts {ray_gpus[node]:g}"
            yield Finding("GPUs", text, f"Start Ray there with --num-gpus={len(machine.gpus)}")
        if machine.gpus and not machine.nccl:
            yield Finding("NCCL", f"{node}: torch has GPUs, and no NCCL", "Install torch's CUDA build for Linux")
        if "torch" in machine.versions and "torch" not in machine.broken and not machine.gloo:
            yield Finding(
                "gloo", f"{node}: torch is built without gloo", "Install torch's own wheels: pip install torch"
            )


def limits(machines: Machines) -> Iterator[Finding]:
    """Judge the limits on open files, shared memory and memory."""
    for node, machine in machines.items():
        soft, hard = (number if number >= 0 else 1 << 30 for number in machine.open_files)
        if soft < SOFT_FILES or hard < HARD_FILES:
            wanted = f"at least {SOFT_FILES:,} and {HARD_FILES:,} are needed"
            yield Finding("open files", f"{node}: {soft:,}, can be raised to {hard:,}; {wanted}", FILES_ADVICE)
        if machine.shared_bytes is not None and machine.shared_bytes[0] < SHARED_AT_LEAST:
            text = f"{node}: /dev/shm has {_gib(machine.shared_bytes[0])}, at least {_gib(SHARED_AT_LEAST)} is needed"
            yield Finding("shared memory", text, f"Make it larger. {SHARED_ADVICE}")
        elif machine.shared_bytes is not None and machine.shared_bytes[1] < SHARED_AT_LEAST / 4:
            text = f"{node}: {_gib(machine.shared_bytes[1])} of /dev/shm is free"
            yield Finding(
                "shared memory", text, "End what fills it, or remove files that ended programs have left in it"
            )
        if machine.memory_bytes is not None and machine.memory_bytes[1] < MEMORY_AT_LEAST:
            total, free = map(_gib, machine.memory_bytes)
            text = f"{node}: {free} of {total} is free; without memory, the kernel kills workers"
            yield Finding(
                "memory", text, "End other programs, or raise the limit of the container or of the control group"
            )


def clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Judge the differences from this machine's clock: for each node, seconds and their uncertainty."""
    for node, (offset, uncertain) in offsets.items():
        if abs(offset) - uncertain > CLOCKS_S:
            text = f"{node}: {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine"
            yield Finding(
                "clocks", text, "Start a time service on it (chronyd, systemd-timesyncd), and wait until it is in step"
            )


def connections(tried: Iterable[Connection]) -> Iterator[Finding]:
    """Judge what the machines' connections to each other showed."""
    for each in tried:
        if not each.error:
            continue
        todo = f"Let the firewall pass all TCP ports between the nodes ({page('security')})"
        if each.address.startswith("127.") and each.source != each.target:
            todo = (
                f"The host name of {each.target} resolves to the loopback address, or to none, and gloo listens there: correct "
                "/etc/hosts or the name server, or set GLOO_SOCKET_IFNAME on every node to the interface of their network"
            )
        elif each.source == each.target:
            todo = "This machine cannot reach its own address: correct its routes, /etc/hosts or its firewall"
        yield Finding("ports", f"from {each.source} to {each.target} at {each.address}: {each.error}", todo)


def token_source(environment: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Return where Ray takes its token from, "" if there is none, and what is wrong with that place."""
    if environment.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN", ""
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else home / ".ray" / "auth_token"
    try:
        return (str(path), "") if path.read_text(encoding="utf-8").strip() else ("", f"{path} is empty")
    except OSError as error:
        return "", str(error) if named else ""


def tokens(mode: str, source: str, wrong: str, machine_count: int) -> Iterator[Finding]:
    """Judge Ray's token authentication. `mode` is RAY_AUTH_MODE; `source` and `wrong` are those of `token_source`."""
    if mode == "token" and not source:
        text = f"RAY_AUTH_MODE=token, and there is no token{': ' + wrong if wrong else ''}"
        yield Finding("tokens", text, TOKEN_ADVICE)
    elif wrong:
        yield Finding("tokens", f"RAY_AUTH_TOKEN_PATH names no token: {wrong}", "Correct or unset it")
    elif machine_count > 1 and not source:
        text = "off: everybody who reaches Ray's ports can run code on the cluster"
        yield Finding("tokens", text, f"Switch them on. {TOKEN_ADVICE}", fails=False)


def folder_findings(
    folder: str, written: Mapping[str, str], unseen: Mapping[tuple[str, str], str]
) -> Iterator[Finding]:
    """Judge a folder. `written` has each node's error in writing a file, `unseen` the error of one in reading another's."""
    for node, error in written.items():
        if error:
            todo = "Create it, mount it there, and let the user write to it"
            yield Finding("folder", f"{folder}: {node} cannot write to it: {error}", todo)
    for (reader, writer), error in unseen.items():
        if error and not written[writer]:
            todo = "Mount the same file system on all nodes, or save to a URI such as s3://bucket/folder"
            yield Finding("folder", f"{folder}: {reader} does not see what {writer} wrote: {error}", todo)


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.3g} GiB"


def summary(machines: Machines) -> Mapping[str, str]:
    """Return what is said of each check without a problem."""
    first = next(iter(machines.values()))
    named = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    gpus = [gpu for each in machines.values() for gpu in each.gpus]
    memory = [each.memory_bytes for each in machines.values() if each.memory_bytes]
    shared = [each.shared_bytes for each in machines.values() if each.shared_bytes]
    soft, hard = min(each.open_files for each in machines.values())
    return {
        "versions": f"Python {first.python}, {named}" + (", on every node" if len(machines) > 1 else ""),
        "GPUs": f"{len(gpus)}: {', '.join(sorted(set(gpus)))}" if gpus else "none: trainings use the CPUs",
        "NCCL": "available" if first.nccl else "not needed without GPUs",
        "gloo": "available" if first.gloo else "not needed without torch",
        "open files": f"{soft:,}, can be raised to {hard:,}",
        "shared memory": f"/dev/shm has {_gib(min(shared)[0])}" if shared else "not limited on this system",
        "memory": f"{_gib(min(memory)[1])} of {_gib(min(memory)[0])} free" if memory else "unknown on this system",
    }


# -- asking the machines ------------------------------------------------------------------------------


def examine(folders: Sequence[str] = (), *, probe: Callable[[], Any] = Probe) -> Iterator[Finding]:
    """Yield what was found on this machine, or on all nodes of the cluster that it belongs to or that RAY_ADDRESS names."""
    here = probe()
    try:
        cluster, refused = "", None
        try:
            cluster = join_running()
        except RaysgdError as error:
            refused = Finding("cluster", str(error).partition(". ")[0], str(error).partition(". ")[2] or "Correct that")
        alone = {"this machine": Node(driver_address(), 0.0, lambda _, method, *given: getattr(here, method)(*given))}
        nodes = dict(nodes_with(Probe)) if cluster else alone
        yield refused or Finding("cluster", f"{cluster}, {len(nodes)} node(s)" if cluster else "none is running here")
        machines = yield from _machines(nodes)
        nodes = {name: node for name, node in nodes.items() if name in machines}
        if machines:
            yield from _judged(machines, nodes, folders, in_cluster=bool(cluster))
    finally:
        here.close()


def _machines(nodes: Mapping[str, Node]) -> Generator[Finding, None, dict[str, Machine]]:
    """Yield a finding for each node that does not answer. Return what the others know about themselves."""
    found: dict[str, Machine] = {}
    asked = _at_once(nodes, lambda node: node.call(IMPORT_S + ANSWER_S, "machine"))
    for name, answer in asked.items():
        if isinstance(answer, Exception):
            todo = f"Install the same raysgd there as here ({metadata.version('raysgd')}), and look at Ray's logs on that node"
            yield Finding("nodes", f"{name} does not answer: {answer}", todo)
        else:
            found[name] = answer
    return found


def _judged(
    machines: Machines, nodes: Mapping[str, Node], folders: Sequence[str], *, in_cluster: bool
) -> Iterator[Finding]:
    mode = os.environ.get("RAY_AUTH_MODE", "").strip().lower()
    source, wrong = ("", "") if mode == "disabled" else token_source(os.environ, Path.home())
    passed = summary(machines)
    yield from _grouped(passed, versions(machines, metadata.requires("raysgd") or []), "versions")
    counted = {name: node.gpus for name, node in nodes.items()} if in_cluster else {}
    yield from _grouped(passed, devices(machines, counted), "GPUs", "NCCL", "gloo")
    tried = list(_connections(machines, nodes))
    yield from _grouped({"ports": f"{len(tried)} connection(s)"}, connections(tried), "ports")
    offsets = {name: _offset(node) for name, node in nodes.items()}
    largest = max(abs(offset) for offset, _ in offsets.values())
    apart = f"at most {largest * 1000:.1f} ms apart" if len(nodes) > 1 else "only one machine"
    yield from _grouped({"clocks": apart}, clocks(offsets), "clocks")
    yield from _grouped(passed, limits(machines), "open files", "shared memory", "memory")
    on = (
        f"from {source}"
        if source
        else f"off: this machine's Ray is reachable as its firewall allows ({page('security')})"
    )
    yield from _grouped({"tokens": on}, tokens(mode, source, wrong, len(machines)), "tokens")
    for folder in folders:
        written, unseen = _tried_folder(folder, nodes)
        text = f"{folder}: written and read" + (" by every node" if len(nodes) > 1 else "")
        yield from _grouped({"folder": text}, folder_findings(folder, written, unseen), "folder")


def _grouped(passed: Mapping[str, str], found: Iterable[Finding], *checks: str) -> Iterator[Finding]:
    """Yield the findings, and for each check without one that all is well."""
    problems = list(found)
    for check in checks:
        yield from [each for each in problems if each.check == check] or [Finding(check, passed[check])]


def _at_once(nodes: Mapping[str, Node], ask: Callable[[Node], Any]) -> dict[str, Any]:
    """Ask all nodes at the same time. Return their answers, or what was raised."""

    def answered(node: Node) -> Any:
        try:
            return ask(node)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(max(len(nodes), 1)) as pool:
        return dict(zip(nodes, pool.map(answered, nodes.values()), strict=True))


def _connections(machines: Machines, nodes: Mapping[str, Node]) -> Iterator[Connection]:
    """Let every machine listen at the addresses that training uses, and each connect to all."""
    for target, node in nodes.items():
        for address in dict.fromkeys(
            ("127.0.0.1",) * (len(nodes) == 1) + (node.address, machines[target].gloo_address)
        ):
            port, secret = node.call(ANSWER_S, "listen", address)
            if not port:
                yield Connection(target, target, address, f"cannot listen there: {secret}")
                continue
            given = address, port, secret, CONNECT_S
            answers = _at_once(nodes, lambda source, given=given: source.call(ANSWER_S, "connect", *given))  # type: ignore[misc]
            for source, error in answers.items():
                yield Connection(source, target, address, str(error))


def _offset(node: Node) -> tuple[float, float]:
    """Return how many seconds a node's clock is ahead of this one's, and how uncertain that is: half of the time that the
    fastest of several questions took."""
    best = (0.0, float("inf"))
    for _ in range(TRIES):
        began, started = time.time(), time.monotonic()
        clock = node.call(ANSWER_S, "clock")
        uncertain = (time.monotonic() - started) / 2
        best = min(best, (clock - began - uncertain, uncertain), key=lambda each: each[1])
    return best


def _tried_folder(folder: str, nodes: Mapping[str, Node]) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Let each node write a file to the folder, and read the files of all. Return the errors of both."""
    files = {name: (f"raysgd-doctor-{secrets.token_hex(8)}.txt", secrets.token_hex(32)) for name in nodes}
    written = {name: str(node.call(ANSWER_S, "write", folder, *files[name])) for name, node in nodes.items()}
    unseen: dict[tuple[str, str], str] = {}
    for writer in [name for name, error in written.items() if not error]:
        answers = _at_once(nodes, lambda node, writer=writer: node.call(ANSWER_S, "read", folder, *files[writer]))  # type: ignore[misc]
        unseen |= {(reader, writer): str(error) for reader, error in answers.items()}
        nodes[writer].call(ANSWER_S, "remove", folder, files[writer][0])
    return written, unseen
