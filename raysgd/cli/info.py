"""Describe a checkpoint without running code from it: `raysgd info PATH`. Both."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from raysgd.errors import CheckpointError
from raysgd.storage import folders
from raysgd.tf.archive import HEAD, load
from raysgd.train.checkpoint import DICT_FILE, Checkpoint
from raysgd.trainer.auto_checkpoint import AutoCheckpoint, CheckpointFolder


def describe(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is at the path, by name. Raise CheckpointError if it is damaged, or foreign."""
    names = {each.name for each in path.iterdir()} if path.is_dir() else members(path)
    if "data.pkl" in names or (folders.MARKER in names and any(path.glob("*/outline.pt"))):
        yield from torch_checkpoint(path)
    elif HEAD in names:
        yield from state(load(path.read_bytes()), "TFTrainer")
    elif path.is_dir() and names & {folders.MARKER, DICT_FILE}:
        folders.verify(path)
        yield "written by", "raysgd.train: Checkpoint.from_directory(...)"
        yield from ((name, f"{entry.size:,} bytes") for name, entry in sorted(folders.list_of(path).items()))
    elif path.is_dir():
        yield from automatic(path)
    else:
        Checkpoint(path).to_dict()  # raises the reason


def members(path: Path) -> set[str]:  # of a zip archive, without their folders
    with contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError), zipfile.ZipFile(path) as archive:
        return {each.rpartition("/")[2] for each in archive.namelist()}
    return set()


def torch_checkpoint(path: Path) -> Iterator[tuple[str, str]]:
    from raysgd.storage.seen import kept_open, verified_file
    from raysgd.torch.state import shard_files, states

    if path.is_dir():
        inner, listed = shard_files.read_manifest(path)
        shard_files.verify(str(path / inner), listed)
        has_checksums, path = True, path / inner / "outline.pt"
    else:
        _, has_checksums = verified_file(kept_open(path), path)
    yield "checksums", "correct" if has_checksums else "none (torch.save wrote it)"
    if foreign := states.foreign_types(path):
        yield "content", f"not shown, because load(path, trusted=True) runs its code: {', '.join(foreign)}"
    elif isinstance(content := states.peek(path), dict) and "models" not in content:
        yield "written by", "raysgd.train: Checkpoint.from_dict(...), or torch.save"
        yield from ((str(name), text(value)) for name, value in content.items())
    else:
        yield from state(states.shaped(content), "TorchTrainer")


def automatic(path: Path) -> Iterator[tuple[str, str]]:
    folders_of_both = [CheckpointFolder(AutoCheckpoint(path=path), suffix) for suffix in (".pt", ".ckpt")]
    checkpoints = [(folder, place) for folder in folders_of_both for place in folder.newest_first()]
    for folder, place in checkpoints:
        damage = "; damaged: a checksum is wrong" if folder.is_damaged(place) else ""
        yield place.name, f"score {folder.record(place)['score']}{damage}"
    if not checkpoints:
        raise CheckpointError(f"{path} has no checkpoint of raysgd: pass a file or folder that a trainer wrote")


def state(content: Mapping[str, Any], trainer: str) -> Iterator[tuple[str, str]]:
    yield "written by", f"{trainer}.save()" if "format" in content else f"{trainer}.save(), or RaySGD"
    for name, value in content.items():
        several = name in ("models", "optimizers", "schedulers")
        if not several:
            yield name, text(value)
        for number, each in enumerate(value or () if several else ()):
            yield f"{name[:-1]} {number}", text(each.get("param_groups", each) if isinstance(each, Mapping) else each)


def text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text(each)}" for key, each in value.items())
    return f"[{', '.join(map(text, value))}]" if isinstance(value, (list, tuple)) else repr(value)


@click.command("info", short_help="Say what is in a checkpoint.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
def command(path: Path) -> None:
    """Say what is in the checkpoint at PATH: a file or folder that a trainer, AutoCheckpoint or
    raysgd.train wrote.

    Its checksums are verified, and no code from it runs. Exit with 1 if it is damaged, or not
    raysgd's."""
    try:
        for name, described in describe(path):
            click.echo(f"{name:<19}  {described:.100}{' ...' * (len(described) > 100)}")
    except (CheckpointError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error
