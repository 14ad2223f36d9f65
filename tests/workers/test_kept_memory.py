"""Workers keep freed memory for the next step, unless the user has set options for glibc."""

import os
import resource
import subprocess
import sys

import pytest
import torch

from tests.torch.small import inline

MB, BLOCKS = 1 << 20, 160  # more than glibc keeps, whatever memory was freed before
STEP = f"""
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    for block in [bytearray(b"x") * {MB} for _ in range({BLOCKS})]:
        del block

step()
step()
before = faults()
step()
print(faults() - before)
"""
PAGES = BLOCKS * MB // resource.getpagesize()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not have glibc")


def page_faults_of_a_step() -> int:
    def step() -> None:
        blocks = [torch.ones(MB, dtype=torch.uint8) for _ in range(BLOCKS)]
        del blocks

    step()
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_worker_keeps_the_memory_of_a_step_for_the_next_one(ray_cluster: None) -> None:
    with inline(use_ray=True) as trainer:
        assert trainer.apply_all_workers(page_faults_of_a_step)[0] < PAGES / 20


def test_the_users_options_for_glibc_are_kept() -> None:
    script = "from raysgd.workers import actor\nactor._keep_freed_memory()\n" + STEP
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    users = {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}
    kept, *freed = [
        int(subprocess.run([sys.executable, "-c", script], env={**own, **more}, check=True, stdout=-1).stdout)
        for more in ({}, *users)
    ]
    assert kept < PAGES / 20 < PAGES / 2 < min(freed)
