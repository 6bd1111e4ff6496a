"""NAME@REVISION: an algo as git has it, for comparisons with what it is now."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from msgspec import structs

from ..catalog.pack import pack, source_hash
from ..catalog.registry import Algo, AlgoFile, Registry, read_algo
from ..errors import MissingError, UsageError
from ..parsing import decode, read_toml


def find(known: Registry, name: str, op: str | None) -> Algo:
    """The algo of this name, at a git revision if it is NAME@REVISION: then it is
    packed, from its own folder at that revision and what that shares.

    UsageError: no repository, no such revision, or the algo was not there then.
    """
    plain, mark, revision = name.partition("@")
    current = known.find(plain, op)
    if not mark:
        return current

    folder = current.own_folder
    root = folder.parents[1]
    commit = _commit(root, name, revision)
    with tempfile.TemporaryDirectory(prefix="gdn-") as temporary:
        own = folder.relative_to(root)
        _extract(root, commit, own, Path(temporary))
        file = Path(temporary, own, "algo.toml")
        if not file.is_file():
            hint = f"`git log --oneline -- {folder}` lists its revisions"
            raise UsageError(f"{current.full_name} is not in {revision}", hint=hint)

        for shared in decode(read_toml(file), AlgoFile, name).shares:
            _extract(root, commit, Path(shared), Path(temporary))

        old = structs.replace(read_algo(file, own.parts[0]), op=current.op)
        title = f"{current.op}-{current.name}-{commit[:12]}"
        solution = pack(old, known.op(current.op), name=title)

    name = f"{current.name}@{revision}"
    return structs.replace(old, name=name, folder=None, shares=(), solution=solution)


def _commit(root: Path, name: str, revision: str) -> str:
    top, why = _git(root, "rev-parse", "--show-toplevel")
    if not top:
        hint = "commit it: `git init`, `git add`, `git commit`"
        raise UsageError(f"{name}: {root}: {why}", hint=hint)

    # what begins with - would be an option
    commit = b""
    if revision and not revision.startswith("-"):
        commit, _ = _git(root, "rev-parse", "-q", "--verify", f"{revision}^{{commit}}")
    if not commit:
        hint = "such as HEAD, HEAD~1, a branch or a commit"
        raise UsageError(f"{name}: unknown revision '{revision}'", hint=hint)

    return commit.decode().strip()


def unchanged(known: Registry, algos: list[Algo]) -> str | None:
    """In words, that all have the same sources and one is of a revision; else None."""
    names = [algo.name for algo in algos]
    if not any("@" in name for name in names):
        return None

    hashes = {source_hash(pack(algo, known.op(algo.op))) for algo in algos}
    if len(hashes) > 1:
        return None

    return f"{' and '.join(names)} have the same sources: nothing was timed"


def _extract(root: Path, commit: str, path: Path, target: Path) -> None:
    """Write what a path below `root` was then; nothing if it was not there."""
    data, _ = _git(root, "archive", commit, "--", str(path))
    if data:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(target, filter="data")


def _git(root: Path, *args: str) -> tuple[bytes, str]:
    """git's output in a folder, b"" if it fails; and why it failed, in its own words."""
    command = ["git", "-C", str(root), *args]
    try:
        process = subprocess.run(command, capture_output=True, timeout=60)
    except FileNotFoundError:
        raise MissingError("there is no git here", hint="install git") from None
    except subprocess.TimeoutExpired:
        return b"", "git takes more than a minute"

    if process.returncode == 0:
        return process.stdout, ""

    lines = process.stderr.decode(errors="replace").strip().splitlines()
    return b"", lines[-1].removeprefix("fatal: ") if lines else ""
