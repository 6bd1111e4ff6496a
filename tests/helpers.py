"""Shared by several test files: throw-away algos, `gdn` as a process, and kernels
against the oracle.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import msgspec
import pytest

from gdn_cli.catalog import registry
from gdn_cli.machine import inventory
from gdn_cli.schema.output import Progress

TESTS = Path(__file__).resolve().parent
OURS = TESTS.parent / "algos"
REGISTRY = registry.load()  # as it ships: read once for all test files
# PYTHONPATH of a process that imports what lies here
PATH = os.pathsep.join(p for p in (str(TESTS), os.environ.get("PYTHONPATH")) if p)

# Whatever the shell that starts the tests has set, gdn must not see: these choose
# algos, data or a look.
_NOT_INHERITED = (
    "ALGO",
    "GDN_ALGOS",
    "FIB_DATASET_PATH",
    "TRITON_INTERPRET",
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
)


PATIENCE_S = 1200.0  # only what hangs takes longer, also on a machine ten times slower

# --- algos

DECODE_ARGS = "q, k, v, state, A_log, a, dt_bias, b, scale"
# A right decode as a sibling: `from .right import run as right`, value returning.
RIGHT = (OURS / "gdn_decode" / "pt-reference" / "main.py").read_text(encoding="utf-8")


def write_algo(
    folder: Path,
    name: str,
    sources: dict[str, str | bytes] | str,
    *,
    op: str = "gdn_decode",
    drop: tuple[str, ...] = (),
    extra: str = "",
    **keys: Any,
) -> Path:
    """Write `<folder>/<op>/<name>/` and return it: algo.toml (python, value returning,
    CPU) and the sources.

    sources  file -> content; a plain text is main.py's. A source that imports `.right`
      gets that file.
    keys     go into algo.toml instead of the defaults; `drop` leaves keys out; `extra`
      is appended as it is
    """
    if isinstance(sources, str):
        sources = {"main.py": sources}
    if any(
        isinstance(text, str) and "from .right import" in text
        for text in sources.values()
    ):
        sources = {**sources, "right.py": RIGHT}
    table: dict[str, Any] = {
        "summary": "a throw-away",
        "language": "python",
        "entry_point": "main.py::run",
        "destination_passing": False,
        "devices": ["cpu"],
    } | keys
    # JSON's are TOML's too
    toml = [
        f"{key} = {json.dumps(value)}"
        for key, value in table.items()
        if key not in drop
    ]
    if "provenance" not in drop:
        toml += ["[provenance]", 'source = "a test"', 'license = "Apache-2.0"']
    here = folder / op / name
    here.mkdir(parents=True)
    (here / "algo.toml").write_text("\n".join([*toml, extra]) + "\n", encoding="utf-8")
    for file, content in sources.items():
        (here / file).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    return here


# --- gdn as a process


@dataclass(frozen=True)
class Done:
    """How a `gdn` process ended."""

    code: int
    out: str
    err: str

    @property
    def no_result(self) -> bool:
        """Whether stdout is empty, or with --json holds only the error that stderr
        tells as well.
        """
        if not self.out:
            return True
        document = self.json
        return list(document) == ["error"] and document["error"]["message"] in self.err

    @property
    def complaints(self) -> str:
        """Stderr without the lines that say how far it is: a slow machine has more of these."""
        return complaints(self.err)

    @property
    def progress(self) -> list[Progress]:
        """The lines of JSON on stderr."""
        lines = [line for line in self.err.splitlines() if line.startswith("{")]
        return [msgspec.json.decode(line, type=Progress) for line in lines]

    @property
    def json(self) -> Any:
        """Stdout as the one JSON document that it must be: nothing around it, and no
        NaN, which JSON has not.
        """
        return json.loads(self.out, parse_constant=_no_constant)


# at the end of each algo, and each 30 s; with --json of each workload; and what the machine
# does meanwhile
_PROGRESS = re.compile(
    r"gdn: .*: (done, )?[0-9]+ of [0-9]+ after [0-9]+ s\n"
    r"|gdn: BUSY: others use [0-9.]+ of [0-9]+ CPUs\n"
    r'|\{"phase":.*\}\n'
)


def complaints(err: str) -> str:
    return "".join(
        line for line in err.splitlines(keepends=True) if not _PROGRESS.fullmatch(line)
    )


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON: only Python reads it")


def environment(gpu: bool = False, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    env |= {"COLUMNS": "80"} | forked.QUIET
    if not gpu:
        # a machine with a GPU must pass the CPU tests as well
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env | more


def gdn(
    *args: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    gpu: bool = False,
):
    """Run `gdn ARGS` to its end in a clean environment."""
    words, full = [*map(str, args)], environment(gpu, **env or {})
    # Python reads these when it starts
    if any(name.startswith(("PYTHON", "LC_", "LANG")) for name in env or {}):
        how = dict(cwd=cwd, input=stdin, capture_output=True, text=True)
        command = [sys.executable, "-m", "gdn_cli", *words]
        done = subprocess.run(command, env=full, timeout=PATIENCE_S, **how)
    else:
        done = forked.run(words, full, cwd, stdin, PATIENCE_S)
    return Done(done.returncode, done.stdout, done.stderr)


def python(*args: str, env: dict[str, str] | None = None):
    """Run `python ARGS` to its end in the same environment."""
    done = subprocess.run(
        [sys.executable, *args],
        env=environment(**env or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which has not been waited for yet, counts as dead."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- kernels against the oracle


def needs(algo, mode: str = "cuda") -> None:
    """Skip the test where an algo does not run in this mode."""
    place = inventory.HERE.place(algo, mode)
    if place.mode != mode:
        pytest.skip(f"{algo.full_name}: {place.reason}")


def build(algo, mode: str, solution=None, *, specific: bool = True):
    """The kernel of an algo, or of another solution of it, built in this process as the
    worker would, with the worker's paths to the compilers. Without `specific` as a judge
    builds it. Skips where it cannot run.
    """
    from gdn_cli.catalog import pack
    from gdn_cli.run import jobs
    from gdn_cli.worker.executor import prepared

    if mode in algo.modes and mode != "interpreter":
        needs(algo, mode)
    op = REGISTRY.ops[algo.op]
    definition = pack.definition(op, REGISTRY)
    solution = solution or pack.pack(algo, op)
    specific = specific and algo.specific and mode == "cuda"
    with mock.patch.dict(os.environ, jobs.environ_of(mode)):
        return prepared.built(definition, solution, algo.setup, specific=specific)


def built(algo_name: str, mode: str):
    """(op, kernel) of an algo by its name."""
    algo = REGISTRY.find(algo_name)
    return REGISTRY.ops[algo.op], build(algo, mode)


@functools.lru_cache(maxsize=1)
def kernel(algo_name: str, mode: str = "cuda"):
    """An algo's kernel, built once for all tests of it in a row."""
    return built(algo_name, mode)[1]


def captured(call):
    """A CUDA graph of one call."""
    import torch

    # a new stream does not wait for the one that makes the inputs
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()  # the first call compiles and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def local(kernel):
    """A kernel of this process with the methods of a runner's: checks and probes are
    written against these.
    """
    from gdn_cli.worker.executor import calls

    class Local(calls.Here):
        def push(self, tensors):
            pass

        def pull(self, tensors):
            pass

        def run(self, inputs, outputs, wanted=()):
            return super().run(inputs, outputs)[0]

        def at_return(self, inputs, outputs, wanted=()):
            return super().at_return(inputs, outputs)

        def late(self, inputs, outputs, wanted=(), **how):
            return super().late(inputs, outputs, **how)[0]

        def address(self, result):
            return result.data_ptr()

    return Local(kernel)


def judge(algo_name: str, cases: list[dict], device: str = "cpu") -> list:
    """Build an algo as it ships, call it on `oracle.inputs(**case)` and compare with
    the oracle: a check.Check a case.
    """
    import oracle
    import torch

    from gdn_cli.worker.judge import check

    op, kernel = built(algo_name, device)
    verdicts = []
    for case in cases:
        inputs = oracle.inputs(op.name, **case)
        exact = getattr(oracle, op.name)(*inputs)
        exact = exact if isinstance(exact, tuple) else (exact,)
        right = [torch.from_numpy(x).to(device) for x in exact]
        there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
        how = in_place(op) if kernel.destination_passing else {}
        problem = check.Problem(op, axes_of(op, inputs), there, right, how)
        verdict = check.check(local(kernel), problem, by_element=False)
        verdicts.append(verdict)
    return verdicts


def of_each_op(of_kind: dict[str, Any]) -> dict[str, Any]:
    """Op -> the value for its kind: the first that its name begins with."""
    return {
        op: next(value for kind, value in of_kind.items() if op.startswith(kind))
        for op in REGISTRY.ops
    }


def in_place(op) -> dict[int, int]:
    """Number of an output -> that of the input which every call overwrites with it."""
    return op.overwrites if op.in_place_only else {}


def axes_of(op, inputs: list) -> dict[str, int]:
    """The variable axes that the inputs' shapes have."""
    axes = {}
    for value, spec in zip(inputs, op.inputs.values(), strict=True):
        if spec.shape:
            axes |= zip(spec.shape, value.shape, strict=True)
    return {axis: n for axis, n in axes.items() if op.axes[axis] is None}
