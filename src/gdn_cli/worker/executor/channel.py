"""Frames of JSON over a Unix socket, each preceded by its length; file descriptors may be attached.

The other side may be hostile: a frame has a maximum size, and anything but a JSON
object ends the conversation.
"""

from __future__ import annotations

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
        head = _LENGTH.pack(len(data))
        if descriptors:
            socket.send_fds(self.end, [head], list(descriptors))
        else:
            self.end.sendall(head)
        self.end.sendall(data)

    def receive(self, most: int = 0) -> tuple[Json, list[int]]:
        """The next message, with at most `most` descriptors; the system closes others:
        the worker wants none from a runner. Raises EOFError if the other side is gone,
        GarbledError if it sent anything else.
        """
        head, descriptors, _, _ = socket.recv_fds(self.end, _LENGTH.size, most)
        if not head:
            raise EOFError
        (length,) = _LENGTH.unpack(head + self._exactly(_LENGTH.size - len(head)))
        if length > _MOST:
            raise GarbledError(f"a message of {length} bytes, at most {_MOST} may come")
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError):
            raise GarbledError("a message that is not JSON") from None
        if not isinstance(message, dict):
            raise GarbledError("a message that is not a JSON object")
        return message, descriptors

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.end.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def close(self) -> None:
        self.end.close()


def pair() -> tuple[Channel, int]:
    """(our end, the descriptor of the other, to be inherited by a child and closed here)."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs.detach()


def inherited(descriptor: int) -> Channel:
    """The other end, in the child; the child's own children do not inherit it."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
