"""What runs in the container: `serve(parcel) -> reply`, bytes both.

It looks at the GPU, then starts the very worker that `gdn bench` starts here, in an empty folder, with an alarm of its
own: a kernel that hangs, crashes or eats the memory is that algo's fate, what was measured before it travels back, and
the container lives to say so. Needs gdn's own files and the packages of the image; no Modal.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .. import jobs, machine
from ..errors import GdnError, one_line
from ..record_types import Environment
from ..request import Request
from . import caches, parcel
from .settings import CACHE, mismatch

_FILES_MIB = 64  # of a profile's files, the ones to open first before the others


def serve(data: bytes) -> bytes:
    """Do a parcel's work, one piece after the other; whatever happens, the answer is a reply."""
    began = time.monotonic()
    try:
        content = parcel.decode(data)
        devices = [gpu.name for gpu in machine.gpus()]
        reply: dict[str, Any] = {"devices": devices, "error": None, "answers": []}
        if content["gpu"] and (why := mismatch(content["gpu"], devices)):
            return parcel.encode(reply | {"error": {"kind": "gpu", "reason": why}})
        with _built(**content["cache"]) as env:
            for piece in content["work"]:
                reply["answers"].append(_piece(piece, env | content["env"], content))
    except Exception as e:  # a type that the other side may not know says nothing there
        reply = {"devices": [], "answers": [], "error": {"kind": "container", "reason": one_line(e)}}
    return parcel.encode(reply | {"seconds": time.monotonic() - began})


def _piece(piece: dict[str, Any], env: dict[str, str], content: dict[str, Any]) -> dict[str, Any]:
    with _environment(env):
        if "profile" in piece:
            return _profile(piece, content)
        request = msgspec.convert(piece["request"], Request)
        outcome = jobs.serve(request, jobs.environ_of(request.mode), piece["timeout_s"])
    if outcome.environment:
        outcome.environment = _labelled(outcome.environment, content)
    return msgspec.to_builtins(outcome)


def _labelled(environment: Environment, content: dict[str, Any]) -> Environment:
    """Where the numbers come from: measured at Modal, in which image, on which of its GPUs."""
    environment.where, environment.image = "modal", content["image"]
    if content["gpu"] and environment.gpu:
        environment.asked, environment.gpus = content["gpu"]["asked"], [gpu.name for gpu in machine.gpus()]
    return environment


def _profile(piece: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """A profile made as `gdn profile` makes it here: its document, and the files of its folder."""
    from .. import profiling

    with tempfile.TemporaryDirectory(prefix="gdn-profiles-") as folder:
        try:
            subject, settings = profiling.received(piece["profile"], Path(folder))
            profile = profiling.run(subject, settings, lambda *_: None, lambda line: None)
        except GdnError as e:
            return {"failed": {"message": e.message, "hint": e.hint, "code": e.code}}
        profile.environment = _labelled(profile.environment, content)
        files, left = _files(Path(profile.folder), profile.reading.files)
        profile.folder = msgspec.UNSET
    return {"document": msgspec.to_builtins(profile), "files": files, "left": left}


def _files(folder: Path, first: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """A profile's files as text by name, as far as they may travel; and the names of those that stayed behind."""
    names = [*first, *sorted(p.name for p in folder.iterdir() if p.name not in first and p.is_file())]
    files, left, room = {}, [], _FILES_MIB << 20
    for name in names:
        text = parcel.text_of((folder / name).read_bytes())
        if len(text) <= room:
            files[name] = text
            room -= len(text)
        else:
            left.append(name)
    return files, left


@contextlib.contextmanager
def _built(key: str, volume: str) -> Iterator[dict[str, str]]:
    """The builders' folders on the local disk, with what an earlier container built; what is new is kept behind."""
    with tempfile.TemporaryDirectory(prefix="gdn-built-") as folder:
        root, mounted = Path(folder), Path(CACHE)
        if mounted.is_dir():
            caches.restore(mounted, key, root)
        before = caches.state(root)
        yield caches.environment(root)
        if mounted.is_dir() and caches.state(root) != before and caches.keep(mounted, key, root):
            _commit(volume)


def _commit(volume: str) -> None:
    """Modal commits a volume in the background some time; this makes it certain. What is lost costs a build only."""
    if os.environ.get("MODAL_IS_REMOTE") == "1":
        from . import cloud

        with contextlib.suppress(Exception):
            cloud.commit(volume)


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """These variables, and gdn's own package within the worker's reach: it was mounted, not installed."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(
        dict.fromkeys(p for p in [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)] if p)
    )
    kept = dict(os.environ)
    os.environ.update(more | {"PYTHONPATH": path})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
