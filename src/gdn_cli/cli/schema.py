"""`gdn schema`: the JSON Schema of what gdn prints with --json, writes and reads."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import msgspec
import typer

from .. import errors
from . import complete


def schema(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete.completion(lambda _: forms()),
            help="A command, whose --json it is, or a name of --list.",
        ),
    ] = "record",
    list_: Annotated[
        bool, typer.Option("--list", help="List the names, and what each is.")
    ] = False,
) -> None:
    """Print the JSON Schema of what gdn prints with --json, writes or reads.

    Examples:
      gdn schema bench
      gdn schema --list
    """
    from ..report import screen

    schemas = forms()
    if list_:
        for name, form in schemas.items():
            line = (inspect.getdoc(form) or "").partition("\n")[0]
            screen.put(f"{name:14} {line}")
        return
    if what not in schemas:
        raise errors.unknown("schema", what, schemas)
    screen.show_json(msgspec.json.schema(schemas[what]))


def forms() -> dict[str, Any]:
    """Name -> its type: first what no single command has, then commands by their names."""
    from ..catalog.registry import AlgoFile
    from ..profile import differences
    from ..report import findings, history, markdown_blocks
    from ..schema import output, profile_types, record_types, summary
    from ..tune import evidence
    from ..worker import messages

    measuring = ("record", "run", "bench", "compare", "floors")
    return {
        **dict.fromkeys(measuring, record_types.Document),
        "summary": summary.Summary,
        "error": output.Failure,
        "progress": output.Progress,
        "algo": AlgoFile,
        "reply": messages.Reply,
        "new": output.Copied,
        "list": output.Algos,
        "show": output.Shown,
        "watch": output.Saved,
        "history": history.History,
        "report": findings.Report,
        "report-update": markdown_blocks.Updated,
        "profile": differences.Profiles,
        "profile-list": profile_types.ProfileList,
        "tune": evidence.Tuning,
        "pack": output.Packed,
        "build": output.Compiled,
        "data-build": output.Built,
        "data-list": output.Workloads,
        "doctor": output.Findings,
        "commands": output.Commands,
    }
