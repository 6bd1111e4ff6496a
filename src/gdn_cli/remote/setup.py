"""`gdn modal setup`: the token, the volumes, the data set on its volume. Each step says
what it does. And where on that volume a data set is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct, structs

from ..errors import MissingError, UsageError
from .settings import Image, Settings

# files per upload: uploaded files are not sent again after an interrupt
_BATCH = 32
# folders of a FlashInfer-Trace data set that a worker reads
_KINDS = ("definitions", "workloads", "blob", "solutions")
# the mark of what `setup` put on a volume
TWINS, DATASET = "gdn-twins.json", "gdn-dataset.json"
_MARK = b'{"made_by": "gdn modal setup"}\n'


class Stocked(Struct):
    """The result of `setup`: files of the data set, and bytes uploaded."""

    volumes: list[str]
    uploaded: int = 0
    kept: int = 0
    bytes: int = 0
    # that was built, or was there
    image: str | None = None


def setup(
    settings: Settings,
    dataset: Path | None,
    twins: Callable[[], Path] | None,
    say: Callable[[str], None],
    force: bool = False,
    image: Image | None = None,
) -> Stocked:
    """Check the login, make both volumes, build `image` (a minute or more of a CPU's
    time), and upload the files of `dataset` that are not on the data set's volume; else
    those of the folder `twins()`, made once Modal has answered; neither without both.

    UsageError if the volume has anything that was not put there by this command, or
    data of the other kind, as their files have the same names and sizes. With `force`
    everything is uploaded over it.
    """
    from . import modal_client

    files = _files(dataset) if dataset else {}
    modal_client.connect(settings.limits.connect)
    say("token: Modal accepts it")
    volumes = {}
    for use, name in structs.asdict(settings.volumes).items():
        volumes[name] = modal_client.Volume(name)
        say(f"volume {name}: there ({use})")
    done = Stocked(list(volumes))
    volume = volumes[settings.volumes.dataset]
    mark = DATASET if dataset else TWINS
    there = volume.files() if dataset or twins else {}
    if there and not force:
        _refuse_others(settings.volumes.dataset, there, mark)
    if image:
        say(
            f"image {image.name}: building it, unless Modal has it; the first time takes minutes"
        )
        app, function = modal_client.declare(settings, image, None, 60, 1)
        with modal_client.session(app, function, False):
            done.image = image.name
        say(f"image {image.name}: there")
    if not dataset:
        if not twins:
            return done
        files = _files(twins())
    volume.upload({mark: io.BytesIO(_MARK)})
    for other in {TWINS, DATASET} & set(there) - {mark}:
        volume.remove(other)
    lacking = [
        name
        for name, path in files.items()
        if force or _small(path) or there.get(name) != path.stat().st_size
    ]
    done.kept = len(files) - len(lacking)
    if files and not lacking:
        say(f"data set: all {len(files)} files are there")
    for i in range(0, len(lacking), _BATCH):
        batch = {name: files[name] for name in lacking[i : i + _BATCH]}
        size = sum(path.stat().st_size for path in batch.values())
        say(
            f"data set: uploading {i + 1} to {i + len(batch)} of {len(lacking)} files"
            f" ({size / 2**20:.1f} MiB)"
        )
        volume.upload(batch)
        done.uploaded += len(batch)
        done.bytes += size
    return done


def _refuse_others(volume: str, there: Iterable[str], mark: str) -> None:
    if mark in there:
        return
    hint = (
        "nothing was changed; --dataset of the other commands reads what is there, --force"
        " uploads over it"
    )
    if other := {TWINS, DATASET} & set(there):
        what = (
            "the twins"
            if TWINS in other
            else "a data set that was uploaded with --dataset"
        )
        raise UsageError(f"volume {volume} has {what}", hint=hint)
    tops = sorted({name.partition("/")[0] for name in there})
    some = ", ".join(tops[:3]) + (", ..." if len(tops) > 3 else "")
    raise UsageError(
        f"volume {volume} has files that `gdn modal setup` did not put there ({some})",
        hint=hint,
    )


def place(volume: str, there: Iterable[str], needed: Iterable[str]) -> str:
    """The folder of the volume that holds a data set with the files `needed`: "" for
    the volume itself, else with a slash at the end, as `modal volume put VOLUME FOLDER`
    makes one. MissingError if there is none.
    """
    there, needed = set(there), sorted(set(needed))
    hint = (
        "`gdn modal setup --dataset DIR` uploads one; without --dataset workloads are drawn in"
        " the container"
    )

    def roots(kind: str) -> set[str]:
        return {
            name[: f"/{name}".index(f"/{kind}/")]
            for name in there
            if f"/{kind}/" in f"/{name}"
        }

    found = sorted(
        roots("definitions") & roots("workloads"),
        key=lambda root: (root.count("/"), root),
    )
    if not found:
        raise MissingError(f"volume {volume} has no data set", hint=hint)
    lacking = {}
    for root in found:
        lacking[root] = [name for name in needed if root + name not in there]
    best = min(found, key=lambda root: len(lacking[root]))
    if missing := lacking[best]:
        what = (
            f"{len(missing)} of {len(needed)} files of --dataset, such as {missing[0]}"
        )
        raise MissingError(
            f"volume {volume}: its data set is without {what}", hint=hint
        )
    return best


def _small(path: Path) -> bool:
    """Text files are uploaded each time: equal size does not mean equal content, and
    they are cheap.
    """
    return path.suffix in (".json", ".jsonl")


def _files(root: Path) -> dict[str, Path]:
    """name on the volume -> file; the workloads' rows last, so that no row names a
    tensor that is not there yet.
    """
    if not (root / "definitions").is_dir() or not (root / "workloads").is_dir():
        hint = (
            "name the folder that has definitions/ and workloads/, or write one with `gdn data"
            " build DIR`"
        )
        raise MissingError(f"{root} is not a FlashInfer-Trace data set", hint=hint)
    found = [
        path
        for kind in _KINDS
        for path in sorted((root / kind).rglob("*"))
        if path.is_file()
    ]
    found.sort(key=lambda path: path.suffix == ".jsonl")
    return {path.relative_to(root).as_posix(): path for path in found}
