"""`gdn submit`: a proved solution into a team's repository, as a commit with a tag. Nothing is ever pushed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ..catalog import submission
from ..catalog.formats import Solution
from ..catalog.pack import source_hash
from ..catalog.registry import Registry
from ..errors import GdnError, MissingError, UsageError


class Submitted(Struct):
    """What was done: the folder in the repository, the commit (None if there was nothing to change), the tag."""

    folder: str
    commit: str | None
    tag: str
    push: str  # the command that the user has to give


def repository(path: Path) -> Path:
    """The top folder of a git repository with a work tree. UsageError if `path` is none."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder", hint="name a clone of your team's repository")
    top = Path(_git(path, "rev-parse", "--show-toplevel", wrong=f"{path} is not in a git repository"))
    if top.resolve() != path.resolve():
        raise UsageError(f"{path} is inside the repository {top}", hint="name its top folder: the contest reads that")
    return top


def submit(
    root: Path, solution: Solution, op: str, tag: str | None, registry: Registry, prove: Callable[[], None]
) -> Submitted:
    """Write the solution into the repository `root`, commit its folder and tag the commit. `prove` is called once all
    that could be refused has been looked at, and raises if the solution is not fit; until then nothing is written."""
    submission.fit(solution, registry)
    name = submission.place(submission.entries(root, registry), solution["definition"], op)
    folder = root / name
    tags = _git(root, "tag", "--list").splitlines()
    if tag in tags:
        raise UsageError(f"the tag {tag} is there already", hint="--tag names another; the newest counts")
    tag = tag or _next(op, tags)
    _git(root, "check-ref-format", f"refs/tags/{tag}", wrong=f"--tag {tag}: git takes no such name")
    inside = [submission.CONFIG, "solution"] if name == "." else [name]
    if _git(root, "status", "--porcelain", "--", *inside):
        raise UsageError(f"{folder} has changes that are not committed", hint="commit or drop them first")
    if _git(root, "diff", "--cached", "--name-only"):
        raise UsageError(f"{root} has staged changes", hint="commit or unstage them first")
    prove()
    folder.mkdir(exist_ok=True)
    submission.write(folder, solution)
    wrong = [f"{e.folder}: {fault}" for e in submission.entries(root, registry) for fault in e.faults]
    if submission.written(folder) != source_hash(solution):
        wrong.append(f"{name}: its files are not what was proved")
    if wrong:
        raise UsageError(f"not committed: {wrong[0]}", hint=f"`git -C {root} restore .` takes the files back")
    _git(root, "add", "--force", "--", *inside)
    commit, message = None, f"{solution['definition']}: {solution['name']}"
    if _git(root, "diff", "--cached", "--name-only"):
        _git(root, "commit", "--quiet", "-m", message)
        commit = _git(root, "rev-parse", "--short", "HEAD")
    _git(root, "tag", "--annotate", tag, "-m", message)
    remote = next(iter(_git(root, "remote").splitlines()), "origin")
    return Submitted(name, commit, tag, f"git -C {root} push {remote} HEAD {tag}")


def _next(op: str, tags: list[str]) -> str:
    """gdn_decode-v4 after gdn_decode-v3."""
    taken = [int(found[1]) for tag in tags if (found := re.fullmatch(rf"{re.escape(op)}-v(\d+)", tag))]
    return f"{op}-v{max(taken, default=0) + 1}"


def _git(root: Path, *args: str, wrong: str | None = None) -> str:
    """What git prints. GdnError with its last line if it fails; it asks nothing, and runs no editor."""
    env = os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
    try:
        done = subprocess.run(["git", "-C", str(root), *args], env=env, capture_output=True, text=True)
    except FileNotFoundError:
        raise MissingError("git is not here", hint="install git") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise GdnError(f"{wrong or f'git {args[0]} failed'}: {said[-1] if said else 'no reason given'}", code=2)
    return done.stdout.strip()
