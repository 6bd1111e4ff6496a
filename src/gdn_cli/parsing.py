"""JSON and TOML written by anyone -> values, or one clear line that names the file."""

from __future__ import annotations

import functools
import json
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
_LONGEST = 500  # characters of msgspec's words: keys may be of any length
_WIDEST = 2**64  # whole numbers beyond 64 bits break C++ and float


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
    return _parsed(msgspec.json.decode, text, f"{where}: not valid JSON", kind)


def read_toml(path: Path) -> Json:
    """The table in a TOML file; UsageError with the file's name if it cannot be read or
    is not TOML.
    """
    text = read_text(path, most=_LARGEST_TOML)
    table: Json = _parsed(tomllib.loads, text, f"{path}: not valid TOML", UsageError)
    return table


def _parsed(parse: Callable[[Any], Any], text: object, wrong: str, kind: Kind) -> Any:
    try:
        value = parse(text)
        fault = _fault(value)
    except RecursionError:
        fault = _NESTED
    except (ValueError, msgspec.MsgspecError) as e:
        fault = str(e)
    if fault:
        raise kind(f"{wrong}: {fault}")
    return value


_NESTED = f"tables are nested more than {_DEEPEST} deep"


def _fault(value: Any) -> str | None:
    """The unreasonable part of a value, or None. Goes level by level, since deep nesting
    would break a recursion.
    """
    level = [value]
    for _ in range(_DEEPEST):
        items: list[Any] = []
        for item in level:
            if type(item) is int and abs(item) >= _WIDEST:
                return "it has a number that does not fit in 64 bits"
            if isinstance(item, dict):
                items += item.values()
            elif isinstance(item, list):
                items += item
        if not items:
            return None
        level = items
    return _NESTED


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
    shipped, *others = [folder / name for folder in paths.config_dirs()]
    files = [shipped, *filter(Path.is_file, others)]
    table: Json = {}
    for file in files:
        table = overlaid(table, read_toml(file))
    return table, " and ".join(map(str, files))


class WrongError(ValueError):
    """A rule that a Struct checks in its `__post_init__`. `steps` lead from the Struct
    to `got`; leave `got` out if the value is missing.
    """

    def __init__(
        self, steps: Sequence[str | int], expected: str, got: Any = ...
    ) -> None:
        actual = "it is missing" if got is ... else f"got {got!r:.80}"
        super().__init__(f"{'.'.join(map(str, steps))}: expected {expected}, {actual}")


def check_names(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises WrongError for a name that is not known."""
    for name in names:
        if name not in known:
            raise WrongError([key], f"names of {', '.join(known)}", name)


def wrong(
    where: object,
    steps: Sequence[str | int],
    expected: str,
    got: Any = ...,
    kind: Kind = UsageError,
) -> GdnError:
    """The error for one value of a file; without `got` the value is missing."""
    return _one_line(where, f"$.{WrongError(steps, expected, got)}", kind)


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


_dumps = functools.partial(json.dumps, ensure_ascii=False)


def lined(value: Any, indent: int = 0) -> str:
    """JSON with each table of a list on a line: readable, small, and good to diff."""
    if isinstance(value, dict) and value:
        brackets = "{}"
        inside = [f"{_dumps(k)}: {lined(v, indent + 1)}" for k, v in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        brackets = "[]"
        inside = list(map(_dumps, value))
    else:
        return _dumps(value)
    space = "\n" + " " * (indent + 1)
    return brackets[0] + space + f",{space}".join(inside) + space[:-1] + brackets[1]
