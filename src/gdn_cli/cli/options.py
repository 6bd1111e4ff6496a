"""Options shared by several commands, in groups (dataclasses), with checks that involve
several options.

A command takes a group as one parameter, and `@grouped` makes options of its fields:

    @grouped
    def run(algos: Algos, which: Selection, output: Output) -> None: ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from ..errors import UsageError, unknown
from . import complete
from .help import (
    algos_option,
    judge_option,
    results_option,
    running_option,
    timing_option,
    workloads_option,
)

if TYPE_CHECKING:
    from ..catalog.official import Harness
    from ..catalog.registry import Registry
    from ..machine.inventory import Machine
    from ..run.planning import Selected
    from ..schema.record_types import Rented, Submitted
    from ..worker.request import Options as WorkerOptions
    from ..worker.request import PlanFields

G = TypeVar("G")
R = TypeVar("R")
MACHINE: ContextVar[Machine | None] = ContextVar("MACHINE", default=None)
# the options of the command that runs, by name
OPTIONS: ContextVar[dict[str, Any]] = ContextVar("OPTIONS")
# what --resume does not take from its file
_WITH_RESUME = "json", "summary", "verbose", "max_minutes", "detach"


def argument(metavar: str, known: Callable[..., Any], help: str) -> Any:
    """An argument of names, which the shell completes from those that are `known`."""
    return typer.Argument(metavar=metavar, autocompletion=known, help=help)


AsJson = Annotated[
    bool,
    results_option(
        "--json", help="Print one JSON document on stdout, and nothing else."
    ),
]
OpName = Annotated[
    str | None,
    algos_option(autocompletion=complete.ops, help="The op, such as gdn_prefill."),
]
Heads = Annotated[
    str | None,
    algos_option(
        metavar="QK/V",
        help="Query/key and value heads, such as 16/32. Default: the op's own.",
    ),
]
OwnAlgos = Annotated[
    str | None,
    algos_option(envvar="GDN_ALGOS", help="Your own folder of <op>/<algo>/algo.toml."),
]
Solutions = Annotated[
    list[str] | None,
    argument(
        "[ALGO|SOLUTION.json]...",
        complete.algos,
        "Algos by name, as with --algo, or by folder, or packed solutions.",
    ),
]
OneAlgo = Annotated[
    str | None,
    argument(
        "[ALGO]",
        complete.algos,
        "The algo by name, as with --algo, or by folder.",
    ),
]
Gpus = Annotated[
    str | None,
    running_option(
        metavar="N[,N...]",
        help=(
            "Spread the algos over these GPUs, or `all`; with fewer algos than GPUs, the"
            " workloads. Ratios are taken on one GPU, and a size is tuned on one."
        ),
    ),
]
OneWorkload = Annotated[
    str | None,
    workloads_option(
        "--workload",
        "-w",
        help="An index, a uuid prefix, or axes (batch_size=64, B=64).",
    ),
]
Dataset = Annotated[
    Path | None,
    workloads_option(envvar="FIB_DATASET_PATH", help="A FlashInfer-Trace folder."),
]
Tier = Annotated[
    str | None,
    timing_option(
        metavar="TIER[,TIER...]",
        autocompletion=complete.tiers,
        help="cupti, events, graph, nvbench, fib (GPU), wall (CPU), or `all`.",
    ),
]


Timeout = Annotated[
    float, running_option(min=1.0, help="The most seconds that one algo may take.")
]
Strict = Annotated[
    bool,
    running_option(
        "--strict", help="Probe for cheats and faults on every workload; no fallback."
    ),
]
First = Annotated[
    int | None,
    workloads_option("-n", min=1, help="The first N workloads of the selection."),
]
PresetName = Annotated[
    str | None,
    workloads_option(
        autocompletion=complete.presets,
        help="One of configs/presets.toml: quick, contest, sweep, peers.",
    ),
]
Emulate = Annotated[
    bool,
    running_option(
        "--emulate",
        help="Run CUDA algos on the CPU, thread by thread, and look for races.",
    ),
]
InPlace = Annotated[
    bool,
    running_option(
        "--in-place",
        help="Outputs overwrite inputs where the op allows it: decode's state.",
    ),
]
BatchInvariant = Annotated[
    bool,
    running_option(
        "--batch-invariant",
        help="Builds that give a sequence the same bits in any batch: NAME@invariant.",
    ),
]
L2 = Annotated[
    str,
    timing_option(
        metavar="cold|warm",
        autocompletion=complete.choices("cold", "warm"),
        help="State of the GPU's L2 cache before each call.",
    ),
]
Seconds = Annotated[
    float | None,
    timing_option(
        min=0.01,
        show_default="the preset's",
        help="The most seconds of sampling for a measurement.",
    ),
]


@dataclass(frozen=True)
class Algos:
    """Which algos, and the folder to look in."""

    algo: Annotated[
        str | None,
        algos_option(
            envvar="ALGO",
            metavar="NAME[,NAME...]",
            autocompletion=complete.algos,
            help="Algos by name, or `all` of --op (default: of decode).",
        ),
    ] = None
    op: OpName = None
    heads: Heads = None
    algos: OwnAlgos = None

    def known(self) -> Registry:
        from ..catalog import registry

        return registry.load(self.algos, self.heads)

    def also(self, given: list[str] | None) -> tuple[Algos, list[Path]]:
        """These with the algos named as arguments (which replace those in the variable
        ALGO), and the packed files.
        """
        files = [Path(name) for name in given or [] if name.endswith(".json")]
        named = [name for name in given or [] if not name.endswith(".json")]
        if not named:
            return self, files
        if self.algo and self.algo != os.environ.get("ALGO"):
            named.append(self.algo)
        return dataclasses.replace(self, algo=",".join(named)), files

    def one(self, command: str, given: str | None = None) -> str:
        """The name of the algo, for a command that takes one: the argument `given`, else
        --algo. UsageError otherwise.
        """
        algos, files = self.also([given] if given else None)
        name = str(files[0]) if files else algos.algo
        if files or not name or "," in name or name == "all":
            raise UsageError(
                f"{command} takes one algo, not '{name or ''}'",
                hint=f"gdn {command} NAME; `gdn list` shows all",
            )
        return name


@dataclass(frozen=True)
class Workloads:
    """Which of gdn's own workloads."""

    workload: Annotated[
        list[str] | None,
        workloads_option(
            "--workload",
            "-w",
            help=(
                "An index, a range (0-9), a uuid prefix, or axes (batch_size=64, B=64)."
                " Repeatable."
            ),
        ),
    ] = None
    n: First = None
    preset: PresetName = None

    def selected(self) -> Selected:
        """These, and no more for an option that the command does not have."""
        from ..run.planning import Selected

        return pick(Selected, vars(self))


@dataclass(frozen=True)
class Selection(Workloads):
    """Which workloads, from gdn or from a folder."""

    dataset: Dataset = None


@dataclass(frozen=True)
class HardInputs(Selection):
    """Workload options, with `--stress` for the op's hard inputs."""

    stress: Annotated[
        bool,
        workloads_option(
            "--stress",
            help="The op's hard inputs in place of workloads; --workload chooses some.",
        ),
    ] = False


@dataclass(frozen=True)
class Sampling:
    """How to time."""

    tier: Tier = None
    l2: L2 = "cold"
    target: Annotated[
        float | None,
        timing_option(
            min=0.0001,
            max=0.9999,
            show_default="0.01, of ratios 0.005",
            help="Sample until medians and ratios are known this precisely.",
        ),
    ] = None
    seconds: Seconds = None

    def checked(self) -> tuple[tuple[str, ...], PlanFields]:
        """The tiers asked for, and the overrides of a preset's settings. Raises
        UsageError for invalid values.
        """
        from ..catalog.tiers import TIERS

        check_choice("l2 state", self.l2, ("cold", "warm"))
        check_finite("--seconds", self.seconds)

        tiers = listed(self.tier)
        for name in tiers:
            check_choice("tier", name, [*TIERS, "all"])
        overrides: PlanFields = {"l2": self.l2, **self.bounds}
        # exact counts of a preset do not apply then
        if self.bounds:
            overrides["iterations"] = None
        return tiers, overrides

    @property
    def bounds(self) -> PlanFields:
        """Those of --seconds and --target that were given."""
        bounds: PlanFields = {}
        if self.seconds:
            bounds["seconds"] = self.seconds
        if self.target:
            bounds["target"] = self.target
        return bounds


@dataclass(frozen=True)
class Place:
    """Where algos run, and their time limit."""

    device: Annotated[
        str,
        running_option(
            metavar="auto|cuda|cpu",
            autocompletion=complete.choices("auto", "cuda", "cpu"),
            help="auto: cuda, else cpu.",
        ),
    ] = "auto"
    timeout: Timeout = 300.0

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cuda", "cpu"))
        check_finite("--timeout", self.timeout)

    def devices(self, gpus: str | None) -> tuple[tuple[Any, ...], str]:
        """The GPUs of --gpus (() without it), and the device, which is cuda with it."""
        if gpus is None:
            return (), self.device
        if self.device == "cpu":
            raise excluded("--gpus", "--device cpu")
        return machine().chosen(gpus), "cuda"


@dataclass(frozen=True)
class Calls:
    """How the algos are called and checked: fields of request.Options."""

    in_place: InPlace = False
    batch_invariant: BatchInvariant = False


@dataclass(frozen=True)
class Faults(Calls):
    """How they are called where nothing is timed: with a sanitizer, too."""

    sanitize: Annotated[
        str | None,
        running_option(
            metavar="thread|address",
            help="Build C++ algos with this sanitizer: races, or wrong addresses.",
        ),
    ] = None

    def __post_init__(self) -> None:
        from ..machine import sanitizers

        if self.sanitize is not None:
            check_choice("sanitizer", self.sanitize, sanitizers.NAMES)


@dataclass(frozen=True)
class Trust:
    """How much the algos are trusted."""

    strict: Strict = False
    sandbox: Annotated[
        bool,
        running_option(
            "--sandbox",
            help=(
                "Run the algos' code in bubblewrap: no network, no home, read-only except its own"
                " folder."
            ),
        ),
    ] = False

    def tell(self, solutions: Sequence[Path]) -> None:
        """Warn that packed files run with the user's rights. Raises MissingError if
        --sandbox finds no bubblewrap.
        """
        from ..machine import sandbox as bubblewrap
        from ..report import screen

        if self.sandbox:
            bubblewrap.find()
        elif solutions:
            screen.say(
                "the packed code runs with your rights on this machine; --sandbox takes"
                " away its network, your home and your files"
            )


@dataclass(frozen=True)
class Judge:
    """The contest's own harness, to judge as well."""

    official: Annotated[
        bool,
        judge_option(
            "--official",
            help="flashinfer-bench itself judges too, beside gdn's own times; on a GPU.",
        ),
    ] = False
    harness: Annotated[
        str | None,
        judge_option(
            show_default="main",
            autocompletion=complete.choices("0.1.2", "main"),
            help="Which flashinfer-bench: 0.1.2, main.",
        ),
    ] = None
    isolated: Annotated[
        bool,
        judge_option(
            "--isolated",
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
                raise UsageError("--harness and --isolated are options of --official")
            return None
        for name, given in others.items():
            if given:
                raise excluded("--official", f"--{name.replace('_', '-')}")
        return official.harness(self.harness, self.isolated)


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json: AsJson = False
    summary: Annotated[
        bool,
        results_option(
            "--summary", help="With --json: only a line for each algo and size."
        ),
    ] = False
    verbose: Annotated[
        bool,
        results_option(
            "--verbose",
            help="A line for each cause of doubt, and the machine's limits.",
        ),
    ] = False
    out: Annotated[Path | None, results_option(help="Write the records to FILE.")] = (
        None
    )


def for_workers(dataset: Path | None, trust: Trust, calls: Calls) -> WorkerOptions:
    """What every worker of a command is asked for."""
    from ..worker.request import Options

    return Options(
        dataset=str(dataset.absolute()) if dataset else None,
        strict=trust.strict,
        sandbox=trust.sandbox,
        **dataclasses.asdict(calls),
    )


def recorded(
    which: Selected, sampling: Sampling, preset: str | None, **more: Any
) -> dict[str, Any]:
    """The options as a file of records has them: of `more`, those that were given."""
    return {
        "workload": which.workload,
        "n": which.n,
        "preset": preset,
        "dataset": bool(which.dataset),
        "tier": sampling.tier,
        "l2": sampling.l2,
    } | {name: value for name, value in more.items() if value}


def machine() -> Machine:
    """The machine that the command uses: this one, if main() was not given another."""
    from ..machine import inventory

    return MACHINE.get() or inventory.HERE


def check_choice(kind: str, value: str, known: Any) -> None:
    if value not in known:
        raise unknown(kind, value, known)


def check_finite(option: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{option} {value}: expected a number of seconds")


def excluded(one: str, other: str) -> UsageError:
    return UsageError(f"{one} and {other} exclude each other", hint="drop one of them")


def listed(text: str | None) -> tuple[str, ...]:
    """The names in "a, b,c"."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


# --- groups


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """The command for typer: each parameter that is a dataclass becomes an option per field."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    members: set[str] = set()
    # not get_type_hints: up to Python 3.10 it wraps an option whose default is None in another
    # Optional, and typer does not look for the option inside
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if not dataclasses.is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = kind
        types = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            members.add(field.name)
            option = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            parameters.append(option)

    @functools.wraps(command)
    def wrapper(**given: Any) -> R:
        if given.get("resume"):
            given = _resumed(command.__name__, given, parameters)
        OPTIONS.set(given)
        others = {name: given[name] for name in given if name not in members}
        arguments = {name: pick(kind, given) for name, kind in groups.items()}
        return command(**arguments, **others)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _resumed(
    command: str, given: dict[str, Any], parameters: list[inspect.Parameter]
) -> dict[str, Any]:
    """The options of the run to resume, in its working directory. UsageError if its
    file is none, or for an option that was given and is not as in it.
    """
    from ..records import store

    file = given["resume"].absolute()
    document = store.load(file)
    run: Submitted | Rented | None = document.slurm
    known, kind = document.command, "on a cluster"
    if "tasks" not in given:
        run = document.modal
        known, kind = f"modal {run.command if run else ''}", "of `gdn modal`"
    if run is None:
        hint = "the command that left one printed its file"
        raise UsageError(f"{file} is not a run {kind}", hint=hint)
    if known.split()[-1] != command:
        hint = f"gdn {known} --resume {file}"
        raise UsageError(f"{file} is a run of gdn {known}", hint=hint)
    options = {name: given[name] for name in _WITH_RESUME if name in given}
    options["resume"] = file
    if given["out"]:
        options["out"] = given["out"].absolute()
    elif command != "profile":
        options["out"] = file
    for parameter in parameters:
        name, value = parameter.name, given[parameter.name]
        if name in options:
            continue
        saved = run.asked.get(name, parameter.default)
        options[name] = _converted(saved, parameter.annotation, file)
        (info, *_) = parameter.annotation.__metadata__
        from_environment = os.environ.get(info.envvar or "")
        if value not in (parameter.default, options[name], from_environment):
            option = f"--{name.replace('_', '-')}"
            hint = "drop it, or drop --resume to start over"
            raise UsageError(f"--resume takes {option} from {file}", hint=hint)
    with contextlib.suppress(OSError):
        os.chdir(run.cwd)
    return options


def _converted(value: Any, kind: Any, file: Path) -> Any:
    import msgspec

    try:
        return msgspec.convert(value, kind, dec_hook=lambda kind, text: kind(text))
    except msgspec.ValidationError as e:
        hint = "drop --resume to start over"
        raise UsageError(f"{file}: $.asked: {e}", hint=hint) from None


def pick(group: type[G], values: Mapping[str, Any]) -> G:
    """Make a group from the values with its fields' names."""
    names = [field.name for field in dataclasses.fields(group)]  # type: ignore[arg-type]
    return group(**{name: values[name] for name in names if name in values})
