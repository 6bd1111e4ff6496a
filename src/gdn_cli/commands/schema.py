"""`gdn schema`: what a file of records, or a worker's reply, may hold, as JSON Schema."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import errors


def schema(
    what: Annotated[str, typer.Argument(metavar="[record|reply]", help="A file of records, or a worker's reply.")] = (
        "record"
    ),
) -> None:
    """Print the JSON Schema of what gdn writes, made from its types."""
    import msgspec

    from .. import messages, record_types, report

    forms = {"record": record_types.Document, "reply": messages.Reply}
    if what not in forms:
        raise errors.unknown("schema", what, forms)
    report.show_json(msgspec.json.schema(forms[what]))


def register(app: typer.Typer) -> None:
    app.command()(schema)
