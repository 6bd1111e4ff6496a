"""Why a warp does not issue: the stall reasons of NVIDIA GPUs, what each means, and what to try against it.

The reasons are those of the hardware's warp scheduler: each cycle, each warp is in one of these states. Tools spell
them in their own ways (Nsight Compute's metrics and its source page, CUPTI's samples, Triton's proton); `canonical`
brings them to one. Source: Nsight Compute's Profiling Guide, "Warp Stall Reasons".
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Stall:
    """`meaning` is at most 60 characters; `advice` is what to try where this reason has most of the time."""

    label: str
    meaning: str
    advice: str = ""


SELECTED = "selected"  # not a stall: the warp issued
NOT_SELECTED = "not_selected"  # no loss: another warp issued instead

REASONS = {
    "long_scoreboard": Stall(
        "long scoreboard",
        "waits for data from global or local memory",
        "have more loads in flight: ask for all data first and use it later, wider loads, more warps or bulk copies",
    ),
    "short_scoreboard": Stall(
        "short scoreboard",
        "waits for shared memory, a shuffle or a special function",
        "shorten the chain: fewer shuffles and shared-memory steps in a row, several independent ones at once",
    ),
    "barrier": Stall(
        "barrier",
        "waits for the CTA's other warps at a barrier",
        "fewer or smaller barriers: let a warp own what it needs, smaller CTAs, even work per warp",
    ),
    "branch_resolving": Stall(
        "branch resolving",
        "waits for the target of a branch",
        "fewer jumps: unroll the loop, use predicates and selects",
    ),
    "dispatch": Stall(
        "dispatch",
        "held back by the dispatcher: a conflict of resources",
        "rare as the main reason: look at the instructions next to the hot ones",
    ),
    "drain": Stall(
        "drain",
        "finished, waits for its last stores to go out",
        "store wider and coalesced, and earlier in the kernel",
    ),
    "gmma": Stall(
        "gmma",
        "waits for a warpgroup's matrix instruction",
        "keep several matrix instructions in flight, do other work between issue and wait",
    ),
    "imc_miss": Stall(
        "constant cache miss",
        "waits for constants: kernel arguments, immediates",
        "short kernels always pay it at the start; fewer arguments, read once and early, load data before the rest",
    ),
    "lg_throttle": Stall(
        "lg throttle",
        "queue for global and local memory is full",
        "fewer and wider memory instructions (16 bytes per thread), no spills, mathematics between the loads",
    ),
    "math_pipe_throttle": Stall(
        "math pipe throttle",
        "waits for a pipe that is busy",
        "fewer instructions on the busiest pipe, or others that another pipe runs; otherwise it is used well",
    ),
    "membar": Stall(
        "memory fence",
        "waits for a memory fence",
        "fewer fences, of the smallest scope that is right",
    ),
    "mio_throttle": Stall(
        "mio throttle",
        "queue for shared memory, shuffles, special functions full",
        "fewer and wider shared-memory instructions, fewer shuffles: keep values in registers",
    ),
    "misc": Stall("misc", "none of the other reasons"),
    "no_instruction": Stall(
        "no instruction",
        "waits for its next instruction to be fetched",
        "short kernels pay it at the start; less code: unroll less, no jumps over large blocks, more warps per SM",
    ),
    NOT_SELECTED: Stall(
        "not selected",
        "was ready, another warp was taken: no loss",
        "there are warps enough: fewer of them may use caches better, and fewer instructions are faster",
    ),
    SELECTED: Stall("selected", "issued an instruction: not a stall", "fewer instructions for the same work"),
    "sleeping": Stall("sleeping", "sleeps: nanosleep, or a wait that yields", "shorter sleeps, wake by an event"),
    "tex_throttle": Stall(
        "tex throttle",
        "queue of the texture unit is full",
        "fewer texture and surface instructions, or plain loads instead",
    ),
    "wait": Stall(
        "wait",
        "fixed latency of the instruction before",
        "more independent instructions between dependent ones, or more warps",
    ),
    "warpgroup_arrive": Stall(
        "warpgroup arrive",
        "waits for the warps of its warpgroup",
        "even work for the warps of a warpgroup, fewer arrivals",
    ),
}

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
    """The reason's name in REASONS, from any tool's spelling or from a label; a new reason keeps its own."""
    bare = _AFFIXES.sub("", name.strip().lower().replace(" ", "_"))
    return _ALIASES.get(bare, bare)


def label(reason: str) -> str:
    reason = canonical(reason)
    return REASONS[reason].label if reason in REASONS else reason.replace("_", " ")


def meaning(reason: str) -> str:
    """What the reason means, in at most 60 characters; "" for one that this file does not know."""
    return REASONS[reason].meaning if (reason := canonical(reason)) in REASONS else ""


def advice(reason: str) -> str:
    """What to try where this reason holds the warps most; "" where nothing is known to help."""
    return REASONS[reason].advice if (reason := canonical(reason)) in REASONS else ""
