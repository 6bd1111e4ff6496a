"""configs/modal.toml: what to rent, and for how long at most. The pinned packages; what
a GPU's name means.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .. import paths
from ..errors import MissingError, UsageError, unknown
from ..parsing import Positive, Text, Wrong, decode, read_toml

# where the volumes are mounted
DATA, CACHE = "/data", "/cache"
# the queue at Modal with the records of each call, by its id; Modal drops them after a
# day
RECORDS = "gdn-records"
# the extra of pyproject.toml that pins what the image holds
_EXTRA = "image"


class Gpu(Struct, frozen=True):
    """A requested GPU, such as `B200:2`: a model as Modal names it, and how many in one
    container.
    """

    # upper case, with Modal's `!` if only that model will do
    model: str
    count: int
    # alternatives: words that the device's own name must contain
    words: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.model}:{self.count}" if self.count > 1 else self.model

    def mismatch(self, devices: list[str]) -> str | None:
        """Why these devices are not what was requested; None if they are.

        A name's words are compared whole: an L40S is not an L4, a GB200 not a B200. A
        slice of a GPU is not the GPU.
        """

        def fits(device: str) -> bool:
            words = re.split(r"[\s\-_]+", device.upper())
            return "MIG" not in words and any(
                set(wanted) <= set(words) for wanted in self.words
            )

        if len(devices) == self.count and all(map(fits, devices)):
            return None
        return (
            f"asked for {self}, and the container has {', '.join(devices) or 'no GPU'}"
        )


class ImageTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[images.NAME] of configs/modal.toml."""

    base: Text
    # "": the base has its own
    python: Annotated[str, Meta(description="a version such as '3.12', or ''")]
    # commands at the beginning of the build
    first: tuple[str, ...] = ()
    # packages of the base that are not replaced
    keeps: tuple[str, ...] = ()
    smoke: Text


class Image(ImageTable, frozen=True, kw_only=True):
    name: str
    # commands at the end of the build
    then: tuple[str, ...] = ()


class Gpus(Struct, frozen=True, forbid_unknown_fields=True):
    # names to propose
    known: tuple[str, ...]
    # names that get a `!`
    exact: tuple[str, ...]
    # model -> other names of its devices
    devices: dict[str, tuple[str, ...]] = {}


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Containers side by side; seconds."""

    containers: Positive
    start: Positive
    queue: Positive
    idle: Positive
    connect: Positive


class Container(Struct, frozen=True, forbid_unknown_fields=True):
    # cores
    cpu: Positive
    # MiB
    memory: Positive


class Volumes(Struct, frozen=True, forbid_unknown_fields=True):
    """Names at Modal."""

    dataset: Text
    cache: Text


# a second
Dollars = Annotated[float, Meta(gt=0, description="a positive number")]


class Prices(Struct, frozen=True, forbid_unknown_fields=True):
    # on which they were read
    date: Text
    core: Dollars
    gib: Dollars
    gpus: dict[str, Dollars]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """configs/modal.toml. Raises parsing.Wrong for an image that it does not have."""

    app: Text
    gpu: Text
    image: Text
    images: dict[str, ImageTable]
    volumes: Volumes
    limits: Limits
    container: Container
    gpus: Gpus
    prices: Prices
    environment: dict[str, str | int | float | bool] = {}

    def __post_init__(self) -> None:
        if self.image not in self.images:
            raise Wrong(("image",), f"one of {', '.join(self.images)}", self.image)

    def chosen(self, image: str | None) -> Image:
        name = image or self.image
        if name not in self.images:
            raise unknown("image", name, self.images, hint=f"images are in {file()}")
        return Image(name=name, **msgspec.structs.asdict(self.images[name]))

    def dollars(self, gpu: Gpu | None, seconds: float) -> str:
        """What a container with this GPU costs in so much time, as words of a line; the
        date is the prices'.
        """
        container, prices = self.container, self.prices
        rate = container.cpu * prices.core + container.memory / 1024 * prices.gib
        if gpu:
            model = gpu.model.rstrip("!")
            if model not in prices.gpus:
                return f"configs/modal.toml has no price of {model}"
            rate += gpu.count * prices.gpus[model]
        return f"${rate * seconds:.2f} at the prices of {self.prices.date}"

    def parse(self, asked: str | None) -> Gpu:
        """`B200`, `H100!`, `B200:2`, parsed for Modal. UsageError if it does not name
        one GPU model.
        """
        text = (asked or self.gpu).strip().upper()
        match = re.fullmatch(r"([A-Z0-9][A-Z0-9-]*)(!?)(?::([1-8]))?", text)
        if not match:
            hint = (
                "one name, such as B200, H100! or B200:2: times of different GPUs cannot be"
                " compared"
            )
            raise UsageError(f"--gpu {asked or self.gpu}: expected a GPU", hint=hint)
        model, count = match[1], int(match[3] or 1)
        names = self.gpus.devices.get(model, (model,))
        words = tuple(tuple(name.split("-")) for name in names)
        return Gpu(
            model + ("!" if match[2] or model in self.gpus.exact else ""), count, words
        )


def file() -> Path:
    return paths.CONFIGS_DIR / "modal.toml"


def load() -> Settings:
    """Read configs/modal.toml; a UsageError names the key and what was expected."""
    return decode(read_toml(file()), Settings, file())


def pins() -> list[str]:
    """The packages of the image, `name==version`: the extra `image` of pyproject.toml,
    or of the installed gdn.
    """
    if paths.IN_CHECKOUT:
        return list(
            read_toml(paths.PYPROJECT)["project"]["optional-dependencies"][_EXTRA]
        )
    try:
        required = metadata.requires("gdn") or []
    except metadata.PackageNotFoundError:
        raise MissingError(
            "gdn is not installed, and its pyproject.toml is not here",
            hint="pip install gdn",
        ) from None
    marked = re.compile(rf"""(.+?)\s*;\s*extra\s*==\s*["']{_EXTRA}["']\s*""")
    return [found[1] for line in required if (found := marked.fullmatch(line))]


def pinned() -> set[str]:
    """The names of the packages in the image."""
    return {re.split(r"[\[=]", pin)[0] for pin in pins()}


def packages(image: Image) -> list[str]:
    """The packages to install on top of an image's base."""
    return [pin for pin in pins() if pin.split("==")[0] not in image.keeps]
