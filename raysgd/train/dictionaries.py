"""Store a dictionary as bytes: with `torch.save`, or pickled if torch is not installed. Both."""

from __future__ import annotations

import io
import pickle
import zipfile
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from raysgd.errors import CheckpointError
from raysgd.storage import checksums

PICKLED = "dictionary.pkl"  # the member of a zip archive without torch, which has a checksum
RAY_TRAIN = b"\x80"  # how the files of Ray Train 1.x begin


class NeedsTrustError(CheckpointError):
    """The bytes hold something that only code in them can make."""


def dump(data: dict[str, Any], pickler: Any) -> bytes:
    """Convert the dictionary to bytes, with their checksums. `pickler` is a class that pickles."""
    buffer = io.BytesIO()
    if find_spec("torch") is None:
        pickler(content := io.BytesIO()).dump(data)
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(zipfile.ZipInfo(PICKLED), content.getbuffer())
        return buffer.getvalue()
    import torch

    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(data, buffer, pickle_module=SimpleNamespace(Pickler=pickler, __name__="pickle"))
    finally:
        torch.serialization.set_crc32_options(chosen)
    return buffer.getvalue()


def load(data: Any, *, trusted: bool) -> Any:
    """Load what `dump` or Ray Train 1.x stored. Raise CheckpointError if the bytes are damaged,
    `NeedsTrustError` if they are not `trusted` and would run code, and any error for what is
    neither."""
    if bytes(data[:1]) == RAY_TRAIN:
        if not trusted:
            raise NeedsTrustError("a pickle, as Ray Train 1.x stores dictionaries")
        return pickle.loads(data)
    checksums.verify(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read(PICKLED) if PICKLED in archive.namelist() else None
    if pickled is not None:
        if not trusted:
            raise NeedsTrustError("a pickle, as raysgd stores dictionaries where torch is not installed")
        return pickle.loads(pickled)
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:  # the file is not damaged
        if trusted:
            raise
        names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
        raise NeedsTrustError(f"objects other than plain values and tensors ({names or error})") from error
