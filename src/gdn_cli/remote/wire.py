"""Messages: the work of one container, and the results sent back.

JSON with a schema number, so that the two sides may have different Python versions and packages.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .. import bounded
from ..errors import RemoteError
from ..machine import environment
from ..run.jobs import Job, Outcome
from ..schema import profile_types
from ..schema.numbers import NotNegative
from ..schema.record_types import Environment, Record
from ..tune import away
from ..worker.request import Request
from .settings import Gpu

SCHEMA = 4
# msgspec 0.22 crashes if several threads are the first to read a type
_ALONE = threading.Lock()
OTHER = "the other side speaks schema"
NOT = "what came back is not a reply of gdn"
# bytes of a message once it is unpacked: a long comparison has about 40 MiB
MOST = 256 << 20
# of a line with a message
MARK = b"gdn-parcel: "
T = TypeVar("T", "Parcel", "Reply", "Made", "Hello", away.Noted)
# a profile to be made: what profiling.sent gives
Wanted = dict[str, Any]


class Piece(Struct):
    """One worker's request, and how long the worker may take."""

    request: Request
    timeout_s: float

    @staticmethod
    def from_job(job: Job, dataset: Path | None = None) -> Piece:
        """The request that a worker here would get; `dataset` is where --dataset is there."""
        request = job.request
        if request.dataset and dataset:
            request = msgspec.structs.replace(request, dataset=str(dataset))
        return Piece(request, job.timeout_s)


class Cache(Struct):
    """The name and the volume under which compiled code is kept."""

    key: str
    volume: str


class Parcel(Struct, kw_only=True):
    """The work of one container: jobs, or profiles to make."""

    # makes it unlike any other
    nonce: str = ""
    # noted in each environment
    where: str = "modal"
    image: str | None = None
    # that the container must have; None for work on a CPU
    gpu: Gpu | None
    # None: compiled code stays where gdn keeps it on that machine
    cache: Cache | None
    # of --max-minutes, after which the container is ended, and all that it has is lost
    limit_s: float | None = None
    # variables for the workers, and this gdn's commit
    env: dict[str, str]
    jobs: list[Piece] = []
    profiles: list[Wanted] = []
    tunings: list[away.Wanted] = []


class Refusal(Struct):
    """Why there is no profile: a GdnError from the other side."""

    message: str
    hint: str | None
    code: int


class Profile(Struct):
    """A profile that was made there, with the files of its folder."""

    document: profile_types.Profile | None = None
    files: dict[str, bytes] = {}
    # names of files that were too large to send
    left: list[str] = []
    refused: Refusal | None = None


class Reply(Struct, kw_only=True):
    """The outcome of each piece of work, in order, or why none was started."""

    outcomes: list[Outcome] = []
    profiles: list[Profile] = []
    tuned: list[away.Measured] = []
    # why there is no other result
    lost: str | None = None
    # the one that does this work, if it was sent twice
    call: str | None = None
    # that the container took, without its own start
    seconds: NotNegative = 0.0


class Made(Struct):
    """A record that a container has made: kept at Modal in case that there is no reply."""

    # of the parcel's jobs
    piece: int
    record: Record
    environment: Environment | None


class Hello(Struct, kw_only=True):
    """Which machine of an engine serves: its first message, and one for a lock that it
    waits for.
    """

    host: str
    gpus: list[str]
    version: str
    allocation: str | None = None
    waits: str | None = None

    def __str__(self) -> str:
        job = f"job {self.allocation}, " if self.allocation else ""
        gpus = ", ".join(self.gpus) or "no GPU"
        return f"{self.host} ({job}{gpus}, gdn {self.version})"


def marked(message: bytes) -> bytes:
    """A message as a line."""
    return MARK + base64.b64encode(message) + b"\n"


def unmarked(line: bytes) -> bytes:
    """The message in a line; empty if there is none."""
    if not line.startswith(MARK):
        return b""

    with contextlib.suppress(ValueError):
        return base64.b64decode(line[len(MARK) :])

    return b""


def readable(messages: Iterable[bytes], form: type[T]) -> Iterator[T]:
    """Those of this form among what a container has kept at Modal."""
    for data in messages:
        with contextlib.suppress(RemoteError):
            yield decode(data, form)


def commit() -> dict[str, str]:
    """The variable with the commit of the sources, which travel without their .git."""
    known = environment.commit()
    if not known:
        return {}
    dirty = "-dirty" if known.get("dirty") else ""
    return {"GDN_COMMIT": f"{known['commit']}{dirty}"}


def encode(content: Parcel | Reply | Made | Hello | away.Noted) -> bytes:
    # not msgspec's own JSON, which cannot hold half a surrogate pair or NaN, and an
    # algo may have written either
    plain = {"schema": SCHEMA, "kind": type(content).__name__}
    plain |= msgspec.to_builtins(content, enc_hook=str)
    return zlib.compress(json.dumps(plain).encode(), 1)


def _inflated(data: bytes) -> bytes:
    """What zlib has compressed. zlib.error if it is damaged, or too much."""
    unpack = zlib.decompressobj()
    content = unpack.decompress(data, MOST + 1)
    if len(content) > MOST or not unpack.eof:
        raise zlib.error
    return content


def decode(data: bytes, form: type[T]) -> T:
    """A parcel or a reply; RemoteError if it is neither, or comes from another gdn
    version (OTHER). What comes back has its texts clipped, as a worker's on this
    machine.
    """
    try:
        content = json.loads(_inflated(data))
        schema = content["schema"]
        if schema == SCHEMA:
            # another one, before it is looked through
            if content.get("kind", form.__name__) != form.__name__:
                raise ValueError
            if form is not Parcel:
                content = _clipped(content)
            with _ALONE:
                # paths
                return msgspec.convert(
                    content, form, dec_hook=lambda kind, value: kind(value)
                )
    except msgspec.ValidationError as e:
        raise RemoteError(f"{NOT}: {e}") from None
    # of whatever JSON it is
    except (
        zlib.error,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        raise RemoteError(NOT) from None
    raise RemoteError(
        f"{OTHER} {schema!r:.40}, this gdn {SCHEMA}", hint="use one gdn for both"
    )


def _clipped(content: dict[str, Any]) -> dict[str, Any]:
    """All but the files of profiles, which are texts in JSON too."""
    files = [profile.pop("files", {}) for profile in content.get("profiles", [])]
    content = bounded.clipped(content)
    for profile, own in zip(content.get("profiles", []), files, strict=True):
        profile["files"] = own
    return content
