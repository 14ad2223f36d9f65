"""Prove that both ends of a connection have the trainer's key, and make frames that no other
program can make. Pure. Both.

Both ends send a random number first, and prove the key with a code of both numbers. So the key
never travels, and a proof is of no use on another connection, or to the other end:

    driver      number (NUMBER_BYTES)
    worker      number, proof (PROOF_BYTES)     the driver reads nothing else before it has checked this
    worker      its first frame                 sent with the proof
    driver      proof                           admits the worker, which reads nothing else before it has checked this
    both        frames

A frame is a message, and perhaps a body:

    prefix      how many bytes the message has, and how many of the body are guarded, and are not
    code        of the prefix and the message
    message     a pickled object of `messages`
    body        the guarded part, its code, and the rest

The key of the codes is made of the trainer's key and both numbers, so a frame of another connection
has a wrong code. Each code includes the side that sends, and how many codes it has sent before, so
frames that are missing, repeated, or in another order have wrong codes too. Nothing is unpickled
before its code is checked. What is only data (the tensors of a state) has no code, because making
and checking one takes longer than sending it."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import pickle
import secrets
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from raysgd.core.messages import Message

KEY_BYTES = NUMBER_BYTES = PROOF_BYTES = CODE_BYTES = 32
DRIVER, WORKER = b"driver", b"worker"
PREFIX = struct.Struct(">IQQ")
HEAD_BYTES = PREFIX.size + CODE_BYTES
LARGEST_MESSAGE = 1 << 20
COUNT = struct.Struct(">Q")


class AlteredError(ConnectionError):
    """Raised for what the other end of a connection did not send, or not at this place."""


def new_number() -> bytes:
    return secrets.token_bytes(NUMBER_BYTES)


def proof(key: bytes, side: bytes, numbers: bytes) -> bytes:
    """Return the proof of one side. `numbers` are the driver's and then the worker's."""
    return hmac.digest(key, side + numbers, "sha256")


def proves(given: bytes | bytearray, key: bytes, side: bytes, numbers: bytes) -> bool:
    return hmac.compare_digest(given, proof(key, side, numbers))


class Sizes(NamedTuple):
    """The sizes of a message, and of the two parts of the body that follows it."""

    message: int
    guarded: int
    rest: int

    @property
    def body(self) -> int:
        return self.guarded + self.rest


def _codes(secret: bytes, side: bytes) -> Iterator[Any]:
    """Yield what makes each code of one side: `update` it with the content, take its `digest`."""
    for count in itertools.count():
        yield hashlib.blake2b(COUNT.pack(count), digest_size=CODE_BYTES, key=secret, person=side)


class Session:
    """What one end of a connection needs to make and check frames: the codes of both directions."""

    def __init__(self, key: bytes, side: bytes, numbers: bytes) -> None:
        secret = proof(key, b"session", numbers)
        self.sent, self.received = _codes(secret, side), _codes(secret, WORKER if side == DRIVER else DRIVER)

    def framed(self, message: Message, guarded: int = 0, rest: int = 0) -> bytes:
        """Return what is sent before the body, which has these sizes."""
        packed = pickle.dumps(message, 5)
        if len(packed) > LARGEST_MESSAGE:
            raise ValueError(
                f"a control message of {len(packed)} bytes is too long: at most {LARGEST_MESSAGE} are allowed"
            )
        prefix = PREFIX.pack(len(packed), guarded, rest)
        code = next(self.sent)
        code.update(prefix + packed)
        return b"".join((prefix, code.digest(), packed))

    @staticmethod
    def sizes(head: bytes | bytearray | memoryview) -> Sizes:
        """Return what the beginning of a frame says. Raise AlteredError if that cannot be true."""
        sizes = Sizes(*PREFIX.unpack_from(head))
        if sizes.message > LARGEST_MESSAGE:
            raise AlteredError(
                f"not a raysgd control message: it has {sizes.message} bytes, more than {LARGEST_MESSAGE}"
            )
        return sizes

    def opened(self, head: bytes | bytearray | memoryview, packed: bytes | bytearray | memoryview) -> Message:
        """Return the message of a frame, of which these are the first HEAD_BYTES and what follows
        them. Raise AlteredError, and unpickle nothing, if its code is wrong."""
        code = next(self.received)
        code.update(head[: PREFIX.size])
        code.update(packed)
        self.check(code, head[PREFIX.size : HEAD_BYTES])
        message: Message = pickle.loads(packed)
        return message

    def taken(self, received: bytearray) -> Iterator[Message]:
        """Remove complete frames, without bodies, from `received`. Yield their messages."""
        while len(received) >= HEAD_BYTES:
            head = bytes(received[:HEAD_BYTES])
            end = HEAD_BYTES + self.sizes(head).message
            if len(received) < end:
                return
            packed = bytes(received[HEAD_BYTES:end])
            del received[:end]
            yield self.opened(head, packed)

    @staticmethod
    def check(code: Any, given: bytes | bytearray | memoryview) -> None:
        if not hmac.compare_digest(code.digest(), given):
            raise AlteredError(
                "a message on its connection has a wrong code: it was not sent by the other end, or not at this place"
            )
