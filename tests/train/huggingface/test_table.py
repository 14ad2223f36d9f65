"""The page's table names all that can act in a Trainer: options, schedules and callbacks of the installed transformers."""

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import transformers
from transformers import SchedulerType, TrainerCallback, TrainingArguments

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"
SECTION = PAGE.read_text().split("## What is equal, and what is refused")[1].split("\n## ")[0]
NAMED = set(re.findall(r"`([^`=]+)", SECTION))


def callbacks() -> set[str]:
    """Find the classes of callbacks, also where a module needs a package that is not here."""
    found = {"trainer_callback", "trainer_jit_checkpoint", "utils.notebook", "integrations.integration_utils"}
    known = {each.name for each in pkgutil.walk_packages(transformers.__path__) if "callback" in each.name}
    for module in {*found, *known}:
        try:
            importlib.import_module(f"transformers.{module}")
        except ImportError:
            continue
    kinds, seen = [TrainerCallback], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("transformers."):
            seen.add(kind.__name__)
    return seen - {"TrainerCallback", "CallbackHandler"}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("option", {each.name for each in dataclasses.fields(TrainingArguments)}),
        ("schedule", {each.value for each in SchedulerType}),
        ("callback", callbacks()),
    ],
)
def test_the_table_is_complete(what: str, names: set[str]) -> None:
    assert names, what
    assert names - NAMED == set(), f"docs/huggingface.md does not say whether these are equal or refused ({what})"
