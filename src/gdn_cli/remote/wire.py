"""What travels: the work of one container there, what became of it back.

JSON with a schema number, so that neither the Python nor the packages of the two sides need to agree.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..errors import RemoteError
from ..records.request import Request
from ..run.jobs import Outcome
from ..schema import profile_types
from .settings import Gpu

SCHEMA = 3
T = TypeVar("T", "Parcel", "Reply")
Wanted = dict[str, Any]  # a profile to be made: what profiling.sent gives


class Piece(Struct):
    """One worker's request, and how long the worker may take."""

    request: Request
    timeout_s: float


class Cache(Struct):
    """Under which name what is compiled is kept, and on which volume."""

    key: str
    volume: str


class Parcel(Struct, kw_only=True):
    """The work of one container: jobs, or profiles to make."""

    image: str
    gpu: Gpu | None  # that the container must have; None for what runs on a CPU
    cache: Cache
    env: dict[str, str]  # variables for the workers, and the commit that this gdn is of
    jobs: list[Piece] = []
    profiles: list[Wanted] = []


class Refusal(Struct):
    """Why there is no profile: a GdnError of the other side."""

    message: str
    hint: str | None
    code: int


class Profile(Struct):
    """A profile that was made there, with the files of its folder."""

    document: profile_types.Profile | None = None
    files: dict[str, bytes] = {}  # each compressed by zlib
    left: list[str] = []  # names of files that were too large to come along
    refused: Refusal | None = None


class Reply(Struct, kw_only=True):
    """What became of each piece of work, in their order, or why none was begun."""

    outcomes: list[Outcome] = []
    profiles: list[Profile] = []
    wrong_gpu: str | None = None
    lost: str | None = None  # why the call brought nothing else


def encode(content: Parcel | Reply) -> bytes:
    # not msgspec's own JSON, which has no place for half a character or NaN, and an algo may have written either
    return zlib.compress(json.dumps({"schema": SCHEMA} | msgspec.to_builtins(content)).encode(), 1)


def decode(data: bytes, form: type[T]) -> T:
    """A parcel or a reply; RemoteError for what is none, or another gdn's."""
    try:
        content = json.loads(zlib.decompress(data))
        schema = content["schema"]
        if schema == SCHEMA:
            return msgspec.convert(content, form)
    except msgspec.ValidationError as e:
        raise RemoteError(f"what came back from Modal is not a reply of gdn: {e}") from None
    except (zlib.error, ValueError, LookupError, TypeError, RecursionError):
        raise RemoteError("what came back from Modal is not a reply of gdn") from None
    raise RemoteError(f"the other side speaks schema {schema!r}, this gdn {SCHEMA}", hint="use one gdn for both")
