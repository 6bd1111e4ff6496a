"""`gdn schema`: the JSON Schema of a record file, a worker's reply or an algo.toml."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from .. import errors
from . import complete


def schema(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[record|summary|reply|algo]",
            autocompletion=complete.among("record", "summary", "reply", "algo"),
            help="A record file, --json=summary, a worker's reply, or an algo.toml.",
        ),
    ] = "record",
) -> None:
    """Print the JSON Schema of a file that gdn writes or reads.

    Examples:
      gdn schema algo
    """
    from ..catalog import registry
    from ..report import screen
    from ..schema import record_types
    from ..schema import summary as summaries
    from ..worker import messages

    forms = {
        "record": record_types.Document,
        "summary": summaries.Summary,
        "reply": messages.Reply,
        "algo": registry.AlgoFile,
    }
    if what not in forms:
        raise errors.unknown("schema", what, forms)
    screen.show_json(msgspec.json.schema(forms[what]))
