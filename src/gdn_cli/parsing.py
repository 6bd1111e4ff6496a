"""JSON and TOML written by anyone -> values, or one clear line that names the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from . import files, paths
from .errors import GdnError, UsageError
from .text import shown

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

T = TypeVar("T")
Json = dict[str, Any]  # a table with unchecked keys and values
Kind = Callable[..., GdnError]  # UsageError or MissingError
# Types that fields of several Structs share.
Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]

_LARGEST_TOML = 4 << 20  # bytes: its parser takes seconds for a MiB
# levels of nesting: real files have fewer, and later readers may recurse
_DEEPEST = 100
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # surrogates: valid only in pairs
_LONGEST = 500  # characters of msgspec's words: keys may be of any length
_WIDEST = 2**64  # whole numbers beyond 64 bits break SQLite, C++ and float


def read_text(path: Path, kind: Kind = UsageError, most: int = files.MOST) -> str:
    """The text of a plain file of at most `most` bytes, UTF-8; raises `kind` with the file's
    name if it is none."""
    try:
        return files.read(path, most).decode().replace("\r\n", "\n").replace("\r", "\n")
    except OSError as e:
        raise kind(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise kind(f"{path}: not UTF-8 text") from None


def read_json(path: Path, kind: Kind = UsageError) -> Any:
    """The value in a JSON file; raises `kind` with the file's name if it cannot be read
    or is not JSON.
    """
    return json_of(read_text(path, kind), path, kind)


def json_of(text: str | bytes, where: object, kind: Kind = UsageError) -> Any:
    """The value in a JSON text. Raises `kind`, beginning with `where` the text is from,
    if it is not JSON, or if its nesting or its numbers are too large.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        line = "" if e.lineno == 1 else f"line {e.lineno} "
        place = f"{line}column {e.colno}"
        raise _wrong(where, "JSON", f"{e.msg} at {place}", kind) from None
    # Python's limits on digits and nesting, or not text
    except (ValueError, RecursionError) as e:
        raise _wrong(where, "JSON", _beyond(e), kind) from None
    if fault := _fault([value], (math.inf, -math.inf)):  # 1e999; TOML may say inf
        raise _wrong(where, "JSON", fault, kind)
    try:
        if HALVES.search(
            text if isinstance(text, str) else text.decode(errors="replace")
        ):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _wrong(where, "JSON", "an escape spells half a character", kind) from None
    return value


def read_toml(path: Path) -> Json:
    """The table in a TOML file; UsageError with the file's name if it cannot be read or
    is not TOML.
    """
    try:
        value = tomllib.loads(read_text(path, most=_LARGEST_TOML))
    except tomllib.TOMLDecodeError as e:
        raise _wrong(path, "TOML", str(e), UsageError) from None
    except (ValueError, RecursionError) as e:
        raise _wrong(path, "TOML", _beyond(e), UsageError) from None
    if fault := _fault([value]):
        raise _wrong(path, "TOML", fault, UsageError)
    return value


def overlaid(base: Json, changes: Json) -> Json:
    """A table with these changes; those to a table in it change only what they name."""
    table = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            value = overlaid(table[key], value)
        table[key] = value
    return table


def read_config(name: str) -> tuple[Json, str]:
    """The table of configs/NAME, under that of the user's own file of this name, and
    which files these are. Where both have a key, the user's wins.
    """
    files = [folder / name for folder in paths.config_dirs()]
    files = [files[0], *filter(Path.is_file, files[1:])]
    table: Json = {}
    for file in files:
        table = overlaid(table, read_toml(file))
    return table, " and ".join(map(str, files))


class Wrong(ValueError):
    """A rule that a Struct checks in its `__post_init__`. `steps` lead from the Struct
    to `got`; leave `got` out if the value is missing.
    """

    def __init__(
        self, steps: Sequence[str | int], expected: str, got: Any = ...
    ) -> None:
        seen = "it is missing" if got is ... else f"got {got!r:.80}"
        super().__init__(f"{'.'.join(map(str, steps))}: expected {expected}, {seen}")


def check_names(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises Wrong for a name that is not known."""
    for name in names:
        if name not in known:
            raise Wrong([key], f"names of {', '.join(known)}", name)


def wrong(
    where: object,
    steps: Sequence[str | int],
    expected: str,
    got: Any = ...,
    kind: Kind = UsageError,
) -> GdnError:
    """The error for one value of a file; without `got` the value is missing."""
    return _one_line(where, f"$.{Wrong(steps, expected, got)}", kind)


def decode(value: Any, form: type[T], where: object, kind: Kind = UsageError) -> T:
    """A parsed file's value as a `form`: a msgspec Struct, or a type made of Structs.

    Raises `kind` if it does not fit, in one line: `where` the value is from, and what
    msgspec says, with the path in the value.
    """
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as e:
        raise _one_line(where, str(e), kind) from None


def _one_line(where: object, text: str, kind: Kind) -> GdnError:
    return kind(f"{where}: {shown(text)[:_LONGEST]}")


def to_json(value: Any) -> Any:
    """A Struct, or a value made of Structs, as JSON has it: tables, lists, texts, numbers."""
    return msgspec.json.decode(msgspec.json.encode(value))


def lined(value: Any, indent: int = 0) -> str:
    """JSON with each table of a list on a line: readable, small, and good to diff."""
    if isinstance(value, dict) and value:
        brackets = "{}"
        inside = [f"{json.dumps(k)}: {lined(v, indent + 1)}" for k, v in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        brackets = "[]"
        inside = [json.dumps(item) for item in value]
    else:
        return json.dumps(value)
    space = "\n" + " " * (indent + 1)
    return brackets[0] + space + f",{space}".join(inside) + space[:-1] + brackets[1]


def _wrong(where: object, form: str, why: str, kind: Kind) -> GdnError:
    return kind(f"{where}: not valid {form}: {why}")


_NESTED = f"tables are nested more than {_DEEPEST} deep"
_LARGE = "it has a number that does not fit in 64 bits"


def _beyond(e: Exception) -> str:
    if isinstance(e, RecursionError):
        return _NESTED
    return "it is not UTF-8 text" if isinstance(e, UnicodeError) else _LARGE


def _fault(value: Any, endless: tuple[float, ...] = ()) -> str | None:
    """The unreasonable part of a value, or None. `endless`: floats that JSON cannot have.

    Goes level by level, since deep nesting would break a recursion.
    """
    level = [value]
    for _ in range(_DEEPEST):
        items: list[Any] = []
        for table in level:
            items += table.values() if isinstance(table, dict) else table
        for item in items:
            if type(item) is int and abs(item) >= _WIDEST or item in endless:
                return _LARGE
            if endless and item != item:
                return "it has NaN, which is not a number"
        level = [item for item in items if isinstance(item, (dict, list))]
        if not level:
            return None
    return _NESTED
