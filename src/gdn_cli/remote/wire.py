"""What travels: requests of `gdn worker` as bytes there, what became of them as bytes back.

JSON with a schema number, so that neither the Python nor the packages of the two sides need to agree. A parcel is the
work of one container:

    work      each a worker's request with its time limit, or a profile to make (`profile`: profiling's subject)
    gpu       what the container must have, or None for what runs on a CPU
    env       variables for the worker; the commit that this gdn is of
    cache     the name under which what it compiles is kept

A reply has the devices that were seen and an outcome (or a profile) for each piece of work, or the error that kept
them from being begun.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import msgspec

from ..errors import RemoteError
from ..run.jobs import Outcome

SCHEMA = 2


def encode(content: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps({"schema": SCHEMA} | content).encode(), 1)


def decode(data: bytes) -> dict[str, Any]:
    """A parcel or a reply; RemoteError for what is none, or another gdn's."""
    try:
        content = json.loads(zlib.decompress(data))
        schema = content["schema"]
    except (zlib.error, ValueError, KeyError, TypeError):
        raise RemoteError("what came back from Modal is not a reply of gdn") from None
    if schema != SCHEMA:
        raise RemoteError(f"the other side speaks schema {schema!r}, this gdn {SCHEMA}", hint="use one gdn for both")
    return content


def outcome_of(answer: Any) -> Outcome:
    """What became of a job, from a reply; RemoteError for anything else."""
    try:
        return msgspec.convert(answer, Outcome)
    except msgspec.ValidationError as e:
        raise RemoteError(f"what came back from Modal is not a reply of gdn: {e}") from None


def text_of(data: bytes) -> str:
    """A file's bytes as text for JSON."""
    return base64.b85encode(zlib.compress(data, 1)).decode()


def bytes_of(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))
