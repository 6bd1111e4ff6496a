"""`gdn modal setup`: the token, the volumes, the app. And where on the volume of data
sets one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import structs

from .. import units
from ..errors import MissingError
from .settings import Image, Settings

# the folders of a data set
_PARTS = ("definitions", "workloads")


def setup(settings: Settings, image: Image | None, say: Callable[[str], None]) -> None:
    """Check the login, make both volumes, and deploy gdn with `image`: building that
    takes minutes of a CPU's time.
    """
    from . import modal_client

    modal_client.connect(settings.limits.connect)
    say("token: Modal accepts it")
    for use, name in structs.asdict(settings.volumes).items():
        modal_client.volume(name)
        say(f"volume {name}: there ({use})")
    if image:
        name = modal_client.app_name(settings, image)
        modal_client.deployed(name, settings, image, say)
        say(f"app {name}: deployed; `modal app logs {name}` shows its runs")


def place(volume: str, there: Iterable[str], needed: Iterable[str]) -> str:
    """The folder of the volume that holds a data set with the files `needed`: "" for
    the volume itself, else one as `modal volume put VOLUME FOLDER` makes it.
    MissingError if there is none.
    """
    paths = [f"/{name}" for name in there]
    roots = [
        {p.split(f"/{kind}/")[0] for p in paths if f"/{kind}/" in p} for kind in _PARTS
    ]
    lacking: dict[str, list[str]] = {}
    for root in sorted(
        set.intersection(*roots), key=lambda root: (root.count("/"), root)
    ):
        lacking[root] = sorted({f"{root}/{name}" for name in needed} - {*paths})

    hint = (
        f"`modal volume put {volume} DIR` uploads one; without --dataset workloads are drawn"
        " in the container"
    )
    if not lacking:
        raise MissingError(f"volume {volume} has no data set", hint=hint)
    best = min(lacking, key=lambda root: len(lacking[root]))
    if missing := lacking[best]:
        files = units.count(len(missing), "file")
        raise MissingError(
            f"volume {volume}: its data set is without {files} of --dataset,"
            f" such as {missing[0][1:]}",
            hint=hint,
        )
    return best[1:]
