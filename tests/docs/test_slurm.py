"""The script for Slurm on docs/cluster.md, with imitations of `srun`, `ray` and `python`."""

import os
import re
import stat
import subprocess
from pathlib import Path

from tests.docs.test_fenced_blocks import ROOT

# Two nodes; a signal ends what runs on them.
SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
command = sys.argv[1 + next(n for n, each in enumerate(sys.argv[1:]) if not each.startswith("--")):]
nodes = [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(n)}, start_new_session=True) for n in (1, 0)]
signal.signal(signal.SIGTERM, lambda *_: [os.killpg(each.pid, signal.SIGKILL) for each in nodes])
[each.wait() for each in nodes]
"""
# The second node is there only if the head is, and its Ray ends once.
RAY = """#!/bin/bash
echo "$@" >> "$LOG"
case "$1 $2" in
    "start --head") touch head; exec sleep 100 ;;
    start*) [ -f head ] && { [ -f ended ] && { touch joined; exec sleep 100; }; touch ended; }; exit 1 ;;
    status*) [ -f joined ] ;;
esac
"""
PYTHON = """#!/bin/bash
echo "$@" "$RAY_ADDRESS" >> "$LOG"
exit 3
"""


def test_each_node_of_a_job_joins_and_the_script_decides_how_it_ends(tmp_path: Path) -> None:
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    (job,) = re.findall(r"(?ms)^```bash\n(#!/bin/bash\n.*?)^```", page)
    for name, text in {"srun": SRUN, "ray": RAY, "python": PYTHON, "job.sh": job}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(stat.S_IRWXU)
    log = tmp_path / "log"
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(["./job.sh"], cwd=tmp_path, env={**os.environ, **given}, timeout=60)
    assert done.returncode == 3
    *calls, last = log.read_text().splitlines()
    (head,) = (each for each in calls if "--head" in each)
    joins = [each for each in calls if "--address" in each]
    address = last.removeprefix("line.py 50 ")
    assert head.endswith(f"--node-ip-address={address.removesuffix(':6379')} --port=6379 --num-cpus=8")
    assert len(joins) >= 2 and {*joins} == {f"start --address={address} --block --num-cpus=8"}
