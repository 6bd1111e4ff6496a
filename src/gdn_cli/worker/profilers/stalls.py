"""Why a warp does not issue: the stall reasons of NVIDIA GPUs, what each means, and
what to try against it.

The reasons are those of the hardware's warp scheduler: each cycle, each warp is in one
of these states. Tools spell them differently (Nsight Compute's metrics and its source
page, CUPTI's samples, Triton's proton); `canonical` gives one spelling. Source: Nsight
Compute's Profiling Guide, "Warp Stall Reasons".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...parsing import read_toml


class Stall(msgspec.Struct, frozen=True):
    """The texts for a reason: see stalls.toml."""

    label: str
    meaning: str = ""  # in at most 60 characters
    advice: str = ""  # what to try if warps wait mostly for this reason


# the warp issued, or another one did instead
NO_LOSS = "selected", "not_selected"

REASONS = msgspec.convert(
    read_toml(Path(__file__).with_suffix(".toml")), dict[str, Stall]
)

_AFFIXES = re.compile(
    r"^(smsp__)?(average_|pcsamp_)?(warps_)?(issue_)?(stalled_|stall_)?|(_per_issue_active|_not_issued)?(\.ratio)?$"
)
_ALIASES = {
    "long_sb": "long_scoreboard",
    "short_sb": "short_scoreboard",
    "imc": "imc_miss",
    "lg": "lg_throttle",
    "math": "math_pipe_throttle",
    "mio": "mio_throttle",
    "tex": "tex_throttle",
    "no_inst": "no_instruction",
    "no_instructions": "no_instruction",
    "dispatch_stall": "dispatch",
    "sleep": "sleeping",
    "constant_cache_miss": "imc_miss",
    "memory_fence": "membar",
}


def canonical(name: str) -> str:
    """The reason's name in REASONS, from any tool's spelling or from a label; a new
    reason keeps its own.
    """
    bare = _AFFIXES.sub("", name.strip().lower().replace(" ", "_"))
    return _ALIASES.get(bare, bare)


def texts(reason: str) -> Stall:
    """The texts for a reason in any tool's spelling; one that stalls.toml does not have
    gets only a label.
    """
    return REASONS.get(canonical(reason)) or Stall(canonical(reason).replace("_", " "))


def main(reasons: Mapping[str, int]) -> str:
    """The label of the reason with most samples; "" if a warp issued at every sample."""
    waits = {
        reason: n for reason, n in reasons.items() if canonical(reason) not in NO_LOSS
    }
    longest = max(waits, key=lambda reason: waits[reason], default="")
    return texts(longest).label if waits.get(longest) else ""
