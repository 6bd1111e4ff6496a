"""`gdn modal setup`: the token, the volumes, the data set on its volume. Each step says what it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, structs

from ..errors import MissingError
from .settings import Settings

_BATCH = 32  # files per upload: uploaded files are not sent again after an interrupt
_KINDS = ("definitions", "workloads", "blob", "solutions")  # folders of a FlashInfer-Trace data set that a worker reads


class Stocked(Struct):
    """The result of `setup`: files of the data set, and bytes uploaded."""

    volumes: list[str]
    uploaded: int = 0
    kept: int = 0
    bytes: int = 0


def setup(
    settings: Settings, dataset: Path | None, twins: Callable[[], Path | None], say: Callable[[str], None]
) -> Stocked:
    """Check the login, make both volumes, and upload the files of `dataset` that are not on the data set's volume. None
    means the folder `twins()`, made once Modal has answered."""
    from . import modal_client

    files = _files(dataset) if dataset else {}
    modal_client.connect(settings.limits.connect)
    say("token: Modal accepts it")
    names, volumes = structs.asdict(settings.volumes), {}
    for use, name in names.items():
        volumes[use] = modal_client.Volume(name)
        say(f"volume {name}: there ({use})")
    done = Stocked(list(names.values()))
    if dataset is None and (folder := twins()):
        files = _files(folder)
    there = volumes["dataset"].files()
    lacking = {name: path for name, path in files.items() if there.get(name) != path.stat().st_size or _small(path)}
    done.kept = len(files) - len(lacking)
    if files and not lacking:
        say(f"data set: all {len(files)} files are there")
    names = list(lacking)
    for i in range(0, len(names), _BATCH):
        batch = {name: lacking[name] for name in names[i : i + _BATCH]}
        size = sum(path.stat().st_size for path in batch.values())
        say(f"data set: uploading {i + 1} to {i + len(batch)} of {len(names)} files ({size / 2**20:.1f} MiB)")
        volumes["dataset"].upload(batch)
        done.uploaded += len(batch)
        done.bytes += size
    return done


def _small(path: Path) -> bool:
    """Text files are uploaded each time: equal size does not mean equal content, and they are cheap."""
    return path.suffix in (".json", ".jsonl")


def _files(root: Path) -> dict[str, Path]:
    """name on the volume -> file; the workloads' rows last, so that no row names a tensor that is not there yet."""
    if not (root / "definitions").is_dir() or not (root / "workloads").is_dir():
        hint = "name the folder that has definitions/ and workloads/, or write one with `gdn data build DIR`"
        raise MissingError(f"{root} is not a FlashInfer-Trace data set", hint=hint)
    found = [path for kind in _KINDS for path in sorted((root / kind).rglob("*")) if path.is_file()]
    found.sort(key=lambda path: path.suffix == ".jsonl")
    return {path.relative_to(root).as_posix(): path for path in found}
