"""Errors for a user, instead of tracebacks: one clear line, what to do next, and a
stable exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .text import shown

OK = 0
FAILED = 1  # an algo failed its check, or a gate that the user set
USAGE = 2  # wrong usage, or a name that does not exist
MISSING = 3  # something is missing here: GPU, nvcc, package, dataset
REMOTE = 4  # the remote side failed
INTERRUPTED = 130


class GdnError(Exception):
    """An error with one line for the user (`message`), the next step (`hint`, possibly
    several lines) and an exit code. For programs: `id` names its kind and stays the
    same, `suggestion` is the name that was probably meant.
    """

    code = FAILED
    id = "failed"
    suggestion: str | None = None

    def __init__(
        self, message: str, *, code: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.code if code is None else code
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(GdnError):
    code = USAGE
    id = "usage"


class MissingError(GdnError):
    code = MISSING
    id = "missing"


class RemoteError(GdnError):
    code = REMOTE
    id = "remote"


_SHORT = 3  # characters
_MANY = 20  # names, which nobody reads in a line


def unknown(
    kind: str, name: str, known: Iterable[str], *, hint: str | None = None
) -> UsageError:
    """The error for a name that does not exist, with the nearest known names, or all of
    them if none is near.
    """
    known = list(dict.fromkeys(known))
    near = [shown(n) for n in difflib.get_close_matches(name, known, n=3, cutoff=0.6)]
    if len(name) <= _SHORT:  # half of all names are near to a short one: only its like
        near = [n for n in near if n[:1] == name[:1] and len(n) <= len(name) + 1]
    if near:
        advice = f"did you mean {' or '.join(near)}?"
    elif len(known) > _MANY and hint:
        advice, hint = hint, None
    elif known:
        advice = f"there are: {', '.join(map(shown, known))}"
    else:
        advice = "there are none"
    if hint:
        advice += f"{' ' if near else '; '}{hint}"
    error = UsageError(f"unknown {kind} '{name}'", hint=advice)
    error.id = f"unknown_{kind.replace(' ', '_')}"
    error.suggestion = near[0] if near else None
    return error


def one_line(e: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    if hasattr(e, "one_line"):  # an exception of another process
        return e.one_line
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0][:300]}" if text else type(e).__name__
