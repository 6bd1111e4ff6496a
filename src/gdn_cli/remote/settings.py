"""configs/modal.toml: what is rented, and for how long at most. The pinned packages; what a GPU's name means."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .. import paths
from ..errors import MissingError, UsageError, unknown
from ..parsing import Fields, read_toml

DATA, CACHE = "/data", "/cache"  # where the volumes are mounted
_EXTRA = "image"  # the extra of pyproject.toml that pins what the image holds


@dataclass(frozen=True)
class Gpu:
    """What was asked for, `B200:2`: a model as Modal calls it, and how many in one container."""

    model: str  # upper case, with Modal's `!` where only that one will do
    count: int
    words: tuple[tuple[str, ...], ...]  # alternatives of what the device's own name must have

    def __str__(self) -> str:
        return f"{self.model}:{self.count}" if self.count > 1 else self.model

    def to_json(self) -> dict[str, Any]:
        return {"asked": str(self), "count": self.count, "words": [list(w) for w in self.words]}


def mismatch(gpu: dict[str, Any], devices: list[str]) -> str | None:
    """Why these devices are not what `gpu` (Gpu.to_json) asked for; None if they are.

    A name's words are compared whole: an L40S is no L4, a GB200 no B200. A slice of a GPU is not the GPU.
    """

    def fits(device: str) -> bool:
        words = re.split(r"[\s\-_]+", device.upper())
        return "MIG" not in words and any(set(wanted) <= set(words) for wanted in gpu["words"])

    if len(devices) == gpu["count"] and all(map(fits, devices)):
        return None
    return f"asked for {gpu['asked']}, and the container has {', '.join(devices) or 'no GPU'}"


@dataclass(frozen=True)
class Image:
    name: str
    base: str
    python: str | None  # None: the base has its own
    keeps: tuple[str, ...]  # packages of the base that stay as they are
    smoke: str


@dataclass(frozen=True)
class Settings:
    """configs/modal.toml. Times are in seconds, memory in MiB."""

    app: str
    gpu: str
    image: str
    images: dict[str, Image]
    volumes: dict[str, str]  # dataset, cache -> its name at Modal
    limits: dict[str, int]
    container: dict[str, int]
    known: tuple[str, ...]
    exact: tuple[str, ...]
    devices: dict[str, tuple[str, ...]]
    environment: dict[str, str] = field(default_factory=dict)

    def chosen(self, image: str | None) -> Image:
        name = image or self.image
        if name not in self.images:
            raise unknown("image", name, self.images, hint=f"images are in {file()}")
        return self.images[name]

    def parse(self, asked: str | None) -> Gpu:
        """`B200`, `H100!`, `B200:2` as what Modal is asked for. UsageError for what would not be one GPU by name."""
        text = (asked or self.gpu).strip().upper()
        match = re.fullmatch(r"([A-Z0-9][A-Z0-9-]*)(!?)(?::([1-8]))?", text)
        if not match:
            hint = "one name, such as B200, H100! or B200:2: times of one GPU say nothing about another"
            raise UsageError(f"--gpu {asked or self.gpu}: expected a GPU", hint=hint)
        model, count = match[1], int(match[3] or 1)
        names = self.devices.get(model, (model,))
        words = tuple(tuple(name.split("-")) for name in names)
        return Gpu(model + ("!" if match[2] or model in self.exact else ""), count, words)


def file() -> Any:
    return paths.CONFIGS_DIR / "modal.toml"


_LIMITS = ("containers", "start", "queue", "idle", "connect")


def load() -> Settings:
    """Read configs/modal.toml; a UsageError names the key and what was expected."""
    path = file()
    f = Fields(path, read_toml(path))
    gpus = Fields(path, f.take("gpus", dict), "gpus.")
    devices = gpus.take("devices", dict, {})
    images = {}
    for name, table in f.take("images", dict).items():
        i = Fields(path, table, f"images.{name}.")
        python = i.table.pop("python", None)
        if not isinstance(python, str):
            raise i.wrong("python", "a version such as '3.12', or ''", python)
        images[name] = Image(name, i.take("base", str), python or None, i.texts("keeps", ()), i.take("smoke", str))
        i.done()
    found = Settings(
        app=f.take("app", str),
        gpu=f.take("gpu", str),
        image=f.take("image", str, one_of=images),
        images=images,
        volumes=_table(f, path, "volumes", ("dataset", "cache"), str),
        limits=_table(f, path, "limits", _LIMITS, int),
        container=_table(f, path, "container", ("cpu", "memory"), int),
        known=gpus.texts("known"),
        exact=gpus.texts("exact"),
        devices={name: Fields(path, devices, "gpus.devices.").texts(name) for name in devices},
        environment={key: str(value) for key, value in f.take("environment", dict, {}).items()},
    )
    gpus.done()
    f.done()
    return found


def _table(f: Fields, path: Any, name: str, keys: tuple[str, ...], kind: type) -> dict[str, Any]:
    inner = Fields(path, f.take(name, dict), f"{name}.")
    found = {key: inner.take(key, kind) for key in keys}
    for key, value in found.items():
        if kind is int and value < 1:
            raise inner.wrong(key, "a positive whole number", value)
    inner.done()
    return found


def pins() -> list[str]:
    """The packages of the image, `name==version`: the extra `image` of pyproject.toml, or of the installed gdn."""
    if paths.IN_CHECKOUT:
        return list(read_toml(paths.PYPROJECT)["project"]["optional-dependencies"][_EXTRA])
    try:
        required = metadata.requires("gdn") or []
    except metadata.PackageNotFoundError:
        raise MissingError("gdn is not installed, and its pyproject.toml is not here", hint="pip install gdn") from None
    marked = re.compile(rf"""(.+?)\s*;\s*extra\s*==\s*["']{_EXTRA}["']\s*""")
    return [found[1] for line in required if (found := marked.fullmatch(line))]


def packages(image: Image, pinned: list[str] | None = None) -> list[str]:
    """What is installed on top of an image's base."""
    return [pin for pin in pinned or pins() if pin.split("==")[0] not in image.keeps]
