"""Show the user's frames in tracebacks, also those of notebooks, and fold raysgd's. Driver."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from raysgd.environment import flag_from_environment
from raysgd.errors import RaysgdError, RemoteTraceback, counted

F = TypeVar("F", bound=Callable[..., Any])

FULL_TRACEBACKS = "RAYSGD_FULL_TRACEBACKS"
PACKAGE = Path(__file__).resolve().parent.parent
FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+), in .*')


def readable(text: str, error: BaseException | None = None) -> str:
    """A worker's traceback without the frames of raysgd, and with source lines that only this
    process knows. It is unchanged if the user asks for that, or if it may be a fault of raysgd."""
    lines, blocks = text.splitlines(), list[tuple[str, list[str]]]()
    for line in lines:
        match = FRAME.fullmatch(line)
        if match:
            blocks.append(("ours" if _is_ours(match["file"]) else "user", [line]))
        elif blocks and blocks[-1][0] != "text" and line.startswith("    "):
            blocks[-1][1].append(line)
        else:
            blocks.append(("text", [line]))
    kinds = [kind for kind, _ in blocks if kind != "text"]
    fault = kinds[-1:] == ["ours"] and not isinstance(error, RaysgdError)
    if flag_from_environment(FULL_TRACEBACKS) or fault or "user" not in kinds:
        return text
    shown_lines: list[str] = []
    for kind, group in itertools.groupby(blocks, key=lambda block: block[0]):
        frames = [block for _, block in group]
        if kind == "ours":
            shown_lines.append(
                f"  [{counted(len(frames), 'frame')} of raysgd; the environment variable {FULL_TRACEBACKS}=1 shows them]"
            )
            continue
        for frame in frames:
            match = FRAME.fullmatch(frame[0])
            source = linecache.getline(match["file"], int(match["line"])).strip() if match and len(frame) == 1 else ""
            shown_lines += [*frame, *([f"    {source}"] if source else [])]
    return "\n".join(shown_lines)


def folding(method: F) -> F:
    """Let a method that users call raise the errors of their code without the frames of raysgd."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            fold_frames(error)
            raise

    return cast(F, call)


def fold_frames(error: BaseException) -> None:
    """Remove the frames of raysgd from the traceback of an error that user code raised, unless the
    user asks for them, or the error may be a fault of raysgd."""
    if "raysgd_rank" not in vars(error) or flag_from_environment(FULL_TRACEBACKS):
        return
    traces: list[TracebackType] = []
    innermost = ""
    trace = error.__traceback__
    while trace is not None:
        innermost = trace.tb_frame.f_code.co_filename
        if not _is_ours(innermost):
            traces.append(trace)
        trace = trace.tb_next
    remote = isinstance(error.__cause__, RemoteTraceback)  # its own frames are in that text
    if _is_ours(innermost) and not remote and not isinstance(error, RaysgdError):
        return
    for one, following in itertools.zip_longest(traces, traces[1:]):
        one.tb_next = following
    # Not by assignment, which an exception class can refuse.
    BaseException.with_traceback(error, traces[0] if traces else None)


def _is_ours(file: str) -> bool:
    """Whether a file, here or on a worker, is part of raysgd, ready-made operators apart."""
    _, separator, place = file.rpartition("/raysgd/")
    return bool(separator) and not place.startswith("operators/") and (PACKAGE / place).is_file()
