"""Several hosts on one machine, made of Linux namespaces, with a Ray node in each.

A host has a network of its own (one interface, connected to the others by a bridge), a host name, a hosts file, process
ids, /tmp, /dev/shm and a home folder. It shares the kernel, the clock and the installed programs with the machine; the
checkout and the environment are mounted read-only. All of it is inside an outer network, mount and process namespace,
so that nothing reaches the machine's own network, and the end of one process ends everything. The outer one is a user
namespace too, in which any user is root. Where the kernel does not allow that, root does without it.

Needs Linux, and the commands of iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

__all__ = ["ROOT", "Host", "Hosts", "Script", "wait_until", "why_not"]

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("ip", "tc", "unshare", "nsenter", "mount")
GCS_PORT = 6379
READY = "Ray runtime started."
OBJECT_STORE_BYTES = 200_000_000
SIDE = "side"  # a resource that each node has once, for a worker beside the one that has the CPU

# Each host's own mounts. What it shares with the machine is bound to a second place first, because it may be in /tmp.
MOUNTS = """
mount --make-rprivate /
hostname {name}
ip link set lo up
mount -t tmpfs stash /mnt
n=0
for path in {shared}; do n=$((n + 1)); mkdir /mnt/$n; mount --bind "$path" /mnt/$n; done
mkdir /mnt/etc
touch /mnt/etc/hosts /mnt/etc/resolv.conf
mount --bind /mnt/etc/hosts /etc/hosts
mount --bind /mnt/etc/resolv.conf /etc/resolv.conf
mount -t tmpfs tmp /tmp
mount -t tmpfs -o size=1g shm /dev/shm
n=0
for path in {shared}; do
  n=$((n + 1))
  mkdir -p "$path"
  mount --bind /mnt/$n "$path"
  mount -o remount,bind,ro "$path"
done
mkdir /tmp/home
echo ready
exec cat
"""


OUTER = ["-n", "-m", "-p", "-f", "--kill-child", "--mount-proc"]
AS_USER = (["-U", "-r"], ["-U", "--preserve-credentials"])  # to make, and to enter
AS_ROOT: tuple[list[str], list[str]] = ([], [])


def why_not() -> str:
    """Return what this machine lacks for hosts, "" if nothing."""
    if sys.platform != "linux":
        return "hosts made of namespaces need Linux"
    lacking = [command for command in COMMANDS if shutil.which(command) is None]
    if lacking:
        return f"hosts made of namespaces need these commands (iproute2, util-linux): {', '.join(lacking)}"
    try:
        _flags()
    except OSError as error:
        return f"namespaces are not allowed here: {error}"
    return ""


@functools.cache
def _flags() -> tuple[list[str], list[str]]:
    """Return the flags that make and enter the outer namespace's users. Raise an OSError if it cannot be made."""
    interface = ["ip", "link", "add", "type", "veth"]
    try:
        _checked(["unshare", *AS_USER[0], *OUTER, *interface])
    except OSError:
        _checked(["unshare", *OUTER, *interface])
        return AS_ROOT
    return AS_USER


class _Namespace:
    """Owns the first process of a set of namespaces, `cat`. All other processes in them end with it, and it with this one,
    whose end of the pipe to it is closed then."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._starter = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._starter.stdout is not None
        if self._starter.stdout.readline().strip() != "ready":
            raise OSError(f"namespaces could not be made: {self._starter.communicate()[1]}")
        self.init = psutil.Process(self._starter.pid).children(recursive=True)[-1].pid

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.init).kill()
        self._starter.communicate()


class Host:
    """One host. Runs commands in it, and causes faults."""

    def __init__(self, hosts: Hosts, name: str, address: str) -> None:
        self._hosts, self.name, self.address = hosts, name, address
        self._port = f"v-{name}"  # of the bridge
        self._started: list[subprocess.Popen[str]] = []
        self.boot()

    def boot(self) -> None:
        """Make the host, also again after its end. All that it wrote is gone then."""
        shared = {str(ROOT), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
        script = MOUNTS.format(name=self.name, shared=" ".join(map(shlex.quote, sorted(shared))))
        flags = ["-n", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc"]
        self._namespace = _Namespace([*self._hosts.entering(), "unshare", *flags, "sh", "-ec", script])
        interface = ["type", "veth", "peer", "name", "eth0", "netns", str(self._pid())]
        self._hosts.run("ip", "link", "add", self._port, *interface)
        self._hosts.run("ip", "link", "set", self._port, "master", "bridge", "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "eth0", "up")
        self.call("ip", "route", "add", "default", "via", self._hosts.gateway)  # without one, Ray ends itself

    @property
    def runs(self) -> bool:
        return os.path.exists(f"/proc/{self._namespace.init}")

    def _pid(self) -> int:
        """Return the number of this host's first process in the outer namespace."""
        status = Path(f"/proc/{self._namespace.init}/status").read_text(encoding="utf-8")
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
        return int(numbers[-2])

    def entering(self) -> list[str]:
        return ["nsenter", "-t", str(self._namespace.init), *_flags()[1], "-n", "-m", "-u", "-i", "-p"]

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command, in a session of its own, with its error output in its output."""
        process = subprocess.Popen(
            [*self.entering(), *command],
            env={**self._hosts.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def call(self, *command: str) -> str:
        return _checked([*self.entering(), *command])

    def start_ray(self, *, cpus: int = 1, **how: Any) -> None:
        """Start this host's Ray node, as `begin_ray` does, and return when it runs."""
        self.wait_for_ray(self.begin_ray(cpus=cpus, **how))

    def begin_ray(
        self, *, head: Host | None = None, cpus: int = 1, python: Sequence[str] = (sys.executable,), **environment: str
    ) -> subprocess.Popen[str]:
        """Begin to start this host's Ray node. Without `head`, it is the head."""
        where = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        if head is not None:
            where = [f"--address={head.address}:{GCS_PORT}"]
        ray = [*python, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}"]
        memory = f"--object-store-memory={OBJECT_STORE_BYTES}"
        resources = f'--resources={{"{SIDE}": 1}}'
        return self.start(*ray, *where, memory, resources, f"--node-ip-address={self.address}", **environment)

    def wait_for_ray(self, process: subprocess.Popen[str]) -> None:
        """Return when the Ray node runs that this process starts."""
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if READY in line:
                self._hosts.keep(process)
                return
        raise OSError(f"Ray did not start on {self.name}: {''.join(lines)}")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the running processes of this host whose command line contains `name`."""
        found: list[psutil.Process] = []
        try:
            namespace = os.readlink(f"/proc/{self._namespace.init}/ns/pid")
        except FileNotFoundError:  # the host has ended
            return found
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if here and name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # -- names ----------------------------------------------------------------------------------------

    def set_names(self, names: dict[str, str]) -> None:
        """Set the hosts file: which address each name has on this host."""
        lines = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items())
        self.call("sh", "-c", f"printf %s {shlex.quote(lines)} > /etc/hosts")

    # -- faults ---------------------------------------------------------------------------------------

    def _undo(self, *command: str) -> None:
        """End a fault, if the host has not ended."""
        if self.runs:
            self.call(*command)

    def kill(self) -> None:
        """End every process of this host. Its connections do not end first, as when a machine loses its power."""
        self.unplug()
        self.end()

    def end(self) -> None:
        """End every process of this host. The system closes their connections."""
        self._namespace.kill()
        with contextlib.suppress(OSError):  # it goes with the host, but not at once
            self._hosts.run("ip", "link", "delete", self._port)

    def unplug(self) -> None:
        self._hosts.run("ip", "link", "set", self._port, "nomaster")

    def plug_in(self) -> None:
        self._hosts.run("ip", "link", "set", self._port, "master", "bridge")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        self.unplug()
        try:
            yield
        finally:
            self.plug_in()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop every process. The system still acknowledges what arrives."""
        stopped = [process for process in self.processes("") if process.pid != self._namespace.init]
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            for starter in self._started:  # nsenter stops itself when what it has started stops
                starter.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def losing(self, share: float) -> Iterator[None]:
        """Lose a share of the packets that this host sends."""
        # Load a random number (SKF_AD_RANDOM). From the limit on return -1 (nothing special), else 2 (TC_ACT_SHOT).
        code = f"4,32 0 0 4294963256,53 0 1 {int(share * 2**32)},6 0 0 4294967295,6 0 0 2"
        self.call("tc", "qdisc", "add", "dev", "eth0", "clsact")
        try:
            self.call("tc", "filter", "add", "dev", "eth0", "egress", "bpf", "direct-action", "bytecode", code)
            yield
        finally:
            self._undo("tc", "qdisc", "del", "dev", "eth0", "clsact")

    @contextlib.contextmanager
    def without_route_to(self, *others: Host) -> Iterator[None]:
        """Let nothing leave for these hosts. What they send still arrives."""
        for other in others:
            self.call("ip", "route", "add", "blackhole", f"{other.address}/32")
        try:
            yield
        finally:
            for other in others:
                self._undo("ip", "route", "del", "blackhole", f"{other.address}/32")

    @contextlib.contextmanager
    def firewall(self, port: int) -> Iterator[None]:
        """Answer no connection to this TCP port of this host."""
        rule = ["ipproto", "tcp", "sport", str(port), "blackhole"]
        self.call("ip", "rule", "add", *rule)
        try:
            yield
        finally:
            self._undo("ip", "rule", "del", *rule)

    @contextlib.contextmanager
    def rate(self, megabits_per_s: float) -> Iterator[None]:
        """Limit what this host sends."""
        queue = ["tbf", "rate", f"{megabits_per_s:g}mbit", "burst", "32kb", "latency", "400ms"]
        self.call("tc", "qdisc", "add", "dev", "eth0", "root", *queue)
        try:
            yield
        finally:
            self._undo("tc", "qdisc", "del", "dev", "eth0", "root")


class Hosts:
    """Owns the outer namespace, the hosts, and the cluster's token. A context manager, at whose end all is gone.

    Hosts are named host-a, host-b and so on, at 10.9.0.1, 10.9.0.2 ..., and know each other by name."""

    gateway = "10.9.0.254"

    def __init__(self, count: int) -> None:
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "HOME": "/tmp/home",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples" / "benchmarks")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_ADDRESS": f"10.9.0.1:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",  # on a busy machine, several starts at once take long
        }
        self._running: list[subprocess.Popen[str]] = []
        self.all: list[Host] = []
        script = "mount --make-rprivate / && ip link add bridge type bridge && ip link set bridge up && echo ready"
        command = ["unshare", *_flags()[0], *OUTER, "sh", "-ec", f"{script} && exec cat"]
        self._namespace = _Namespace(command)
        try:
            for _ in range(count):
                self.add()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.all[index]

    def add(self) -> Host:
        """Add a host, without a Ray node."""
        n = len(self.all)
        self.all.append(Host(self, f"host-{chr(97 + n)}", f"10.9.0.{n + 1}"))
        self.name_all()
        return self.all[-1]

    def entering(self) -> list[str]:
        return ["nsenter", "-t", str(self._namespace.init), *_flags()[1], "-n", "-m", "-p"]

    def run(self, *command: str) -> str:
        return _checked([*self.entering(), *command])

    def keep(self, process: subprocess.Popen[str]) -> None:
        """Wait for this process at the end."""
        self._running.append(process)

    def name_all(self) -> None:
        """Let every host know the names of all."""
        for host in self.all:
            if host.runs:
                host.set_names({each.name: each.address for each in self.all})

    def start_ray(self, *, head_cpus: int = 1) -> None:
        """Start a Ray node on each host. The first host has the head."""
        first, *others = self.all
        first.start_ray(cpus=head_cpus)
        begun = [(host, host.begin_ray(head=first)) for host in others]
        for host, process in begun:
            host.wait_for_ray(process)

    def close(self) -> None:
        for host in self.all:
            host.end()
        self._namespace.kill()
        for process in self._running:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Script:
    """A Python script on a host: a context manager. It is ended after `limit_s`, and with the context."""

    def __init__(self, host: Host, path: Path, *arguments: str, limit_s: float, **environment: str) -> None:
        self._host, self._path, self._limit_s = host, path, limit_s
        self._named = " ".join([str(path), *arguments])
        self._lines: list[str] = []
        self._process = host.start(sys.executable, str(path), *arguments, **environment)
        self._late = False
        self._timer = threading.Timer(limit_s, self._end_late)

    def __enter__(self) -> Script:
        self._timer.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._kill()
        self._process.communicate()

    def until(self, text: str) -> str:
        """Return the next line that contains this text. Raise an error with the output if there is none."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if text in line:
                return line
        self._check_in_time()
        raise AssertionError(f"{self._path.name} ended without {text!r}:\n{self.output}")

    def end(self) -> str:
        """Wait for its end, and return its output."""
        assert self._process.stdout is not None
        self._lines += self._process.stdout
        self._check_in_time()
        return self.output

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def _check_in_time(self) -> None:
        if self._late:
            raise AssertionError(f"{self._path.name} did not end within {self._limit_s:g} s:\n{self.output}")

    def _end_late(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        for each in self._host.processes(self._named):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Return after how many seconds the condition holds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            raise AssertionError(f"{what} within {limit_s:g} s")
        time.sleep(0.1)
    return time.monotonic() - began


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
