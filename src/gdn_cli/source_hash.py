"""The hash of an algo's sources, in records, packed files and the names of libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def source_hash(
    language: str,
    entry_point: str,
    destination_passing: bool | None,
    binding: str | None,
    sources: Iterable[tuple[str, str]],
) -> str:
    """12 hex digits over all that decides a build. `sources`: (name, content) by name."""
    parts = [language, entry_point, str(destination_passing), str(binding)]
    for name, content in sources:
        parts += [name, content]
    return digest(parts)


def digest(texts: Iterable[str]) -> str:
    """12 hex digits over all texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
