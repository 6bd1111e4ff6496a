"""`gdn modal setup`: the token, the volumes, the app. And where on the volume of data
sets one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import structs

from ..errors import MissingError
from .settings import Image, Settings


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


def place(volume: str, paths: Iterable[str], needed: Iterable[str]) -> str:
    """The folder of the volume that holds a data set with the files `needed`: "" for
    the volume itself, else with a slash at the end, as `modal volume put VOLUME FOLDER`
    makes one. MissingError if there is none.
    """
    paths, needed = set(paths), sorted(needed)
    lacking: dict[str, list[str]] = {}
    for root in _roots(paths, "definitions") & _roots(paths, "workloads"):
        lacking[root] = [name for name in needed if root + name not in paths]
    hint = (
        f"`modal volume put {volume} DIR` uploads one; without --dataset workloads are drawn"
        " in the container"
    )
    if not lacking:
        raise MissingError(f"volume {volume} has no data set", hint=hint)
    best = min(lacking, key=lambda root: (len(lacking[root]), root.count("/"), root))
    if missing := lacking[best]:
        raise MissingError(
            f"volume {volume}: its data set is without {len(missing)} of {len(needed)} files"
            f" of --dataset, such as {missing[0]}",
            hint=hint,
        )
    return best


def _roots(paths: Iterable[str], kind: str) -> set[str]:
    """The folders with a folder of this name."""
    roots = set()
    for name in paths:
        folder, slash, _ = f"/{name}".partition(f"/{kind}/")
        if slash:
            roots.add(f"{folder}/"[1:])
    return roots
