"""The options of `gdn run --official`, here and at Modal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ..errors import UsageError
from .help import Panel

if TYPE_CHECKING:
    from ..catalog.official import Harness


@dataclass(frozen=True)
class Judge:
    """The contest's own harness, to judge as well."""

    official: Annotated[
        bool,
        typer.Option(
            "--official",
            rich_help_panel=Panel.JUDGE,
            help="flashinfer-bench itself judges too, beside gdn's own times; on a GPU.",
        ),
    ] = False
    harness: Annotated[
        Optional[str],
        typer.Option(
            "--harness",
            rich_help_panel=Panel.JUDGE,
            metavar="NAME",
            show_default="main",
            help="Which flashinfer-bench: 0.1.2, main.",
        ),
    ] = None
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            rich_help_panel=Panel.JUDGE,
            help="Its isolated runner: a process for each solution and workload.",
        ),
    ] = False

    def harness_for(self, **others: bool) -> Harness | None:
        """The harness to judge with; None without --official. UsageError for options
        that it excludes.
        """
        from ..catalog import official

        if not self.official:
            if self.harness or self.isolated:
                raise UsageError(
                    f"{'--harness' if self.harness else '--isolated'} is an option of --official"
                )
            return None
        for name, given in others.items():
            if given:
                option = name.replace("_", "-")
                raise UsageError(
                    f"--official and --{option} exclude each other",
                    hint="drop one of them",
                )
        return official.harness(self.harness, self.isolated)
