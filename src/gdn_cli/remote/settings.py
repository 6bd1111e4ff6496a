"""configs/modal.toml: what to rent, and for how long at most. The pinned packages; what
a GPU's name means.
"""

from __future__ import annotations

import re
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .. import paths
from ..errors import UsageError, unknown
from ..parsing import Positive, Text, decode, read_toml

# where the volumes are mounted
DATA, CACHE = "/data", "/cache"
# the queue at Modal with the records of each call, by its id; Modal drops them after a
# day
RECORDS = "gdn-records"
# the dict at Modal with the call that does a parcel's work, by the parcel's hash
CLAIMS = "gdn-claims"
# prices of that age are said to be old
_FRESH_DAYS = 90
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
        fits = len(devices) == self.count
        for device in devices:
            words = set(re.split(r"[\s\-_]+", device.upper()))
            fits &= "MIG" not in words and any(words.issuperset(w) for w in self.words)
        if fits:
            return None
        have = ", ".join(devices) or "no GPU"
        return f"asked for {self}, and the container has {have}"


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of configs/modal.toml."""


class ImageTable(Table, frozen=True, kw_only=True):
    """[images.NAME] of configs/modal.toml."""

    base: Text
    # "": the base has its own
    python: str
    # commands at the beginning of the build
    first: tuple[str, ...] = ()
    # packages of the base that are not replaced
    keeps: tuple[str, ...] = ()
    smoke: Text


class Image(ImageTable, frozen=True, kw_only=True):
    name: str
    # commands at the end of the build
    then: tuple[str, ...] = ()


class Gpus(Table, frozen=True):
    # names to propose
    known: tuple[str, ...]
    # names that get a `!`
    exact: tuple[str, ...]
    # model -> other names of its devices
    devices: dict[str, tuple[str, ...]] = {}


class Limits(Table, frozen=True):
    """Containers side by side; seconds."""

    containers: Positive
    start: Positive
    queue: Positive
    idle: Positive
    connect: Positive


class Container(Table, frozen=True):
    # cores
    cpu: Positive
    # MiB
    memory: Positive


class Volumes(Table, frozen=True):
    """Names at Modal."""

    dataset: Text
    cache: Text


# a second
Dollars = Annotated[float, Meta(gt=0)]


class Prices(Table, frozen=True):
    # on which they were read
    date: date
    core: Dollars
    gib: Dollars
    gpus: dict[str, Dollars]


class Settings(Table, frozen=True, kw_only=True):
    """configs/modal.toml."""

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

    def chosen(self, image: str | None) -> Image:
        name = image or self.image
        if name not in self.images:
            raise unknown("image", name, self.images, hint=f"images are in {file()}")
        return Image(name=name, **msgspec.structs.asdict(self.images[name]))

    def dollars(
        self, gpu: Gpu | None, seconds: float, likely_s: float | None = None
    ) -> str:
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

        likely = "" if likely_s is None else f", likely ${rate * likely_s:.2f},"
        age = (date.today() - prices.date).days
        old = f", {age} days ago (`modal billing rates` has today's)"
        dates = f"{prices.date}{old if age > _FRESH_DAYS else ''}"
        return f"${rate * seconds:.2f}{likely} at the prices of {dates}"

    def parse(self, gpu: str | None) -> Gpu:
        """`B200`, `H100!`, `B200:2`, parsed for Modal. UsageError if it does not name
        one GPU model.
        """
        text = gpu or self.gpu
        match = re.fullmatch(
            r"([A-Z0-9][A-Z0-9-]*)(!?)(?::([1-8]))?", text.strip().upper()
        )
        if not match or match[1] == "ANY":
            raise UsageError(
                f"--gpu {text}: expected a GPU",
                hint="one name, such as B200, H100! or B200:2: times of different GPUs cannot"
                " be compared",
            )
        model, exact, count = match.groups()
        names = self.gpus.devices.get(model, (model,))
        words = tuple(tuple(name.split("-")) for name in names)
        if model in self.gpus.exact:
            exact = "!"
        return Gpu(model + exact, int(count or 1), words)


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
        project = read_toml(paths.PYPROJECT)["project"]
        return list(project["optional-dependencies"][_EXTRA])
    marked = re.compile(rf"""(.+?)\s*;\s*extra\s*==\s*["']{_EXTRA}["']\s*""")
    matches = map(marked.fullmatch, metadata.requires("gdn") or [])
    return [match[1] for match in matches if match]


def pinned() -> set[str]:
    """The names of the packages in the image."""
    return {re.split(r"[\[=]", pin)[0] for pin in pins()}


def packages(image: Image) -> list[str]:
    """The packages to install on top of an image's base."""
    return [pin for pin in pins() if pin.split("==")[0] not in image.keeps]
