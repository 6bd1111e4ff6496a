"""`--engine`: another machine that runs a command's work, and what to ask a cluster for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import UsageError
from . import complete
from .help import engine_option
from .options import OPTIONS, excluded

if TYPE_CHECKING:
    from ..remote import engines

_As = Annotated[str | None, engine_option(help="slurm: as for sbatch.")]


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, and the options of a cluster."""

    engine: Annotated[
        str | None,
        engine_option(
            autocompletion=complete.engines,
            help="Run it elsewhere: slurm, or another of configs/engines.toml.",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        engine_option(
            help="slurm: continue a run, but none of tune or profile; other options are"
            " those of its file."
        ),
    ] = None
    tasks: Annotated[
        int | None,
        engine_option(
            min=1,
            show_default="one for each algo",
            help="slurm: spread the algos over N tasks; with fewer algos, the workloads.",
        ),
    ] = None
    partition: _As = None
    account: _As = None
    constraint: _As = None
    gres: Annotated[
        str | None,
        engine_option(show_default="a GPU", help="slurm: as for sbatch, of GPU work."),
    ] = None
    cpus_per_task: Annotated[
        int | None,
        engine_option(min=1, show_default="4", help="slurm: as for sbatch."),
    ] = None
    time: Annotated[
        int | None,
        engine_option(
            min=1, show_default="an estimate", help="slurm: minutes of a task."
        ),
    ] = None

    def resolve(self, **others: object) -> engines.Engine | None:
        """The engine; None for this machine. UsageError for options that exclude it."""
        from msgspec import structs

        from ..remote import engines, slurm, through
        from ..report import screen

        given = {name: value for name, value in vars(self).items() if value}
        table = engines.table(given.pop("engine")) if self.engine else None
        if not isinstance(table, engines.Cluster):
            for name in given:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is an option of a cluster: --engine slurm")
        if self.engine is None or table is None:
            return None

        for name, value in others.items():
            if value:
                raise excluded("--engine", f"--{name}")

        base: dict[str, Any] = {
            "name": self.engine,
            "say": screen.say,
            "options": OPTIONS.get(),
        }
        if isinstance(table, engines.Command):
            return through.Through(config=table, **base)

        given.pop("resume", None)
        table = structs.replace(table, **given)
        return slurm.Slurm(config=table, resumes=self.resume, **base)
