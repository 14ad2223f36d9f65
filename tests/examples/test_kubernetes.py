"""The manifests in examples/kubernetes fit the schema beside them, and what they say fits together."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raysgd import __version__

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
SCHEMA = json.loads((FOLDER / "schema.json").read_text(encoding="utf-8"))
manifests = pytest.mark.parametrize("name", MANIFESTS)


def cluster(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = MANIFESTS[name]["spec"]
    return spec.get("rayClusterSpec", spec)


def pods(name: str) -> list[dict[str, Any]]:
    groups = [cluster(name)["headGroupSpec"], *cluster(name)["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@manifests
def test_manifest_fits_the_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MANIFESTS[name], SCHEMA)


@manifests
def test_mounts_have_a_volume(name: str) -> None:
    for pod in pods(name):
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@manifests
def test_workers_announce_their_end(name: str) -> None:
    """The hook is a command that this version of Ray accepts; its deadline and its wait end before the pod is killed."""
    from ray.scripts.scripts import drain_node

    for pod in pods(name)[1:]:
        (container,) = pod["containers"]
        shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, option) == ("bash", "-c")
        drain, wait = script.split(";", 1)
        words = shlex.split(drain)
        assert words[:2] == ["ray", "drain-node"]
        given = drain_node.make_context("drain-node", words[2:]).params
        assert given["reason"] == "DRAIN_NODE_REASON_PREEMPTION"
        waited = re.search(r"seq (\d+)", wait)
        assert waited and given["deadline_remaining_seconds"] <= int(waited[1]) < pod["terminationGracePeriodSeconds"]


@manifests
def test_versions_are_those_of_the_repository(name: str) -> None:
    pinned = re.search(r"(?m)^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert pinned and cluster(name)["rayVersion"] == pinned[1]
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert f"rayproject/ray:{pinned[1]}-" in dockerfile and f"raysgd[torch]=={__version__}" in dockerfile
    assert all(each["image"].endswith(f":{__version__}") for pod in pods(name) for each in pod["containers"])
