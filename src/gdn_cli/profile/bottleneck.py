"""What limits a kernel: a verdict in words, from a survey (times and floors) and, if
there are any, counters.

    launch       the time goes into starting kernels, not into running them
    bandwidth    bytes move about as fast as this machine can move them
    traffic      they do by the counters, but it moves many times the bytes that it must
    instruction  the SMs issue about as much as they can, or one pipe does
    latency      none of these is near its limit: warps wait, and too few others have work
    unclear      the figures do not decide it, and the verdict says so

The limits come from the same run where it measured them: the rate of a large copy
rather than a data sheet's, and the time of a plain copy of the same bytes, which is
latency-bound itself if it runs far below that rate. Based on the roofline model
(Williams et al., CACM 2009) and the limiter analysis of Nsight Compute's guide ("over
60 % of a peak").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from msgspec import UnsetType

from .. import units
from ..schema.profile_types import Found, Survey, Verdict
from ..worker.profilers import stalls

T = TypeVar("T")

# of a peak: from here on it limits the kernel
HIGH = 0.6
# of a peak: below this it does not; in between there is no verdict
LOW = 0.5
# a copy's time over the kernel's: too little is left for another limit to matter
_AT_FLOOR = 0.8
# a copy this much slower than the algo was disturbed by something else
_FLOOR_OFF = 1.25
# of the large copy's rate
_CACHED = 1.1
# a copy's time over the kernel's: below this it is not limited by the bytes that must move
_FAR = 1 / 3
# a kernel shorter than this many empty launches is mostly start and end
_LAUNCHES = 3.0
# share of a call's span without any kernel
_IDLE = 0.4
# launches a call
_MANY = 4


def known(value: T | UnsetType | None) -> T | None:
    """A field of a survey; None if it was not measured."""
    return None if isinstance(value, UnsetType) else value


class _Case:
    """The figures that decide; None if not measured. Shares are of 1."""

    def __init__(
        self, survey: Survey, time_us: float, findings: Iterable[Found]
    ) -> None:
        findings = list(findings)
        kernels = [f for f in findings if f.name and f.number("time_us")]
        main = max(kernels, key=lambda f: f.number("time_us") or 0.0, default=Found(""))
        ran = known(survey.ran) or []

        def share(key: str) -> float | None:
            value = main.number(key)
            return None if value is None else value / 100

        self.time_us = time_us
        # first start to last end, with the host running ahead as in gdn bench
        self.span_us = known(survey.span_us)
        self.launches = known(survey.launches) or len(ran) or 1
        self.empty_us = known(survey.empty_us)
        self.copy_us = known(survey.copy_us)
        self.large_rate = known(survey.large_rate)
        moved = known(survey.bytes_moved) or 0
        self.on_gpu = survey.tier != "wall"
        # GB/s by the counters
        self.traffic = main.number("dram_rate")
        self.l2_peak = share("l2_peak") or 0.0
        pipe = next((f"{f.note} pipe" for f in main.facts if f.key == "pipe"), "")
        # the busiest of the issue slots and the pipes, and its name
        self.work, self.worker = max(
            (share("issue") or 0.0, "issue slots"), (share("pipe") or 0.0, pipe)
        )
        self.waves = main.number("waves")
        self.occupancy = share("occupancy")
        # the reasons that hold the warps most
        waits = main.table("stalls")
        self.stalls = [str(row[0]) for row in waits.rows[:2]] if waits else []
        tables = [finding.table("hot") for finding in findings]
        rows = [table.rows[0] for table in tables if table]
        # the first hot line: where, its share in percent, ..., its text
        self.hot = rows[0] if rows else None
        self.counters = main.value("issue") is not None
        # what a call runs -> its microseconds
        self.parts = defaultdict[str, float](float)
        for part in ran:
            self.parts[part.name] += part.us
        # GB/s of the bytes that must move
        self.useful = moved / time_us / 1e3
        # the copy's time over the call's; 0 if not known
        self.at_floor = (self.copy_us or 0.0) / time_us
        # the small copy's rate as a share of a large one's
        self.floor_rate = None
        if self.copy_us and self.large_rate:
            self.floor_rate = moved / self.copy_us / 1e3 / self.large_rate
        # the share of this machine's copy rate; if that is not known, of DRAM's peak
        self.bandwidth = share("dram_peak") or 0.0
        self.against = "DRAM's peak"
        self.cached = False
        if self.large_rate:
            self.against = f"the large copy's {self.large_rate:.0f} GB/s"
            fastest = max(self.useful, self.traffic or 0.0)
            self.bandwidth = fastest / self.large_rate
            # if the kernel or the copy moves them faster than a large copy does, they
            # come from a cache, and the only measure is the copy of the same bytes,
            # which finds them there too
            rates = self.useful / self.large_rate, self.floor_rate or 0.0
            self.cached = max(rates) > _CACHED
        if self.cached:
            self.bandwidth = self.at_floor
            self.against = "a copy's rate in the same cache"


def judge(survey: Survey | None, findings: Iterable[Found]) -> Verdict | None:
    """The verdict on a call; None if not even its time is known.

    survey    measurements of the plain run
    findings  a tool's, for each kernel; the one that takes the most time represents the call
    """
    time_us = known(survey.time_us) if survey else None
    if not survey or not time_us:
        return None
    case = _Case(survey, time_us, findings)
    for rule in (_disturbed, _launch, _bandwidth, _instruction, _latency):
        if verdict := rule(case):
            return _with_parts(case, verdict)
    return _with_parts(case, _unclear(case))


def _with_parts(c: _Case, verdict: Verdict) -> Verdict:
    """Add what a call of several kernels and copies consists of, and that copies are
    not part of the op.
    """
    if len(c.parts) < 2:
        return verdict
    total = sum(c.parts.values())
    copied = sum(
        us for name, us in c.parts.items() if name.startswith(("Memcpy", "Memset"))
    )
    why = f"the figures are for the longest of {len(c.parts)} different ones that a call runs"
    advice = []
    if copied > 0.1 * total:
        advice.append(
            f"no copy next to the kernel: {_pc(copied / total)} of the time (read the input,"
            " write the output)"
        )
    return Verdict(
        verdict.bound,
        verdict.summary,
        [*verdict.why, why],
        [*advice, *verdict.next],
    )


# --- the rules, in the order in which they apply


def _disturbed(c: _Case) -> Verdict | None:
    if c.at_floor < _FLOOR_OFF:
        return None
    return Verdict(
        "unclear",
        "unclear: the floor of this run cannot be right",
        [*_copy(c), "no copy is so much slower, unless something else ran meanwhile"],
        ["measure again, alone"],
    )


def _launch(c: _Case) -> Verdict | None:
    mean = c.time_us / c.launches
    why = []
    # a few launches can be queued ahead, or put into a graph: a gap between two of them
    # need not be the limit
    idle = 1 - c.time_us / c.span_us if c.launches >= _MANY and c.span_us else 0.0
    if c.span_us and idle >= _IDLE:
        why.append(
            f"of {units.duration(c.span_us)} from the first start to the last end, nothing runs"
            f" in {_pc(idle)}"
        )
    if c.empty_us and mean < _LAUNCHES * c.empty_us:
        why.append(
            f"a launch takes {units.duration(mean)}, {mean / c.empty_us:.1f} times an empty one"
            f" ({units.duration(c.empty_us)})"
        )
    if not why:
        return None
    advice = [
        "nothing inside the kernel: do more work per launch, or let launches overlap"
        " (programmatic launch)"
    ]
    if c.launches > 1:
        advice = [
            "one kernel instead of several: what one writes and the next reads can stay in"
            " registers",
            "a CUDA graph",
        ]
    summary = "launch-bound: the time goes into starting kernels, not into running them"
    return Verdict("launch", summary, why, advice)


def _bandwidth(c: _Case) -> Verdict | None:
    near_copy = (c.floor_rate or 0.0) >= HIGH or c.cached
    at_floor = c.at_floor >= _AT_FLOOR and near_copy
    in_l2 = c.l2_peak >= 0.8 and not at_floor and c.bandwidth < HIGH
    full = c.bandwidth >= HIGH and (at_floor or c.bandwidth >= c.work)
    if not in_l2 and not full:
        return None
    fast = "bytes move about as fast as this machine moves any"
    why = f"{c.useful:.0f} GB/s of bytes that must move"
    if c.traffic:
        why += f", {c.traffic:.0f} GB/s in DRAM by the counters"
    why += f": {_pc(c.bandwidth)} of {c.against}"
    if in_l2:
        fast = "L2 moves about as fast as it can"
        below = f"DRAM far below its own ({_pc(c.bandwidth)})"
        why = f"L2 at {_pc(c.l2_peak)} of its peak, {below}"
    reasons = [why, *_copy(c)]
    # the counters say so, and what must move is that much slower than a copy
    far = 0 < c.at_floor < _FAR
    advice = [_fewer_or_faster(c, at_floor, in_l2, far)]
    if far:
        summary = f"traffic-bound: {fast}, many more than the op must move"
        return Verdict("traffic", summary, reasons, advice)
    return Verdict("bandwidth", f"bandwidth-bound: {fast}", reasons, advice)


def _fewer_or_faster(c: _Case, at_floor: bool, in_l2: bool, far: bool) -> str:
    if at_floor:
        left = _pc(max(0.0, 1 - c.at_floor))
        fewer = "only fewer bytes help (a 16-bit state, fusing)"
        return f"{left} is left to a plain copy; beyond that {fewer}"
    if in_l2:
        return "fewer sectors: wider and aligned accesses, reuse in registers or shared memory"
    if far:
        return "fewer bytes: keep what is read again in registers or shared memory"
    how = "wider loads, several per thread before the first use, bulk copies"
    return f"more bytes in flight: {how}"


def _instruction(c: _Case) -> Verdict | None:
    if c.work < HIGH or (c.bandwidth >= HIGH and c.bandwidth >= c.work):
        return None
    return Verdict(
        "instruction",
        f"instruction-bound: the limit is the {c.worker}",
        [_busy(c), *_copy(c)],
        [
            "fewer instructions for the same work: wider loads, packed math, addresses computed"
            " once; --tool sass shows the mix"
        ],
    )


def _latency(c: _Case) -> Verdict | None:
    if not c.counters or c.bandwidth >= LOW or c.work >= LOW:
        return None
    why = [f"nothing is near its limit: {_busy(c)}"]
    if c.occupancy is not None:
        grid = f", {c.waves:.2f} waves of CTAs" if c.waves is not None else ""
        why.append(
            f"{_pc(c.occupancy)} of the warps that an SM can hold are there{grid}"
        )
    why += _copy(c)
    if c.stalls:
        why.append(f"warps wait most with: {units.listed(c.stalls)}")
    advice = []
    if c.waves is not None and c.waves < 1:
        advice.append(
            "more CTAs or warps: smaller tiles, so that every SM has work and loads in flight"
        )
    for name in c.stalls:
        if text := stalls.texts(name).advice:
            advice.append(f"{name}: {text}")
    summary = "latency-bound: warps wait, and too few others have work meanwhile"
    return Verdict("latency", summary, why, advice)


def _unclear(c: _Case) -> Verdict:
    if c.counters:
        why = [f"{_busy(c)}: neither decides it"]
        advice = (
            "gdn profile A B: compare with a variant with fewer bytes, and one with fewer"
            " instructions"
        )
    else:
        why = [
            f"bytes at {_pc(c.bandwidth)} of {c.against}; there are no counters of what else is"
            " busy"
        ]
        advice = "start with what takes the most time: --tool cpu shows it"
        if c.hot:
            where, share, *_, text = c.hot
            advice = f"start with {where}, {share:.0f} % of the CPU time: {text}"
        if c.on_gpu:
            advice = "--tool ncu has the counters"
    summary = "unclear: these figures do not show what limits it"
    return Verdict("unclear", summary, [*why, *_copy(c)], [advice])


def _busy(c: _Case) -> str:
    return f"{c.worker} {_pc(c.work)} busy, bytes at {_pc(c.bandwidth)} of {c.against}"


def _copy(c: _Case) -> list[str]:
    """How close the copy of the same bytes is, and what limits the copy itself; [] if
    it is not known.
    """
    if not c.copy_us:
        return []
    text = (
        f"a plain copy of these bytes takes {units.duration(c.copy_us)}, {_pc(c.at_floor)} of"
        f" its {units.duration(c.time_us)}"
    )
    if c.floor_rate is not None and c.floor_rate < LOW:
        text += f", and is latency-bound itself ({_pc(c.floor_rate)} of the large copy's rate)"
    return [text]


def _pc(share: float) -> str:
    return f"{100 * share:.0f} %"
