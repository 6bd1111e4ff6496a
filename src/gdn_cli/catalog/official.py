"""The contest's own harness: configs/official.toml says which flashinfer-bench judges,
and this finds it here.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from .. import paths
from ..errors import MissingError, UsageError, unknown
from ..parsing import Text, decode, read_json, read_toml

TIER = "official"  # under which its times are recorded
IN_IMAGE = "/opt/gdn/harness"  # where a container has it


class Version(Struct, frozen=True, forbid_unknown_fields=True):
    needs: Text
    how: Text


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    harness: Text
    versions: dict[str, Version]


class Harness(Struct, frozen=True, kw_only=True):
    """A flashinfer-bench to judge with."""

    name: str
    # its requirement, for pip
    needs: str
    # how it times
    how: str
    # that has it; None: the one of gdn's own environment
    folder: str | None = None
    # a process for each solution and workload, as the contest's evaluation has it
    isolated: bool = False

    @property
    def words(self) -> str:
        """flashinfer-bench main (40e6ca7)."""
        commit = re.search(r"/([0-9a-f]{7,40})\.tar\.gz$", self.needs)
        return f"flashinfer-bench {self.name}" + (f" ({commit[1]})" if commit else "")

    def install(self, python: str = "python") -> str:
        """The shell command that installs it into its folder."""
        return (
            f"{python} -m pip install --no-deps --target {self.folder} '{self.needs}'"
        )


def harness(name: str | None, isolated: bool) -> Harness:
    """The harness of this name, else the default one. A UsageError names those that there are."""
    file = paths.CONFIGS_DIR / "official.toml"
    config = decode(read_toml(file), _File, file)
    name = name or config.harness
    if name not in config.versions:
        raise unknown("harness", name, config.versions, hint=f"they are in {file}")
    version = config.versions[name]
    return Harness(name=name, needs=version.needs, how=version.how, isolated=isolated)


def installed(wanted: Harness) -> Harness:
    """The harness with the folder that it has on this machine. MissingError, with pip's
    command, if it is not here.
    """
    version = re.fullmatch(r"flashinfer-bench==(\S+)", wanted.needs)
    try:
        if version and metadata.version("flashinfer-bench") == version[1]:
            return wanted
    except metadata.PackageNotFoundError:
        pass
    folder = paths.harness_dir() / wanted.name
    placed = replace(wanted, folder=str(folder))
    if not _holds(folder, wanted.needs):
        raise MissingError(
            f"{wanted.words} is not installed here", hint=placed.install()
        )
    return placed


def in_container(wanted: Harness, pinned: list[str]) -> Harness:
    """The harness in a container whose image has these pinned packages, and a folder for
    a harness that is none of them.
    """
    if wanted.needs in pinned:
        return wanted
    return replace(wanted, folder=f"{IN_IMAGE}/{wanted.name}")


def _holds(folder: Path, needs: str) -> bool:
    """Whether pip has installed just this there: an archive by its address, else a version."""
    for info in folder.glob("flashinfer_bench-*.dist-info"):
        try:
            return needs.endswith(read_json(info / "direct_url.json")["url"])
        except (UsageError, LookupError, TypeError, AttributeError):
            version = info.name.removesuffix(".dist-info").partition("-")[2]
            return needs == f"flashinfer-bench=={version}"
    return False
