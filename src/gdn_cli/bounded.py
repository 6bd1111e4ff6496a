"""Texts and outputs of a limited size: the head and the tail are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EDGE = 64 * 1024  # of a longer output: kept of the beginning, and of the end


class Output:
    """The output of a process, as bytes: the beginning and the end of it."""

    def __init__(self, edge: int = EDGE) -> None:
        self.edge = edge
        self.head = bytearray()
        self.tail = bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self.edge - len(self.head)
        self.head += data[:room]
        self.tail += data[room:][-self.edge :]
        del self.tail[: -self.edge]

    def text(self) -> str:
        """With a line in the middle that says how much was left out."""
        omitted = self.size - len(self.head) - len(self.tail)
        middle = f"\n... {omitted} bytes left out ...\n".encode() if omitted else b""
        return bytes(self.head + middle + self.tail).decode(errors="replace")


def clip(text: str, most: int = 2 * EDGE) -> str:
    """A text of at most `most` characters, and a line that says how many were left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def clipped(value: Any, most: int = 2 * EDGE) -> Any:
    """JSON with every text in it clipped."""
    return mapped(value, lambda x: clip(x, most), lambda key: clip(str(key), 1024))


def mapped(value: Any, text: Callable[[str], str], key: Callable[[Any], Any]) -> Any:
    """JSON with every text in it passed through `text`, and every key through `key`."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {key(name): mapped(item, text, key) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, text, key) for item in value]
    return value
