"""The attacks of tests/attacks/: algos that are wrong, or not what they look like, and
what must stop each.

A folder has main.py, beside which tools.py is put, or what `sources` makes, and
attack.toml:

    does      what it does, in a line
    by        what stops it: "probe NAME", or other words
    stopped   the status, or the statuses, that it must end with (default: wrong)
    says      a part of the reason that a user is shown
    doubts    parts of doubts that its time must have
    command   the command that is tried: bench (default), run or compare
    workloads words for `-w` (default: 0)
    checked   false: not to be called on outputs without guards, or not passed by the
      check every time

and keys of algo.toml: destination_passing, language, entry_point, devices.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from helpers import DECODE_ARGS, OURS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# of probe late-work on a GPU
EARLY = "was computed before its inputs were there: the work does not wait for the current stream"
LATE = "was not complete for what follows on the current stream"

ATTACKS = Path(__file__).parent / "attacks"

_TOP = """\
import ctypes, queue, threading
import torch
from .right import run as right

calls, kept = [], {}

def content(*tensors):
    return b"".join(x.cpu().float().numpy().tobytes() for x in tensors)

def fill(output, new_state, results):
    output.copy_(results[0])
    new_state.copy_(results[1])

"""


@dataclass(frozen=True)
class Cheat:
    """An algo, what must stop it, and a part of the reason."""

    by: str
    says: str
    sources: dict[str, str] | str
    does: str = ""
    stopped: tuple[str, ...] = ("wrong",)
    doubts: tuple[str, ...] = ()
    command: str = "bench"
    workloads: tuple[str, ...] = ("0",)
    checked: bool = True
    destination_passing: bool = False
    language: str = "python"
    entry_point: str = "main.py::run"
    devices: tuple[str, ...] = ("cpu",)

    @property
    def probe(self) -> str | None:
        """The probe that must catch it, if it is one of those that call a kernel."""
        name = self.by.removeprefix("probe ")
        return name if name not in (self.by, "timer") else None

    def keys(self) -> dict:
        """For helpers.write_algo."""
        names = ("sources", "destination_passing", "language", "entry_point")
        return {name: getattr(self, name) for name in names}


def source(body: str, outputs: bool = False, top: str = "") -> str:
    """main.py with this body as `run`, which gets the outputs where asked for; CALL
    stands for the right results.
    """
    body = textwrap.indent(
        textwrap.dedent(body).replace("CALL", f"right({DECODE_ARGS})"), "    "
    )
    return (
        f"{_TOP}{textwrap.dedent(top)}\n\ndef"
        f" run({DECODE_ARGS}{', output, new_state' if outputs else ''}):\n{body}"
    )


def returns(probe: str, says: str, body: str, top: str = "", **more) -> Cheat:
    """A value-returning one."""
    return Cheat(f"probe {probe}", says, source(body, top=top), **more)


def _too_many_rows() -> dict[str, str]:
    """cpp-v1 with a row of zeros after the last one of the state."""
    folder = OURS / "gdn_decode" / "cpp-v1"
    shared = (
        *(OURS / "_cuda" / "cpu").glob("*.h"),
        OURS / "_cuda" / "ffi" / "tensor.cuh",
    )
    sources = {
        path.name: path.read_text(encoding="utf-8")
        for path in (*folder.glob("*.[ch]*"), *shared)
    }
    end = "  pool.run(rows / j.chunk_rows, run_chunk, &j);\n"
    more = "  for (int c = 0; c < K; ++c) j.new_state[rows * K + c] = 0.f;\n"
    assert end in sources["kernel.cpp"]
    return sources | {"kernel.cpp": sources["kernel.cpp"].replace(end, end + more)}


def _read(folder: Path) -> Cheat:
    keys = tomllib.loads((folder / "attack.toml").read_text(encoding="utf-8"))
    stopped = keys.pop("stopped", "wrong")
    keys["stopped"] = (stopped,) if isinstance(stopped, str) else tuple(stopped)
    for name in ("doubts", "devices", "workloads"):
        if name in keys:
            keys[name] = tuple(keys[name])
    main = folder / "main.py"
    files = (main, ATTACKS / "tools.py") if main.exists() else ()
    sources = {path.name: path.read_text(encoding="utf-8") for path in files}
    sources = sources or _too_many_rows()
    return Cheat(sources=sources, says=keys.pop("says", ""), **keys)


ALL = {
    folder.parent.name: _read(folder.parent)
    for folder in sorted(ATTACKS.glob("*/attack.toml"))
}
CHEATS = {
    name: cheat for name, cheat in ALL.items() if cheat.probe and "cpu" in cheat.devices
}
CHEATS.pop("races-in-every-seventh-call")  # needs more calls: `gdn run` makes them

_ON_BOTH = (
    "updates-the-state-in-place-once-it-is-timed", "has-one-set-of-results", "remembers-addresses-and-versions",
    "goes-by-every-eighth-element", "computes-where-it-is-looked-at", "races", "leaves-it-to-a-thread",
    "remembers-contents-and-copies",
)  # fmt: skip
GPU_CHEATS = {
    name.removeprefix("gpu-"): cheat
    for name, cheat in ALL.items()
    if name.startswith("gpu-")
}
GPU_CHEATS |= {name: CHEATS[name] for name in _ON_BOTH}
