"""The generated parts of docs/checking.md, docs/cli.md, docs/records.md and
docs/results/leaders.md: `make pages` rewrites them.

A generated part lies between `<!-- made by: make pages -->` and `<!-- end -->`; the
text around it is written by hand.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import standings
import typer
from typer.testing import CliRunner

from gdn_cli.cli import app
from gdn_cli.parsing import read_toml
from gdn_cli.schema import record_types, scores, statuses

HERE = Path(__file__).parent
ATTACKS = HERE.parent / "tests" / "attacks"
PART = re.compile(r"(?<=<!-- made by: make pages -->\n).*(?=<!-- end -->)", re.DOTALL)


# an option of `--help`, with the lines that its words run on to
OPTION = re.compile(r"^  (-[^ ].*\n)((?: {6,}.*\n)*)", re.MULTILINE)
EMPTY_PANEL = re.compile(r"^[A-Z][^\n:]*:\n(?=\n|\Z)", re.MULTILINE)


def helps(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """`--help` of a command and of its subcommands, as on a terminal of 80 columns."""
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    shown = CliRunner().invoke(
        app, [*words, "--help"], prog_name="gdn", env=environment
    )
    lines = (line.rstrip() for line in shown.stdout.strip().splitlines())
    yield words, "\n".join(lines) + "\n"
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from helps(below, *words, name)


def option(match: re.Match) -> tuple[str, str]:
    """An option as it is typed, and its explanation in one line."""
    flags, _, text = match[1].strip().partition("  ")
    return flags, " ".join(f"{text} {match[2]}".split())


def commands() -> str:
    """The page of commands: what several of them share stands once, at its top."""
    pages = list(helps(typer.main.get_command(app)))[1:]
    uses = Counter(option(each) for _, text in pages for each in OPTION.finditer(text))
    shared = {each for each, count in uses.items() if count >= 3}
    lines = []
    for flags, text in (each for each in uses if each in shared):
        lines += [f"  {flags}", textwrap.indent(textwrap.fill(text, 74), " " * 6)]
    parts = ["\n## Common options\n\n```text", *lines, "```"]
    for words, text in pages:
        common = [option(m)[0] for m in OPTION.finditer(text) if option(m) in shared]
        own = OPTION.sub(lambda m: "" if option(m) in shared else m[0], text)
        own = re.sub(r"\n{3,}", "\n\n", EMPTY_PANEL.sub("", own))
        names = ", ".join(f"`{flags.split()[0].rstrip(',')}`" for flags in common[:-1])
        heading = "#" * min(len(words) + 1, 3)
        parts.append(f"\n{heading} gdn {' '.join(words)}\n\n```text\n{own}```")
        if names:  # all but --help
            parts.append(f"\nAlso [common options](#common-options): {names}.")
    return "\n".join(parts) + "\n\n"


def comments(form: type) -> dict[str, str]:
    """Field -> the comment above it and next to it in the source."""
    lines, _ = inspect.getsourcelines(form)
    texts = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(iter(lines).__next__)
        if token.type == tokenize.COMMENT
    }
    before, result = 0, {}
    for node in ast.parse("".join(lines)).body[0].body:
        if isinstance(node, ast.AnnAssign):
            rows = range(before + 1, node.end_lineno + 1)
            result[node.target.id] = " ".join(texts[n] for n in rows if n in texts)
        before = node.end_lineno
    return result


def heading(cls: type) -> str:
    """HostLoad -> Host load."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).capitalize()


def link(cls: type) -> str:
    return f"[{heading(cls)}](#{heading(cls).lower().replace(' ', '-')})"


def words(form: Any) -> str:
    """A field's type in JSON terms, linked to the type's section if it has one."""
    inspected = msgspec.inspect

    def inner(form: Any) -> str:
        return f"({words(form)})" if " or " in words(form) else words(form)

    match form:
        case inspected.StructType(cls=cls) | inspected.EnumType(cls=cls):
            return link(cls)
        case inspected.UnionType(types=types):
            return " or ".join(words(each) for each in types)
        case (
            inspected.ListType(item_type=item) | inspected.VarTupleType(item_type=item)
        ):
            return f"list of {inner(item)}"
        case inspected.TupleType(item_types=items):
            return f"[{', '.join(map(words, items))}]"
        case inspected.DictType(value_type=value):
            return f"object of {inner(value)}"
        case inspected.Metadata(type=bounded):
            return words(bounded)
    names = {
        "StrType": "text",
        "IntType": "whole number",
        "FloatType": "number",
        "BoolType": "true or false",
    }
    names |= {"NoneType": "null", "AnyType": "anything"}
    return names[type(form).__name__]


def structs(form: Any, found: dict[type, Any]) -> dict[type, Any]:
    """Every Struct and Enum that a type is made of -> msgspec's description of it,
    outermost first.
    """
    if hasattr(form, "cls"):
        if form.cls in found:
            return found
        found[form.cls] = form
    for name in ("types", "item_types"):
        for below in getattr(form, name, ()):
            structs(below, found)
    for name in ("item_type", "value_type", "type"):
        if below := getattr(form, name, None):
            structs(below, found)
    for field in getattr(form, "fields", ()):
        structs(field.type, found)
    return found


def section(cls: type, form: Any, known: dict[type, Any]) -> str:
    """One type: its docstring, and a row for each field that no other section has."""
    head = f"### {heading(cls)}\n\n{inspect.getdoc(cls)}\n"
    if issubclass(cls, statuses.Status):
        rows = [f"| `{status.value}` | {status.blame.value} |" for status in cls]
        return "\n".join([head, "| status | whose fault |", "|---|---|", *rows]) + "\n"
    said = {}
    for base in reversed(cls.__mro__):
        if base.__module__ in (record_types.__name__, scores.__name__):
            said |= comments(base)
    above = [base for base in cls.__mro__[1:] if base in known]
    there = {field.name for base in above for field in known[base].fields}
    head += "".join(
        f"\nIt has the fields of {link(base)}, and these:\n" for base in above
    )
    rows = [
        f"| `{field.encode_name}` | {words(field.type)} |"
        f" {re.sub(r'None', 'null', said[field.name])} |"
        for field in form.fields
        if field.name not in there
    ]
    return (
        "\n".join([head, "| field | type | what it says |", "|---|---|---|", *rows])
        + "\n"
    )


def attacks() -> str:
    """The attacks of tests/attacks/, each with what stops it."""
    rows = []
    for file in sorted(ATTACKS.glob("*/attack.toml")):
        attack = read_toml(file)
        rows.append(f"| `{file.parent.name}` | {attack['does']} | {attack['by']} |")
    return "\n".join(
        [
            "",
            "| attack | what it does | what stops it |",
            "|---|---|---|",
            *rows,
            "",
            "",
        ]
    )


@functools.cache
def parts() -> dict[str, str]:
    """Page -> its generated part."""
    document, record = map(
        msgspec.inspect.type_info, (record_types.Document, record_types.Record)
    )
    found = (
        {record_types.Document: document} | structs(record, {}) | structs(document, {})
    )
    return {
        "checking.md": attacks(),
        "cli.md": commands(),
        "results/leaders.md": standings.page(),
        "records.md": (
            "\n## The fields\n\n"
            + "\n".join(section(*each, found) for each in found.items())
            + "\n"
        ),
    }


def page(name: str, part: str) -> str:
    """The page with its generated part replaced."""
    text = (HERE / name).read_text(encoding="utf-8")
    return PART.sub(lambda _: part, text)


if __name__ == "__main__":
    for name, part in parts().items():
        (HERE / name).write_text(page(name, part), encoding="utf-8")
