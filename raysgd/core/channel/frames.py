"""Prove the trainer's key when a connection begins, and frame the messages that follow. Pure. Both.

Each end sends a random number, and proves the key with an HMAC of its side and both numbers. So the
key never travels, and a proof is of no use on another connection, or to the other end:

    driver      greeting (its version), number
    worker      number, proof        the driver reads nothing else before it has checked this
    worker      its first frame      sent with the proof
    driver      proof                the worker reads nothing else before it has checked this
    both        frames

`multiprocessing.connection` proves its `authkey` in the same way. Its functions block, use MD5
before Python 3.12, and their answers do not depend on the side.

A frame is the sizes of a message and of its body, the message (a pickled object of `messages`), and
the body. It has no code: who can change the traffic can also change that of gloo and Ray."""

from __future__ import annotations

import hmac
import pickle
import secrets
import struct
from collections.abc import Iterator

from raysgd.core.channel.messages import Message
from raysgd.errors import ConfigError
from raysgd.version import __version__

KEY_BYTES = NUMBER_BYTES = PROOF_BYTES = 32
DRIVER, WORKER = b"driver", b"worker"
PROGRAM = b"raysgd "
GREETING = (PROGRAM + __version__.encode()).ljust(32)
SIZES = struct.Struct(">QQ")


def new_number() -> bytes:
    return secrets.token_bytes(NUMBER_BYTES)


def check_greeting(greeting: bytes) -> None:
    """Raise ConfigError for another version of raysgd, and ConnectionError for another program."""
    if not greeting.startswith(PROGRAM):
        raise ConnectionError("the other end is not a raysgd script")
    if greeting != GREETING:
        theirs = greeting.removeprefix(PROGRAM).decode(errors="replace").strip()
        raise ConfigError(
            f"the script has raysgd {theirs}, and this machine has {__version__}: install the same version"
        )


def proof(key: bytes, side: bytes, numbers: bytes) -> bytes:
    """The proof of one side. `numbers` are the driver's and then the worker's."""
    return hmac.digest(key, side + numbers, "sha256")


def proves(claim: bytes | bytearray, key: bytes, side: bytes, numbers: bytes) -> bool:
    return hmac.compare_digest(claim, proof(key, side, numbers))


def framed(message: Message, body: int = 0) -> bytes:
    """What is sent before a body of this size."""
    packed = pickle.dumps(message, 5)
    return SIZES.pack(len(packed), body) + packed


def taken(received: bytearray) -> Iterator[Message]:
    """Remove complete frames, without bodies, from `received`. Yield their messages."""
    while len(received) >= SIZES.size:
        end = SIZES.size + SIZES.unpack_from(received)[0]
        if len(received) < end:
            return
        packed = bytes(received[SIZES.size : end])
        del received[:end]
        message: Message = pickle.loads(packed)
        yield message
