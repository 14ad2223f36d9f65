"""The parts of a chaos run: each a program with a seed of its own, whose figures accumulate in a file."""

import argparse
import fcntl
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ISOLATED = "RAYSGD_CHAOS_ISOLATED"
NO_CLUSTER = 75
OWN = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--kill-child"]
PREPARE = "mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && ip link set lo up"
SCRIPT = Path(__file__).with_name("chaos.py")
COMBINATIONS = [(backend, api) for backend in ("torch", "horovod") for api in ("class", "function")]
PASSED_ON = ("minutes", "faults", "every_s", "workers", "nodes", "samples", "step_s", "hang_timeout_s")
SUMS = ("faults", "recoveries", "errors_raised", "epochs", "samples", "lost", "doubled", "differing", "ended_untouched")


def accumulate(file: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the parts that the file lacks. Return all parts that it has, other combinations' too."""
    for seed in range(args.seed, args.seed + args.parts):
        own = [(row["backend"], row["api"], row["seed"]) for row in kept(file)]
        if (args.backend, args.api, seed) not in own:
            row = run(args, seed)
            if row is not None:
                add(file, row)
    return kept(file)


def kept(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return rows


def add(file: Path, row: dict[str, Any]) -> None:
    """Several programs may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps([*kept(file), row], indent=1), encoding="utf-8")
        draft.replace(file)


def run(args: argparse.Namespace, seed: int) -> dict[str, Any] | None:
    """One part, as a program. None: its cluster did not start, so it was not a part."""
    command = [sys.executable, str(SCRIPT), "--backend", args.backend, "--api", args.api, "--seed", str(seed)]
    for name in PASSED_ON:
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--verbose"] * args.verbose
    if subprocess.run([*OWN, "sh", "-c", PREPARE], capture_output=True, check=False).returncode == 0:
        command = [*OWN, "sh", "-c", f"{PREPARE} && {ISOLATED}=1 {shlex.join(command)}; exit $?"]
    print(f"--- {args.backend}, {args.api}, seed {seed}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == NO_CLUSTER:
        return None
    try:
        row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    except ValueError:
        ended = f"the part with seed {seed} ended with status {done.returncode}, and reported nothing"
        return {"backend": args.backend, "api": args.api, "seed": seed, "broken": [ended]}
    return row


def presented(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each combination of backend and API, one for all, and one for each kind of fault."""
    names = [f"{backend}, {api}" for backend, api in COMBINATIONS]
    groups = {name: [part for part in parts if f"{part['backend']}, {part['api']}" == name] for name in names}
    rows = [together(name, group) for name, group in groups.items() if group]
    rows.append({**together("all", parts), "broken": []})  # its promises are in the rows above
    kinds = Counter[str]()
    for part in parts:
        kinds.update(part.get("faults_by_kind", {}))
    for kind, count in kinds.most_common():
        by_name = {name: total("faults_by_kind", kind, group) for name, group in groups.items() if group}
        longest = max(part.get("waits_by_kind", {}).get(kind, 0.0) for part in parts)
        rows.append({"show": "kinds", "kind": kind, **by_name, "faults": count, "longest_wait_s": longest})
    return rows


def total(name: str, key: str, parts: Sequence[dict[str, Any]]) -> int:
    return sum(part.get(name, {}).get(key, 0) for part in parts)


def together(name: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    busy = sum(part.get("storm_s", 0.0) for part in parts)
    sums = {each: sum(part.get(each, 0) for part in parts) for each in SUMS}
    reasons = Counter[str]()
    for part in parts:
        reasons.update(part.get("recoveries_by_reason", {}))
    return {
        "show": "runs",
        "run": name,
        "parts": len(parts),
        **sums,
        "recoveries_by_reason": dict(reasons.most_common()),
        "longest_wait_s": max((part.get("longest_wait_s", 0.0) for part in parts), default=0.0),
        "wait_limit_s": min((part["wait_limit_s"] for part in parts if "wait_limit_s" in part), default=None),
        "faults_per_10s": round(10 * sums["faults"] / max(busy, 1e-9), 2),
        "left_behind": sum(part.get("left_behind", 0) for part in parts),
        "broken": [f"{name}, seed {part['seed']}: {promise}" for part in parts for promise in part["broken"]],
    }
