"""JSON and TOML that anyone may have written -> values, or one clear line that names the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import GdnError, MissingError, UsageError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

__all__ = ["Fields", "json_of", "read_json", "read_text", "read_toml"]

_DEEPEST = 100  # tables in tables: more is no file of anyone's, and every reader behind this one may recurse
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # of characters beyond 16 bits: right in pairs, which few files have
_WIDEST = 2**64  # of a whole number: what no 64 bits hold breaks SQLite, C++ and float alike


def read_text(path: Path, kind: type[UsageError | MissingError] = UsageError) -> str:
    """A file's text, UTF-8; `kind` with the file's name where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise kind(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise kind(f"{path}: not UTF-8 text") from None


def read_json(path: Path, kind: type[UsageError | MissingError] = UsageError) -> Any:
    """The value in a JSON file; `kind` with the file's name where it cannot be read, or is none."""
    return json_of(read_text(path, kind), path, kind)


def json_of(text: str | bytes, where: object, kind: type[UsageError | MissingError] = UsageError) -> Any:
    """The value in a JSON text; `kind`, which begins with `where` the text is from, for one that is none: also where
    tables are nested, or numbers are large, beyond reason."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        place = f"column {e.colno}" if e.lineno == 1 else f"line {e.lineno} column {e.colno}"
        raise _wrong(where, "JSON", f"{e.msg} at {place}", kind) from None
    except (ValueError, RecursionError) as e:  # Python's own limits on digits and on nesting; no text
        raise _wrong(where, "JSON", _beyond(e), kind) from None
    if fault := _fault(value, (math.inf, -math.inf)):  # 1e999; TOML may say inf
        raise _wrong(where, "JSON", fault, kind)
    try:
        if _HALVES.search(text if isinstance(text, str) else text.decode(errors="replace")):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _wrong(where, "JSON", "an escape spells half a character", kind) from None
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file; UsageError with the file's name where it cannot be read, or is none."""
    try:
        value = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as e:
        raise _wrong(path, "TOML", str(e), UsageError) from None
    except (ValueError, RecursionError) as e:
        raise _wrong(path, "TOML", _beyond(e), UsageError) from None
    if fault := _fault(value):
        raise _wrong(path, "TOML", fault, UsageError)
    return value


_KIND = {str: "text", bool: "true or false", list: "a list", dict: "a table", int: "a whole number"}


class Fields:
    """Takes typed keys out of one TOML table; what is wrong or left over is reported with file and key."""

    def __init__(self, path: Path, table: Mapping[str, Any], where: str = "") -> None:
        self.path, self.table, self.where = path, dict(table), where

    def wrong(self, key: str, expected: str, got: Any = None) -> UsageError:
        seen = "it is missing" if got is None else f"got {got!r}"
        return UsageError(f"{self.path}: key '{self.where}{key}': expected {expected}, {seen}")

    def take(self, key: str, kind: type, default: Any = ..., one_of: Iterable[str] | None = None) -> Any:
        expected = f"one of {', '.join(one_of)}" if one_of else _KIND[kind]
        value = self.table.pop(key, None)
        if value is None:
            if default is ...:
                raise self.wrong(key, expected)
            return default
        if type(value) is not kind or (kind is str and not value.strip()):
            raise self.wrong(key, expected, value)
        if one_of and value not in one_of:
            raise self.wrong(key, expected, value)
        return value

    def texts(self, key: str, default: Any = ..., one_of: Iterable[str] | None = None) -> tuple[str, ...]:
        expected = f"a list of {', '.join(one_of)}" if one_of else "a list of texts"
        values = self.take(key, list, default=default)
        if not all(isinstance(v, str) and (not one_of or v in one_of) for v in values):
            raise self.wrong(key, expected, values)
        return tuple(values)

    def done(self) -> None:
        for key in self.table:
            raise UsageError(f"{self.path}: key '{self.where}{key}': there is no such key")


def _wrong(where: object, form: str, why: str, kind: type[UsageError | MissingError]) -> GdnError:
    return kind(f"{where}: not valid {form}: {why}")


_NESTED = f"tables are nested more than {_DEEPEST} deep"
_LARGE = "it has a number that no 64 bits hold"


def _beyond(e: Exception) -> str:
    if isinstance(e, RecursionError):
        return _NESTED
    return "it is not UTF-8 text" if isinstance(e, UnicodeError) else _LARGE


def _fault(value: Any, endless: tuple[float, ...] = ()) -> str | None:
    """What is beyond reason in a value, looked at level by level: a deep one would end any recursion. `endless` are the
    floats that stand for no number here."""
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for table in level:
            for item in table.values() if isinstance(table, dict) else table if isinstance(table, list) else (table,):
                if isinstance(item, (dict, list)):
                    inner.append(item)
                elif type(item) is int and not -_WIDEST < item < _WIDEST or item in endless:
                    return _LARGE
                elif endless and item != item:
                    return "it has NaN, which is no number"
        if not inner:
            return None
        level = inner
    return _NESTED
