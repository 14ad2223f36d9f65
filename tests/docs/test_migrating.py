"""The guides for migrating from Ray Train: only the imports of the scripts change, and both print the same."""

import importlib.util
import re
import subprocess
from collections.abc import Callable

import pytest

from tests.background import Background
from tests.docs.test_fenced_blocks import ROOT
from tools.check_pages import blocks

PAGES = ("migrating_ray_train_v1.md", "migrating_ray_train.md")
# More CPUs than a small machine has, so that no worker waits for one.
CLUSTER = "import ray\nray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False)\n"


def parts(page: str) -> tuple[str, str, str]:
    """Return the changed imports as a diff, the script after the change, and what it prints."""
    found = blocks((ROOT / "docs" / page).read_text(encoding="utf-8"), page)
    diff, after, output = found[:3]
    assert [diff.language, after.language, output.language] == ["diff", "python", "text"]
    return diff.code, after.code, output.code


def changes(diff: str) -> list[tuple[str, str]]:
    """Return the lines that change, before and after."""
    removed, added = ([line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "-+")
    return list(zip(removed, added, strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_only_the_imports_differ(page: str) -> None:
    diff, script, _ = parts(page)
    imports = [line for line in script.splitlines() if "import" in line and "raysgd" in line]
    assert imports == [after for _, after in changes(diff)] != []
    assert imports == [re.sub(r"\bray\b", "raysgd", before) for before, _ in changes(diff)]


def printed(background: Background, which: str) -> subprocess.CompletedProcess[str] | None:
    if which == "before" and lacking():
        return None
    diff, text, _ = parts("migrating_ray_train.md")
    for before, after in changes(diff) if which == "before" else ():
        text = text.replace(f"{after}\n", f"{before}\n")
    folder = background.folder()
    script = folder / "guide.py"
    script.write_text(CLUSTER + text, encoding="utf-8")
    return background.run(str(script), folder=folder, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="200")


def lacking() -> list[str]:
    return [package for package in ("pandas", "pyarrow", "pydantic") if importlib.util.find_spec(package) is None]


@pytest.mark.slow
@pytest.mark.script(run=printed)
@pytest.mark.parametrize(
    "which", [pytest.param("before", marks=pytest.mark.nightly), pytest.param("after", marks=pytest.mark.more)]
)
def test_both_print_the_same(which: str, outcome: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    if which == "before" and lacking():
        pytest.skip(f"ray.train needs {lacking()} (pip install 'ray[train]')")
    done, (_, _, output) = outcome(), parts("migrating_ray_train.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == output.splitlines(), done.stdout + done.stderr
