"""JSON and TOML written by anyone -> values, or one clear line that names the file."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from . import files
from .errors import GdnError, UsageError, unknown

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

T = TypeVar("T")
Json = dict[str, Any]  # a table with unchecked keys and values
Kind = Callable[..., GdnError]  # UsageError or MissingError
# Types that fields of several Structs share.
Text = Annotated[str, Meta(pattern=r"\S", description="text")]
Positive = Annotated[int, Meta(ge=1)]

_LARGEST_TOML = 4 << 20  # bytes: its parser takes seconds for a MiB
# levels of nesting: real files have fewer, and later readers may recurse
_DEEPEST = 100
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # surrogates: valid only in pairs
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
        place = (
            f"column {e.colno}"
            if e.lineno == 1
            else f"line {e.lineno} column {e.colno}"
        )
        raise _wrong(where, "JSON", f"{e.msg} at {place}", kind) from None
    # Python's limits on digits and nesting, or not text
    except (ValueError, RecursionError) as e:
        raise _wrong(where, "JSON", _beyond(e), kind) from None
    if fault := _fault(value, (math.inf, -math.inf)):  # 1e999; TOML may say inf
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
    if fault := _fault(value):
        raise _wrong(path, "TOML", fault, UsageError)
    return value


class Wrong(ValueError):
    """A file breaks a rule that a Struct checks in its `__post_init__`. `steps` lead
    from the Struct to `got`; leave `got` out if the value is missing.
    """

    def __init__(
        self, steps: Sequence[str | int], expected: str, got: Any = ...
    ) -> None:
        super().__init__()
        self.steps, self.expected, self.got = steps, expected, got


def decode(
    value: Any, form: type[T], where: object, kind: Kind = UsageError, root: str = "$"
) -> T:
    """A parsed file's value as a `form`: a msgspec Struct, or a type made of Structs.

    Raises `kind` if it does not fit, in one line: `where` the value is from, the path
    in it (`$.tune.constants.rows`), what is expected there and what was found. `root`
    is the value's own path, for a part of a file.
    """
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as e:
        error = e
    at = re.search(r" - at (?:`key` in )?`\$([^`]*)`$", str(error))
    said = str(error)[: at.start()] if at else str(error)
    steps = _steps(at[1] if at else "", error, value, form)
    if isinstance(rule := error.__cause__, Wrong):
        raise wrong(where, [*steps, *rule.steps], rule.expected, rule.got, kind, root)
    if said.startswith("Object contains unknown field `"):
        key = said.split("`", 1)[1][:-1]
        known = [
            name
            for node in _nodes(form, steps)[0]
            for name in node.get("properties", ())
        ]
        place = f"{where}: {root}{_path([*steps, key])}"
        raise kind(f"{place}: unknown key", hint=unknown("key", key, known).hint)
    missing = said.startswith("Object missing required field `")
    expected, steps = _expected(
        form, [*steps, said.split("`")[1]] if missing else steps
    )
    raise wrong(
        where, steps, expected, ... if missing else _found(value, steps), kind, root
    )


def wrong(
    where: object,
    steps: Sequence[str | int],
    expected: str,
    got: Any = ...,
    kind: Kind = UsageError,
    root: str = "$",
) -> GdnError:
    """The error for one value of a file; without `got` the value is missing."""
    seen = "it is missing" if got is ... else f"got {got!r:.80}"
    return kind(f"{where}: {root}{_path(steps)}: expected {expected}, {seen}")


def to_json(value: Any) -> Any:
    """A Struct, or a value made of Structs, as JSON has it: tables, lists, texts, numbers."""
    return msgspec.json.decode(msgspec.json.encode(value))


def lined(value: Any, indent: int = 0) -> str:
    """JSON with each table of a list on a line: readable, small, and good to diff."""
    if isinstance(value, dict) and value:
        brackets, inside = (
            "{}",
            [
                f"{json.dumps(key)}: {lined(item, indent + 1)}"
                for key, item in value.items()
            ],
        )
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        brackets, inside = "[]", list(map(json.dumps, value))
    else:
        return json.dumps(value)
    space = "\n" + " " * (indent + 1)
    return brackets[0] + space + f",{space}".join(inside) + space[:-1] + brackets[1]


def schema(form: Any) -> Json:
    """The JSON Schema of a Struct, or of a type made of Structs."""
    return msgspec.json.schema(form)


def _path(steps: Sequence[str | int]) -> str:
    def shown(step: str | int) -> str:
        plain = isinstance(step, str) and re.fullmatch(r"[\w-]{1,80}", step)
        return f".{step}" if plain else f"[{json.dumps(step)[:80]}]"

    return "".join(map(shown, steps))


def _found(value: Any, steps: Sequence[str | int]) -> Any:
    for step in steps:
        value = value[step]
    return value


def _steps(
    at: str, error: msgspec.ValidationError, value: Any, form: Any
) -> list[str | int]:
    """The keys that lead to the value that an error is about; `at` is msgspec's path.
    msgspec writes `[...]` for any key of a table of names: the key is found by leaving
    entries out until the error changes or goes away.
    """

    def same() -> bool:
        try:
            msgspec.convert(value, form)
        except msgspec.ValidationError as e:
            return str(e) == str(error)
        return False

    value, steps = copy.deepcopy(value), []
    for index, name in re.findall(r"\[(\d+|\.\.\.)\]|\.([^.\[]+)", at):
        if index == "...":
            table = _found(value, steps)
            for name in list(table):
                item = table.pop(name)
                if not same():
                    break
            table[name] = item
        steps.append(name or int(index))
    return steps


def _nodes(form: Any, steps: list[str | int]) -> tuple[list[Json], list[str | int]]:
    """The parts of a form's schema that the value at `steps` may be. A list that is
    described as a whole describes its items too: the steps end there.
    """
    whole = schema(form)

    def opened(node: Json) -> list[Json]:
        if "$ref" in node:  # a Struct's own description is its docstring
            named = whole["$defs"][node["$ref"].rsplit("/", 1)[1]]
            return opened(
                {key: of for key, of in named.items() if key != "description"}
            )
        if "description" in node or "anyOf" not in node:
            return [node]
        return [inner for each in node["anyOf"] for inner in opened(each)]

    nodes = opened(whole)
    for i, step in enumerate(steps):
        if described := [
            n for n in nodes if n.get("type") == "array" and "description" in n
        ]:
            return described, steps[:i]
        key = "items" if isinstance(step, int) else "additionalProperties"
        each = [opened(n) for node in nodes for n in node.get("anyOf", [node])]
        under = [
            n.get("properties", {}).get(step, n.get(key))
            for alternatives in each
            for n in alternatives
        ]
        nodes = [n for node in under if isinstance(node, dict) for n in opened(node)]
    return nodes, steps


def _expected(form: Any, steps: list[str | int]) -> tuple[str, list[str | int]]:
    """What a value at `steps` must be, in words, and the steps to the part that these
    words describe.
    """
    nodes, steps = _nodes(form, steps)
    words = [
        node.get("description") or _words(node)
        for node in nodes
        if node.get("type") != "null"
    ]
    return " or ".join(dict.fromkeys(words)), steps


_WORDS = {
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a table",
    "integer": "a whole number",
    "number": "a number",
}


def _words(node: Json) -> str:
    if names := node.get("enum"):
        return f"one of {', '.join(names)}" if len(names) > 1 else repr(names[0])
    word = _WORDS.get(node.get("type", ""), "another value")
    if node.keys() & {"minItems", "minLength"}:
        word += " that is not empty"
    if node.get("minimum", 0) > 0 or node.get("exclusiveMinimum") == 0:
        word = word.replace("a ", "a positive ")
    return f"{word}, 0 or more" if node.get("minimum") == 0 else word


def _wrong(where: object, form: str, why: str, kind: Kind) -> GdnError:
    return kind(f"{where}: not valid {form}: {why}")


_NESTED = f"tables are nested more than {_DEEPEST} deep"
_LARGE = "it has a number that does not fit in 64 bits"


def _beyond(e: Exception) -> str:
    if isinstance(e, RecursionError):
        return _NESTED
    return "it is not UTF-8 text" if isinstance(e, UnicodeError) else _LARGE


def _fault(value: Any, endless: tuple[float, ...] = ()) -> str | None:
    """What is unreasonable in a value, or None. Goes level by level, since deep nesting
    would break a recursion. `endless` are the floats that are not allowed as numbers.
    """
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for table in level:
            for item in (
                table.values()
                if isinstance(table, dict)
                else table
                if isinstance(table, list)
                else (table,)
            ):
                if isinstance(item, (dict, list)):
                    inner.append(item)
                elif (
                    type(item) is int
                    and not -_WIDEST < item < _WIDEST
                    or item in endless
                ):
                    return _LARGE
                elif endless and item != item:
                    return "it has NaN, which is not a number"
        if not inner:
            return None
        level = inner
    return _NESTED
