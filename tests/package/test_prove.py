"""`make prove` says so, and ends with status 1, if any of its parts is not as promised. The parts' commands are stubbed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import prove

SAME = {"program": "resnet", "figure": "val_loss", "by_hand": "0.8", "three_kills": "0.8, same bits"}
SAME |= {"raysgd": "0.8, 3e-08", "started_again": "0.8, same bits"}
CURVE = {"repeated_samples": 0, "still_s": 1.2, "before": 400.0, "from_s": [-0.5, 0.0], "new_per_s": [400.0, 200.0]}
PASSED = ("12 passed in 3.2s", "11 passed, 1 failed")
# What each part prints if all is as promised, and if not; where only its exit status differs, that is 1.
PRINTED = (
    (json.dumps({"rows": [CURVE]}, indent=1), json.dumps({"rows": [{**CURVE, "repeated_samples": 8}]}, indent=1)),
    ("ok    samples     840, as without faults, each as often", "note  samples     840; which ones was not measured"),
    ("2000 seeds, 99.1 s of processor time, 0 failed", "2000 seeds, 99.1 s of processor time, 1 failed"),
    *[PASSED] * 3,
    (json.dumps({"rows": [SAME]}, indent=1), json.dumps({"rows": [{**SAME, "three_kills": "0.9, 2e-01"}]}, indent=1)),
)


def printing(text: str, status: int = 0) -> list[str]:
    return ["sh", "-c", 'printf "%s\n" "$1"; exit "$2"', "", text, str(status)]


def proven(patch: pytest.MonkeyPatch, folder: Path, commands: Any) -> tuple[int, str]:
    parts = [part._replace(command=command) for part, command in zip(prove.PARTS, commands, strict=True)]
    patch.setattr(prove, "PARTS", parts)
    patch.setattr(prove, "ROOT", folder)
    patch.setattr(prove, "PAGE", folder / "build" / "prove.html")
    patch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    return prove.main(), (folder / "build" / "prove.html").read_text(encoding="utf-8")


def test_all_parts_are_as_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, page = proven(monkeypatch, tmp_path, [printing(good) for good, _ in PRINTED])
    assert status == 0 and f"{len(PRINTED)} of {len(PRINTED)} as promised" in page
    assert "1.2 s without a step, 400 samples per second before" in page and "torch 2." in page
    assert '<rect x="20" y="40" width="18" height="40"/>' in page and 'd="M19 0V80"' in page


@pytest.mark.parametrize("broken", range(len(PRINTED)))
def test_a_part_is_not(broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [printing(good) for good, _ in PRINTED]
    commands[broken] = printing(PRINTED[broken][1], status=int(PRINTED[broken] == PASSED))
    status, page = proven(monkeypatch, tmp_path, commands)
    assert status == 1 and page.count("NOT as promised") == 1


def test_a_curve_without_a_step_after_the_kill_shows_nothing() -> None:
    with pytest.raises(ValueError, match=r"0.0 s are without a step"):
        prove.curve(json.dumps({"rows": [{**CURVE, "still_s": 0.0}]}, indent=1))


@pytest.mark.parametrize(
    ("command", "text"), [(printing(PRINTED[1][0], 1), "exit status 1"), (["sleep", "60"], "not done after 2 s")]
)
def test_a_part_fails_or_does_not_end(
    command: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others = prove.PARTS
    monkeypatch.setattr(prove, "PARTS", [first, second._replace(limit_s=2.0), *others])
    status, page = proven(
        monkeypatch, tmp_path, [printing(PRINTED[0][0]), command, *(printing(each[0]) for each in PRINTED[2:])]
    )
    assert status == 1 and page.count("NOT as promised") == 1 and text in page
