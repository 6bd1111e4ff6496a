"""Frames of JSON over a Unix socket, each preceded by its length; file descriptors may be attached.

The other side may be hostile: a frame has a maximum size, and anything but a JSON
object ends the conversation.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct

import msgspec

from ...parsing import Json

# bytes of a frame: all samples of a long comparison take about 40 MiB
_MOST = 256 << 20
_LENGTH = struct.Struct("<Q")


class GarbledError(Exception):
    """The received data is not a valid frame; the message says why."""


class Channel:
    """One end of the conversation."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: Json, descriptors: tuple[int, ...] = ()) -> None:
        """Raises OSError if the other side is gone."""
        data = json.dumps(msgspec.to_builtins(message)).encode()
        if descriptors:
            socket.send_fds(self.end, [_LENGTH.pack(len(data))], list(descriptors))
        else:
            self.end.sendall(_LENGTH.pack(len(data)))
        self.end.sendall(data)

    def receive(self) -> Json:
        """The next message. Raises EOFError if the other side is gone, GarbledError if it
        sent anything else.

        Attached descriptors are closed: the worker wants none from a runner.
        """
        return _parsed(self._exactly(self._length(self._exactly(_LENGTH.size))))

    def receive_with(self, most: int) -> tuple[Json, list[int]]:
        """Like `receive`, with at most `most` descriptors."""
        head, descriptors, _, _ = socket.recv_fds(self.end, _LENGTH.size, most)
        if not head:
            raise EOFError
        head += self._exactly(_LENGTH.size - len(head))
        return _parsed(self._exactly(self._length(head))), descriptors

    @staticmethod
    def _length(head: bytes) -> int:
        (length,) = _LENGTH.unpack(head)
        if length > _MOST:
            raise GarbledError(f"a message of {length} bytes, at most {_MOST} may come")
        return length

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            with contextlib.suppress(InterruptedError):
                part = self.end.recv(min(size - len(data), 1 << 20))
                if not part:
                    raise EOFError
                data += part
        return bytes(data)

    def close(self) -> None:
        self.end.close()


def _parsed(data: bytes) -> Json:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise GarbledError("a message that is not JSON") from None
    if not isinstance(message, dict):
        raise GarbledError("a message that is not a JSON object")
    return message


def pair() -> tuple[Channel, int]:
    """(our end, the descriptor of the other, to be inherited by a child and closed here)."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs.detach()


def inherited(descriptor: int) -> Channel:
    """The other end, in the child; the child's own children do not inherit it."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
