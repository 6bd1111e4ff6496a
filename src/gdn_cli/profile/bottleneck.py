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

from collections import Counter

from .. import units
from ..schema.profile_types import Found, Survey, Verdict
from ..worker.profilers import stalls

HIGH = 0.6  # of a peak: from here on it limits the kernel
LOW = 0.5  # of a peak: below this it does not; in between there is no verdict
# a copy's time over the kernel's: too little is left for another limit to matter
_AT_FLOOR = 0.8
# a copy this much slower than the algo was disturbed by something else
_FLOOR_OFF = 1.25
_CACHED = 1.1  # of the large copy's rate
# a copy's time over the kernel's: below this it is not limited by the bytes that must
# move
_FAR = 1 / 3
# a kernel shorter than this many empty launches is mostly start and end
_LAUNCHES = 3.0
_IDLE = 0.4  # share of a call's span without any kernel
_MANY = 4  # launches a call


class _Case:
    """The figures that decide; None if not measured. Shares are of 1."""

    def __init__(self, survey: Survey, found: tuple[Found, ...]) -> None:
        kernels = [f for f in found if f.name and f.number("time_us")]
        main = max(kernels, key=lambda f: f.number("time_us"), default=Found(""))
        ran = survey.ran or []

        def share(key: str) -> float | None:
            value = main.number(key)
            return None if value is None else value / 100

        self.time_us = survey.time_us
        # first start to last end, with the host running ahead as in gdn bench
        self.span_us = survey.span_us
        # the same for a call that finds the GPU idle, so that the host's time shows
        self.alone_us = max((r.start_us + r.us for r in ran), default=None)
        self.launches = survey.launches or len(ran) or 1
        self.empty_us = survey.empty_us
        self.copy_us = survey.copy_us
        self.large_rate = survey.large_rate
        self.moved = survey.bytes_moved or 0
        self.on_gpu = survey.tier != "wall"
        self.traffic = main.number("dram_rate")  # GB/s by the counters
        self.dram_peak, self.l2_peak = share("dram_peak"), share("l2_peak")
        pipe = next((f"{f.note} pipe" for f in main.facts if f.key == "pipe"), "")
        # the busiest of the issue slots and the pipes
        self.work = max(
            (share("issue") or 0.0, "issue slots"), (share("pipe") or 0.0, pipe)
        )
        self.waves = main.number("waves")
        self.occupancy, self.occupancy_max = share("occupancy"), share("occupancy_max")
        self.occupancy_limit = main.value("occupancy_limit")
        self.spills = main.number("spills")
        # bytes read from DRAM over those that must be read: a kernel that does only a
        # part of the call need not read all
        read, alone = main.number("dram_read"), len(ran) <= 1 and len(kernels) <= 1
        self.read_excess = (
            read / survey.bytes_in if alone and read and survey.bytes_in else 0.0
        )
        # the reasons that hold the warps most, with their shares in %
        waits = main.table("stalls")
        self.stalls = (
            [(str(row[0]), row[1]) for row in waits.rows[:2]]
            if waits and len(waits.columns) > 1
            else []
        )
        self.counters = main.value("issue") is not None
        # the ops or functions that take the most time, with their shares
        self.most = _most(found)
        self.parts = Counter()  # what a call runs -> its microseconds
        for each in ran:
            self.parts[each.name] += each.us
        # GB/s of the bytes that must move
        self.useful = self.moved / self.time_us / 1e3
        self.at_floor = self.copy_us / self.time_us if self.copy_us else None
        # the small copy's rate as a share of a large one's
        self.floor_rate = None
        if self.copy_us and self.large_rate:
            self.floor_rate = self.moved / self.copy_us / 1e3 / self.large_rate
        # if the kernel or the copy moves them faster than a large copy does, they come
        # from a cache, and the only measure is the copy of the same bytes, which finds
        # them there too
        shares = (
            (self.useful / self.large_rate, self.floor_rate or 0.0)
            if self.large_rate
            else ()
        )
        self.cached = max(shares, default=0.0) > _CACHED
        # the share of this machine's copy rate; if that is not known, of DRAM's peak
        self.bandwidth = self.dram_peak or 0.0
        if self.large_rate:
            near = max(self.useful, self.traffic or 0.0) / self.large_rate
            self.bandwidth = (self.at_floor or 0.0) if self.cached else near
        self.against = (
            "a copy's rate in the same cache"
            if self.cached
            else "the large copy's rate"
        )


def judge(survey: Survey | None, found: tuple[Found, ...]) -> Verdict | None:
    """The verdict on a call; None if not even its time is known.

    survey  measurements of the plain run
    found   a tool's findings for each kernel; the one that takes the most time represents the call
    """
    if not survey or not survey.time_us:
        return None
    case = _Case(survey, found)
    rules = (_disturbed, _launch, _bandwidth, _instruction, _latency)
    return _with_parts(
        case,
        next((verdict for rule in rules if (verdict := rule(case))), None)
        or _unclear(case),
    )


def _most(found: tuple[Found, ...]) -> str:
    """The first three of the functions, or else of the ops, that a tool saw."""
    table = next(
        (
            table
            for key in ("functions", "ops")
            for f in found
            if (table := f.table(key))
        ),
        None,
    )
    at = (
        next((i for i, (_, unit) in enumerate(table.columns) if unit == "%"), None)
        if table
        else None
    )
    if table is None or at is None:
        return ""
    rows = [
        row
        for row in table.rows
        if isinstance(row[at], (int, float)) and not str(row[0]).startswith("(all")
    ][:3]
    return units.listed(f"{row[0]} ({row[at]:.0f} %)" for row in rows)


def _with_parts(c: _Case, verdict: Verdict) -> Verdict:
    """Add what a call of several kernels and copies consists of, and that copies are
    not part of the op.
    """
    if len(c.parts) < 2:
        return verdict
    total = c.parts.total()
    why, more = (
        f"the figures are for the longest of {len(c.parts)} different ones that a call runs",
        [],
    )
    if copied := sum(
        us for name, us in c.parts.items() if name.startswith(("Memcpy", "Memset"))
    ):
        why += f"; copies and fills take {units.duration(copied)} of {units.duration(total)}"
        if copied > 0.1 * total:
            more = [
                f"no copy next to the kernel: {_pc(copied / total)} of the time (read the input,"
                " write the output)"
            ]
    if verdict.bound != "launch" and c.alone_us and c.alone_us > 1.5 * total:
        why += (
            f"; a call that finds the GPU idle takes {units.duration(c.alone_us)}: the host is"
            " slower"
        )
        more.append(
            "less work on the host between launches, or a CUDA graph, unless calls are queued"
            " ahead"
        )
    return Verdict(
        verdict.bound, verdict.summary, [*verdict.why, why], [*more, *verdict.next]
    )


# --- the rules, in the order in which they apply


def _disturbed(c: _Case) -> Verdict | None:
    if not c.at_floor or c.at_floor < _FLOOR_OFF:
        return None
    why = [
        f"{_copy(c)}: no copy is so much slower, unless something else ran meanwhile"
    ]
    return Verdict(
        "unclear",
        "unclear: the floor of this run cannot be right",
        why,
        ["measure again, alone"],
    )


def _launch(c: _Case) -> Verdict | None:
    many = c.launches > 1
    # a few launches can be queued ahead, or put into a graph: a gap between two of them
    # need not be the limit
    idle = 1 - c.time_us / c.span_us if c.launches >= _MANY and c.span_us else 0.0
    mean = c.time_us / c.launches
    short = bool(c.empty_us) and mean < _LAUNCHES * c.empty_us
    if not (idle >= _IDLE or short):
        return None
    why = []
    if many:
        why.append(
            f"{c.launches:.0f} kernels and copies a call, {units.duration(mean)} each on average"
        )
    if idle >= _IDLE:
        why.append(
            f"of {units.duration(c.span_us)} from the first start to the last end, nothing runs"
            f" in {_pc(idle)}"
        )
    if short:
        what = "that is" if many else f"it takes {units.duration(c.time_us)},"
        why.append(
            f"{what} {mean / c.empty_us:.1f} times an empty launch ({units.duration(c.empty_us)})"
        )
    more = (
        [
            (
                "one kernel instead of several: what one writes and the next reads can stay in"
                " registers"
            ),
            "a CUDA graph",
        ]
        if many
        else [
            "nothing inside the kernel: do more work per launch, or let launches overlap"
            " (programmatic launch)"
        ]
    )
    return Verdict(
        "launch",
        "launch-bound: the time goes into starting kernels, not into running them",
        why,
        more,
    )


def _bandwidth(c: _Case) -> Verdict | None:
    floor, rate = c.at_floor or 0.0, c.floor_rate or 0.0
    work, what = c.work
    at_floor = floor >= _AT_FLOOR and (rate >= HIGH or c.cached)
    in_l2 = bool(c.l2_peak) and c.l2_peak >= 0.8 and not at_floor and c.bandwidth < HIGH
    if not in_l2 and not (c.bandwidth >= HIGH and (at_floor or c.bandwidth >= work)):
        return None
    # then it was the counters that say so: what must move is that much slower than a
    # copy
    far = 0 < floor < _FAR
    why = []
    l2 = (
        f"L2 at {_pc(c.l2_peak)} of its peak, DRAM far below its own ({_pc(c.bandwidth)})"
        if in_l2
        else ""
    )
    why.append(l2 or _rate(c))
    if floor:
        why.append(_copy(c))
    if c.read_excess > 1.1:
        why.append(f"it reads {c.read_excess:.2f} times the bytes that it must")
    more = []
    if c.read_excess > 1.1:
        more.append("read each byte once: a second read costs as much as the first")
    if at_floor:
        left, fewer = 1 - floor, "only fewer bytes help (a 16-bit state, fusing)"
        more.append(
            f"{_pc(left)} is left to a plain copy; beyond that {fewer}"
            if left > 0
            else fewer
        )
        if work >= HIGH and left > 0:
            more.append(
                f"for these {_pc(left)}: {what} {_pc(work)} busy as well, so fewer instructions"
                " per byte"
            )
    elif in_l2:
        more.append(
            "fewer sectors: wider and aligned accesses, reuse in registers or shared memory"
        )
    elif far:
        more.append(
            "fewer bytes: keep what is read again in registers or shared memory"
        )
    else:
        more.append(
            "more bytes in flight: wider loads, several per thread before the first use, bulk"
            " copies"
        )
    fast = (
        "L2 move about as fast as it can"
        if in_l2
        else "bytes move about as fast as this machine moves any"
    )
    if far:
        return Verdict(
            "traffic",
            f"traffic-bound: {fast}, many more than the op must move",
            why,
            more,
        )
    return Verdict("bandwidth", f"bandwidth-bound: {fast}", why, more)


def _instruction(c: _Case) -> Verdict | None:
    work, what = c.work
    if work < HIGH or (c.bandwidth >= HIGH and c.bandwidth >= work):
        return None
    why = [
        f"{what} {_pc(work)} busy while an SM is active; bytes at {_pc(c.bandwidth)} of"
        f" {c.against}"
    ]
    if c.at_floor:
        why.append(_copy(c))
    if c.spills:
        why.append(f"{c.spills:,.0f} requests of spilled registers among them")
    more = [
        "fewer instructions for the same work: wider loads, packed math, addresses computed once"
    ]
    if what == "issue slots":
        more.append("--tool sass shows the mix; the hot lines show where")
    if c.spills:
        more.append("no spills: fewer values alive at once, or fewer threads a CTA")
    verb = "is" if what.endswith("pipe") else "are"
    return Verdict(
        "instruction", f"instruction-bound: the {what} {verb} the limit", why, more
    )


def _latency(c: _Case) -> Verdict | None:
    work, what = c.work
    if not c.counters or c.bandwidth >= LOW or work >= LOW:
        return None
    why = [
        f"nothing is near its limit: bytes at {_pc(c.bandwidth)} of {c.against}, {what}"
        f" {_pc(work)} busy"
    ]
    if c.occupancy is not None:
        grid = f", {c.waves:.2f} waves of CTAs" if c.waves is not None else ""
        why.append(
            f"{_pc(c.occupancy)} of the warps that an SM can hold are there{grid}"
        )
    if c.at_floor:
        why.append(_copy(c))
    if c.stalls:
        named = (
            f"{name} ({share:.0f} %)" if isinstance(share, (int, float)) else name
            for name, share in c.stalls
        )
        why.append(f"warps wait most with: {units.listed(named)}")
    more = []
    few = c.waves is not None and c.waves < 1
    if few:
        more.append(
            "more CTAs or warps: smaller tiles, so that every SM has work and loads in flight"
        )
    elif c.occupancy_max is not None and c.occupancy_max < 0.5 and c.occupancy_limit:
        more.append(
            f"more warps: {c.occupancy_limit} allow {_pc(c.occupancy_max)} of an SM's"
        )
    more += [
        f"{name}: {advice}"
        for name, _ in c.stalls
        if (advice := stalls.of(name).advice)
    ]
    if len(more) <= few:
        more.append(
            "a shorter chain: fewer steps that need the step before (barriers, shuffles, a second"
            " pass)"
        )
    if c.empty_us and c.empty_us / c.time_us > 0.2:
        more.append(
            f"of {units.duration(c.time_us)} an empty launch is {units.duration(c.empty_us)}:"
            " only the rest can be won"
        )
    return Verdict(
        "latency",
        "latency-bound: warps wait, and too few others have work meanwhile",
        why,
        more,
    )


def _unclear(c: _Case) -> Verdict:
    work, what = c.work
    if c.counters:
        why = [
            f"bytes at {_pc(c.bandwidth)} of {c.against}, {what} {_pc(work)} busy: neither"
            " decides it"
        ]
        more = [
            "gdn profile A B: compare with a variant with fewer bytes, and one with fewer"
            " instructions"
        ]
    else:
        why = [
            f"bytes at {_pc(c.bandwidth)} of {c.against}; there are no counters of what else is"
            " busy"
        ]
        more = (
            ["--tool ncu has the counters"]
            if c.on_gpu
            else []
            if c.most
            else ["--tool cpu shows where the time goes"]
        )
    if c.at_floor:
        why.append(_copy(c))
    if c.most:
        why.append(f"the most of the time goes to {c.most}")
        more.insert(0, "start with what takes the most time")
    return Verdict(
        "unclear", "unclear: these figures do not show what limits it", why, more
    )


def _rate(c: _Case) -> str:
    """The useful rate, and the counters' rate if they differ."""
    against = (
        f"the large copy's {c.large_rate:.0f} GB/s" if c.large_rate else "DRAM's peak"
    )
    if c.cached:
        against = c.against
    text = f"{c.useful:.0f} GB/s of bytes that must move"
    if c.traffic:
        text += f", {c.traffic:.0f} GB/s in DRAM by the counters"
    return f"{text}: {_pc(c.bandwidth)} of {against}"


def _copy(c: _Case) -> str:
    """How close the copy of the same bytes is, and what limits the copy itself."""
    copy, took = units.duration(c.copy_us), units.duration(c.time_us)
    text = f"a plain copy of these bytes takes {copy}, {_pc(c.at_floor)} of its {took}"
    if c.floor_rate is not None and c.floor_rate < LOW:
        text += f", and is latency-bound itself ({_pc(c.floor_rate)} of the large copy's rate)"
    return text


def _pc(share: float) -> str:
    return f"{100 * share:.0f} %"
