"""`gdn tune`: the constants that algo.toml declares -> the fastest for each size on this GPU, with the evidence.

First every candidate is built and checked, several at a time. Those that are right are timed in turns, in rounds (see
choosing.py), one process for each group of them and all workloads; of several GPUs, each size is timed on one. What is
measured goes into a file of its own line by line, and a second run with the same algo, space, GPU and settings goes on
from there. The algo's folder is touched at the very end only: the generated file (see tuned.py), and `tuning.json` with
the evidence.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from . import campaign, choosing, environment, errors, files, lanes, locks, machine, paired, paths, tuned
from .choosing import AGAIN, AT_ONCE, FINAL, FIRST, Meeting
from .errors import GdnError, MissingError, UsageError
from .jobs import Job, Outcome, execute
from .journal import Journal
from .machine import Gpu
from .pack import definition
from .record_types import Blame, Environment, Record, Status
from .registry import Algo, Op, Registry
from .workloads import Workload

SCHEMA = 1
COARSE_S, COARSE_TARGET = 0.3, 0.02  # of a group and workload in the first rounds, at most
# What runs now, how many of how many are done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """How to measure. `seconds` and `target` are the final's, for each workload."""

    tier: str
    l2: str = "cold"
    seconds: float = 1.0
    target: float = paired.THRESHOLD
    dataset: Path | None = None
    timeout_s: float = 300.0
    fresh: bool = False
    in_place: bool = False
    gpus: tuple[Gpu, ...] = ()  # of one kind; none: the one that a CUDA process takes by itself


@dataclass(frozen=True)
class Plan:
    """What will be tried, known before anything is run. Sizes ascend; each has its workloads."""

    op: Op
    algo: Algo
    mode: str | None  # None: it cannot run here, and can only be looked at
    definition: dict[str, Any]
    candidates: dict[str, tuple[Algo, dict[str, int]]]  # name -> the algo as it would be, and its constants
    excluded: int  # by `where`
    sizes: dict[int, list[Workload]]
    preset: str | None

    @property
    def workloads(self) -> list[Workload]:
        return [w for ws in self.sizes.values() for w in ws]

    @property
    def space(self) -> dict[str, Any]:
        tune = self.algo.tune
        constants = {name: list(values) for name, values in tune.constants.items()}
        return {"size": list(tune.size), "where": tune.where, "constants": constants}

    def to_json(self) -> dict[str, Any]:
        """What a dry run shows."""
        rows = [(size, w) for size, ws in self.sizes.items() for w in ws]
        return {
            "op": self.op.name,
            "algo": self.algo.name,
            "file": str(self.algo.folder / self.algo.tune.file),
            "space": self.space,
            "preset": self.preset,
            "candidates": [constants for _, constants in self.candidates.values()],
            "excluded": self.excluded,
            "workloads": [{"uuid": w.uuid, "axes": w.axes, "size": size} for size, w in rows],
        }


def plan(
    registry: Registry,
    entry: campaign.Entry,
    workloads: Sequence[Workload],
    preset: str | None,
    only: Sequence[str] = (),
    where: str | None = None,
) -> Plan:
    """The candidates and sizes of one algo, `only` and `where` narrowing what is tried. A UsageError says what its
    folder lacks."""
    algo, op = entry.algo, registry.op(entry.algo.op)
    if algo.folder is None:
        raise UsageError(f"{algo.name} is a packed solution", hint="tune the algo, then pack it")
    if algo.tune is None:
        file = "tuned.h" if algo.language in ("cpp", "cuda") else "tuned.py"
        raise UsageError(
            f"{algo.folder / 'algo.toml'} declares nothing to tune",
            hint=f'write a table [tune] with file = "{file}", size = ["{op.var_axes[0]}"] and\n'
            "  [tune.constants] with the values to try, such as rows = [1, 2, 4]",
        )
    algo = tuned.narrowed(algo, only, where)
    space, excluded = tuned.candidates(algo)
    made = [(tuned.candidate(algo, op, constants), constants) for constants in space]
    sizes: dict[int, list[Workload]] = {}
    for workload in sorted(workloads, key=lambda w: tuned.size_of(op, algo.tune, w)):
        sizes.setdefault(tuned.size_of(op, algo.tune, workload), []).append(workload)
    named = {candidate.name: (candidate, constants) for candidate, constants in made}
    return Plan(op, algo, entry.place.mode, definition(op, registry), named, excluded, sizes, preset)


def check_alike(gpus: Sequence[Gpu]) -> None:
    """UsageError for GPUs of several kinds: their times would choose constants for one another."""
    if len({gpu.name for gpu in gpus}) > 1:
        kinds = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in gpus)
        raise UsageError(f"tune takes GPUs of one kind, not {kinds}", hint="--gpus names those of one kind")


def check_folder(algo: Algo) -> dict[str, Any]:
    """What the folder's tuning.json holds, by GPU. A UsageError where it cannot be read, or nothing be written: before
    hours of measuring, not behind them."""
    hint = "`gdn new NAME --from ALGO --into DIR` copies it; then `gdn tune --algo NAME --algos DIR`"
    if not paths.IN_CHECKOUT and paths.ALGOS_DIR in algo.folder.parents:
        raise UsageError(f"{algo.name} belongs to an installed gdn, whose files are not to be changed", hint=hint)
    try:
        with TemporaryFile(dir=algo.folder):
            pass
    except OSError as e:
        raise UsageError(f"cannot write {algo.folder}: {e.strerror}", hint=hint) from None
    files.place(algo.folder / algo.tune.file, within=algo.folder)
    return tuned.load(algo)


@contextlib.contextmanager
def alone(algo: Algo, say: Callable[[str], None]) -> Iterator[None]:
    """One `gdn tune` of an algo at a time: both would go on with one file of measurements, and the second would write
    over what the first has found."""
    key = hashlib.sha256(os.path.realpath(algo.folder).encode()).hexdigest()[:16]
    with locks.shared(f"tune-{key}", say, algo.full_name):
        yield


# --- measuring ----------------------------------------------------------------------------------------------------


class Tuning:
    """One run of `gdn tune`. After `run`, or after Ctrl-C in it, `to_json` is the command's document."""

    def __init__(self, plan: Plan, settings: Settings, progress: Progress, say: Callable[[str], None]) -> None:
        self.plan, self.settings, self.progress, self.say = plan, settings, progress, say
        here = (settings.gpus or machine.gpus()[:1]) if plan.mode == "cuda" else ()
        self.gpus: tuple[Gpu | None, ...] = here or (None,)
        check_alike(settings.gpus)
        self.held = check_folder(plan.algo)
        self.log = Journal(self._key(), settings.fresh)
        self.out: dict[str, dict[str, Any]] = {}  # candidate -> why it was left out: status, reason, at
        self.meetings: dict[int, list[Meeting]] = {size: [] for size in plan.sizes}
        self.choices: list[choosing.Choice] = []
        self.doubts: dict[str, str] = {}
        self.written: list[str] = []
        self.homes: dict[int, Gpu | None] = {}  # size -> the GPU that it is timed on
        self.cpus: dict[Gpu | None, frozenset[int]] = {}
        self.stop = threading.Event()
        self.interrupted = False
        self.time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _key(self) -> dict[str, Any]:
        """What a measurement depends on: another one of these, and it is measured anew."""
        gpu, versions = self.gpus[0], environment.versions()
        s = self.settings
        return {
            "op": self.plan.op.name,
            "algo": self.plan.algo.name,
            "source_hash": tuned.own_hash(self.plan.algo, self.plan.op),
            "space": self.plan.space,
            "gpu": gpu.name if gpu else environment.cpu_name(),
            "driver": gpu.driver if gpu else None,
            "versions": {name: versions.get(name) for name in ("torch", "triton")},
            "tier": s.tier,
            "l2": s.l2,
            "seconds": s.seconds,
            "target": s.target,
            "dataset": str(s.dataset.absolute()) if s.dataset else None,
        } | self._how()

    def _how(self) -> dict[str, Any]:
        """That calls are in place, where they are."""
        return {"in_place": True} if self.settings.in_place else {}

    def run(self) -> None:
        """Check, time, choose and write. Raises GdnError where nothing can be chosen."""
        if any(self.log.kept.values()):
            kept = f"{self.log.kept['check']} checks and {self.log.kept['time']} timings"
            self.say(f"going on with {kept} of an earlier run; --fresh begins anew")
        for line in self.log.lines:  # what failed where is known, on whichever workload that was
            if line["step"] == "check" and line["workload"] in {w.uuid for w in self.plan.workloads}:
                self._judge(line["name"], line)
        ends = list({w.uuid: w for w in (self.plan.workloads[0], self.plan.workloads[-1])}.values())
        self._check(list(self.plan.candidates), ends, self.gpus)
        if not self._left():
            why = next(iter(self.out.values()))
            first = (why["reason"] or why["status"]).splitlines()[0]
            raise GdnError(f"none of the {len(self.out)} candidates of {self.plan.algo.full_name} is right: {first}")
        self.homes = self._homes()
        used = [gpu for gpu in self.gpus if gpu and gpu in self.homes.values()]
        self.cpus = lanes.cpus(used)
        with contextlib.ExitStack() as held:
            for gpu in sorted(used, key=lambda gpu: gpu.uuid):  # everyone in one order: no two wait for each other
                held.enter_context(locks.gpu(gpu.uuid, self.say, f"GPU {gpu.index}"))
            self._race(ends)
        self.choices = choosing.choose(self.meetings, self.out)
        if len(self.choices) < len(self.plan.sizes):
            raise GdnError("no candidate came through the final of every size", hint="`gdn run` shows why")
        self._write()

    def _left(self) -> list[str]:
        return [name for name in self.plan.candidates if name not in self.out]

    def _homes(self) -> dict[int, Gpu | None]:
        """Each size stays on one GPU: that of an earlier run, where it is here, else the one with the least to do."""
        items: dict[int, tuple[int, Sequence[Gpu | None]]] = {}
        for size, workloads in self.plan.sizes.items():
            lines = [self.log.find(step="time", workload=w.uuid) for w in workloads]
            kept = [gpu for gpu in self.gpus for line in lines if line and gpu and line.get("gpu") == gpu.uuid]
            items[size] = len(workloads), kept[:1] or self.gpus
        return lanes.deal(items)

    def _each_gpu(self, work: Callable[[list[int]], None]) -> None:
        """Do `work` with the sizes of each GPU, all GPUs at once."""
        sizes: dict[Gpu | None, list[int]] = {}
        for size, gpu in self.homes.items():
            sizes.setdefault(gpu, []).append(size)
        lanes.side_by_side([partial(work, mine) for mine in sizes.values()], self.stop)

    def _race(self, ends: Sequence[Workload]) -> None:
        """The rounds of choosing.py. Groups are made of all that passed the first check, whoever is left out later: so
        that a run that goes on makes the same ones."""
        names, step = [name for name in self.plan.candidates if self._passed(name, ends)], AT_ONCE - 1
        groups = [names[:AT_ONCE]] + [names[i : i + step] for i in range(AT_ONCE, len(names), step)]
        self._each_gpu(partial(self._coarse, groups))
        finals = choosing.finals(self.meetings, self.out)
        self._each_gpu(lambda sizes: self._meet(FINAL, {s: finals[s] for s in sizes if s in finals}, "final"))

    def _coarse(self, groups: list[list[str]], sizes: list[int]) -> None:
        """The rounds before the final."""
        for number, group in enumerate(groups, 1):
            meeting = {}
            for size in sizes:
                leader = next(iter(choosing.standing(self.meetings[size], FIRST, self.out)), None)
                meeting[size] = [leader, *group] if leader else group
            self._meet(FIRST, meeting, f"group {number} of {len(groups)}")
        best = {size: choosing.again(self.meetings[size], self.out) for size in sizes}
        self._meet(AGAIN, {size: names for size, names in best.items() if names}, "the best of all groups")

    # --- checks

    def _check(self, names: Sequence[str], workloads: Sequence[Workload], gpus: Sequence[Gpu | None]) -> None:
        """Build and check candidates, several at a time, spread over these GPUs; those that fail are out."""
        due = {}
        for name in names:
            lacking = [w for w in workloads if not self.log.find(step="check", name=name, workload=w.uuid)]
            if lacking and name in self.plan.candidates and name not in self.out:
                due[name] = lacking
        stop = threading.Event()
        workers = max(1, min(8 * len(gpus), (os.cpu_count() or 2) // 2))
        pool = ThreadPoolExecutor(workers, "gdn-tune")

        def given_up() -> bool:
            return stop.is_set() or self.stop.is_set()

        try:
            turns = zip(due.items(), itertools.cycle(gpus), strict=False)
            jobs = {name: self._check_job(name, lacking, gpu) for (name, lacking), gpu in turns}
            running = {pool.submit(execute, job, given_up=given_up): name for name, job in jobs.items()}
            for i, future in enumerate(as_completed(running)):
                self.progress("check", i, len(due))
                name, outcome = running[future], future.result()
                self._met(outcome.environment)
                for workload in due[name]:
                    line = {"name": name, "workload": workload.uuid} | self._verdict(outcome, workload)
                    self.log.add(step="check", **line)
                    self._judge(name, line)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _passed(self, name: str, workloads: Sequence[Workload]) -> bool:
        lines = [self.log.find(step="check", name=name, workload=w.uuid) for w in workloads]
        return all(line and line["status"] == "passed" for line in lines)

    def _check_job(self, name: str, workloads: Sequence[Workload], gpu: Gpu | None) -> Job:
        algo, _ = self.plan.candidates[name]
        return Job(
            "check", self.plan.op, self.plan.definition, algo.solution, self.plan.mode, tuple(workloads), algo,
            dataset=self.settings.dataset, timeout_s=self.settings.timeout_s, gpu=gpu,
            in_place=self.settings.in_place,
        )  # fmt: skip

    def _verdict(self, outcome: Outcome, workload: Workload) -> dict[str, Any]:
        """What a check says of a candidate on a workload. Raises GdnError where that is not the candidate's fault."""
        for record in outcome.records:
            if record.blame is Blame.MACHINE:
                raise GdnError(record.reason or record.words, code=record.code or errors.MISSING)
            if record.uuid == workload.uuid:
                return {"status": record.status.value, "reason": record.reason, "at": self._label(workload)}
        if outcome.blame is Blame.MACHINE:
            raise GdnError(outcome.reason or outcome.status.words, code=outcome.code or errors.MISSING)
        at = None if outcome.status is Status.BUILD_FAILED else self._label(workload)
        return {"status": outcome.status.value, "reason": _without_folders(outcome.reason), "at": at}

    def _judge(self, name: str, line: dict[str, Any]) -> None:
        """A candidate that failed anywhere is out; the first reason is kept."""
        if line["status"] != "passed" and name in self.plan.candidates:
            self.out.setdefault(name, {key: line.get(key) for key in ("status", "reason", "at")})

    # --- times

    def _meet(self, number: int, groups: dict[int, list[str]], what: str) -> None:
        """Have the candidates of each size take turns, all these sizes in one process. A worker that dies is asked
        again without the candidates that fail on the workload where it died."""
        groups = {size: [name for name in names if name not in self.out] for size, names in groups.items()}
        groups = {size: names for size, names in groups.items() if names}
        while True:
            due = [
                (size, w)
                for size, names in groups.items()
                for w in self.plan.sizes[size]
                if not self._timed(number, size, names, w)
            ]
            if not due:
                break
            outcome = self._time(number, groups, [w for _, w in due], what)
            lost = [
                (size, w) for size, w in due
                if not self._timed(number, size, groups[size], w)
            ]  # fmt: skip
            if not lost:
                continue
            size, workload = lost[0]
            self._check(groups[size], [workload], [self.homes[size]])
            if not any(name in self.out for name in groups[size]):
                self._give_up(outcome, groups[size], workload)
            groups = {s: [name for name in names if name not in self.out] for s, names in groups.items()}
            groups = {s: names for s, names in groups.items() if names}
        for size, names in groups.items():
            self.meetings[size].append(self._meeting(number, size, names))

    def _timed(self, number: int, size: int, names: list[str], workload: Workload) -> dict[str, Any] | None:
        """The line of what is measured already: only on the GPU that the size is timed on."""
        gpu = self.homes[size]
        return self.log.find(
            step="time", round=number, names=names, workload=workload.uuid, gpu=gpu.uuid if gpu else None
        )

    def _meeting(self, number: int, size: int, names: list[str]) -> Meeting:
        """The lines of a size's workloads together; a candidate that failed at one of them is out."""
        us, samples = {}, {}
        for w in self.plan.sizes[size]:
            line = self._timed(number, size, names, w)
            for name, result in line["results"].items():
                self._judge(name, result | {"at": self._label(w)})
            us[w.uuid] = {name: r["us"] for name, r in line["results"].items() if r["status"] == "passed"}
            samples[w.uuid] = {name: r["samples"] for name, r in line["results"].items() if r.get("samples")}
            if number == FINAL:
                self.doubts |= {re.sub(r"[\d.]+", "#", text): text for text in line["doubts"]}
        return Meeting(number, tuple(names), us, samples)

    def _time(self, number: int, groups: dict[int, list[str]], workloads: list[Workload], what: str) -> Outcome:
        """One process: the candidates of each workload's size take turns, and a line is kept for each workload."""
        wanted = {w.uuid: names for size, names in groups.items() for w in self.plan.sizes[size] if w in workloads}
        rivals = [name for name in self.plan.candidates if any(name in names for names in wanted.values())]
        (gpu,) = {self.homes[size] for size in groups}
        s = self.settings
        seconds, target = (s.seconds, s.target)
        if number != FINAL:
            seconds, target = min(COARSE_S, seconds), max(COARSE_TARGET, target)
        job = Job(
            "compare", self.plan.op, self.plan.definition, None, self.plan.mode, tuple(workloads),
            rivals=tuple((algo, algo.solution) for algo, _ in (self.plan.candidates[name] for name in rivals)),
            turns={uuid: tuple(names) for uuid, names in wanted.items()},
            dataset=s.dataset, tiers=(s.tier,), plan={"seconds": seconds, "target": target, "l2": s.l2},
            timeout_s=s.timeout_s * len(rivals), gpu=gpu, cpus=self.cpus.get(gpu, frozenset()),
            in_place=s.in_place,
        )  # fmt: skip
        found: dict[str, dict[str, dict[str, Any]]] = {uuid: {} for uuid in wanted}
        seen: dict[str, list[Record]] = {uuid: [] for uuid in wanted}
        done = 0

        def on_record(record: Record, env: Environment | None) -> None:
            nonlocal done
            self._met(env)
            name, uuid = record.algo, record.uuid
            if record.status is Status.TIER_UNAVAILABLE:
                raise MissingError(record.reason, hint="--tier names another one")
            if record.blame is Blame.MACHINE:  # the workload failed
                return
            for at in [uuid] if uuid else [at for at, names in wanted.items() if name in names]:
                found[at][name] = _result(record, number)
                seen[at].append(record)
            if uuid and len(found[uuid]) == len(wanted[uuid]):
                doubts = list(dict.fromkeys(text for r in seen[uuid] for text in r.doubts or []))
                line = {"round": number, "names": wanted[uuid], "workload": uuid, "gpu": gpu.uuid if gpu else None}
                line["results"] = found[uuid]
                self.log.add(step="time", **line, doubts=doubts)
                done += 1
                self.progress(shown, done, len(workloads))

        shown = f"GPU {gpu.index}: {what}" if len(self.gpus) > 1 else what
        self.progress(shown, 0, len(workloads))
        return execute(job, on_record, given_up=self.stop.is_set)

    def _give_up(self, outcome: Outcome, names: list[str], workload: Workload) -> None:
        failed = [r for r in outcome.records if r.code]
        reason = outcome.reason or next((r.reason for r in failed), None)
        code = outcome.code or next((r.code for r in failed), errors.FAILED)
        who = ", ".join(tuned.label(self.plan.candidates[name][1]) for name in names)
        raise GdnError(
            f"timing at {self._label(workload)} came to no end, though each passes its check ({who}): {reason}",
            code=code, hint="what was measured is kept: the same command goes on from here",
        )  # fmt: skip

    def _label(self, workload: Workload) -> str:
        return self.plan.op.label.format(**workload.axes)

    # --- results

    def _met(self, env: Environment | None) -> None:
        """Keep the workers' environment, which a run that only goes on may not see again."""
        if env and not self.log.find(step="environment"):
            self.log.add(step="environment", environment=msgspec.to_builtins(env))

    @property
    def environment(self) -> Environment:
        line = self.log.find(step="environment")
        return msgspec.convert(line["environment"], Environment) if line else Environment()

    @property
    def where(self) -> tuple[str, int]:
        """The GPU's name and number of SMs; a CPU's name and how many of them the process may use."""
        env = self.environment
        return (env.gpu, env.sms) if env.sms is not None else (env.cpu, env.cpus)

    def table(self) -> list[tuned.Row]:
        """The rows for this GPU; [] as long as nothing is chosen."""
        chosen = [(choice.size, self._constants(choice.chosen)) for choice in self.choices]
        return tuned.table(*self.where, chosen) if chosen else []

    def _constants(self, name: str | None) -> dict[str, int] | None:
        return self.plan.candidates[name][1] if name else None

    def evidence(self) -> dict[str, Any]:
        """What this GPU's rows rest on."""
        gpu, sms = self.where
        env, s = self.environment, self.settings
        found: dict[str, Any] = {"gpu": gpu, "sms": sms}
        about = {"driver": env.driver, "cuda": env.cuda, "threads": env.threads}
        found |= {key: value for key, value in about.items() if value is not None}
        found |= {"versions": env.versions, **environment.commit()}
        found |= {"source_hash": tuned.own_hash(self.plan.algo, self.plan.op), "date": self.time}
        found |= {"tier": s.tier, "l2": s.l2 if self.plan.mode == "cuda" else None, **self._how()}
        found |= {"seconds": s.seconds, "target": s.target, "preset": self.plan.preset, "space": self.plan.space}
        found["doubts"] = list(self.doubts.values())
        found["left_out"] = self.left_out()
        found["rows"] = [row.to_json() for row in self.table()]
        found["workloads"] = [row for choice in self.choices for row in self._measured(choice)]
        return found

    def left_out(self) -> list[dict[str, Any]]:
        return [{"constants": self._constants(name)} | why for name, why in self.out.items()]

    def _measured(self, choice: choosing.Choice) -> Iterator[dict[str, Any]]:
        """Each workload of a size: every candidate's time in the last round that it was in, the fastest first."""
        for w in self.plan.sizes[choice.size]:
            times: dict[str, tuple[int, float]] = {}
            for meeting in sorted(self.meetings[choice.size], key=lambda m: m.round):
                times |= {name: (meeting.round, us) for name, us in meeting.us[w.uuid].items() if name not in self.out}
            order = sorted(times.items(), key=lambda item: (-item[1][0], item[1][1]))
            ahead, behind = choice.ahead, choice.behind
            row = {"uuid": w.uuid, "axes": w.axes, "size": choice.size}
            if gpu := self.homes[choice.size]:
                row["gpu"] = gpu.to_json()
            row |= {"chosen": self._constants(choice.chosen), "chosen_us": times[choice.chosen][1]}
            row |= {"fastest": self._constants(choice.fastest), "second": self._constants(choice.second)}
            row["ratio"] = [ahead.ratio, ahead.low, ahead.high] if ahead else None  # of the second's time to its
            if behind:  # the neighbouring size's constants, which are no slower as far as can be told
                row["ratio_of_chosen"] = [behind.ratio, behind.low, behind.high]
            row["candidates"] = [self._constants(name) | {"us": us, "round": number} for name, (number, us) in order]
            yield row

    def _write(self) -> None:
        """The generated file and the evidence, each whole or not at all."""
        tune, folder = self.plan.algo.tune, self.plan.algo.folder
        gpu = self.where[0]
        rows = tuned.merge(tuned.rows(tune, self.held), self.table())
        measured = self.held | {gpu: self.evidence()}
        held = {row.gpu: measured[row.gpu] for row in rows}  # in the order of the rows
        document = {"schema": SCHEMA, "algo": self.plan.algo.full_name, "file": tune.file, "gpus": held}
        for file, text in ((tuned.EVIDENCE, tuned.dumps(document)), (tune.file, tuned.render(tune, rows))):
            files.write(folder / file, text, within=folder, hint="what was measured is kept")
            self.written.append(str(folder / file))
        for row in rows:
            if row.sms == self.where[1] and row.gpu != gpu:
                self.say(f"{row.gpu} has as many SMs as {gpu}: kernels tell them apart by that only, and use {gpu}'s")
                break

    def to_json(self) -> dict[str, Any]:
        """The command's document."""
        found = {"command": "tune", "dry_run": False, "time": self.time, **environment.commit()}
        found |= {"interrupted": self.interrupted, "mode": self.plan.mode, "tier": self.settings.tier, **self._how()}
        found |= self.plan.to_json() | {"resumed": self.log.kept, "left_out": self.left_out()}
        found |= {"progress": str(self.log.path), "written": self.written}
        return found | {"result": self.evidence() if self.choices else None}


def _without_folders(text: str | None) -> str | None:
    """A compiler's lines with bare file names: evidence is kept and shared, folders are this machine's."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text) if text else text


def _result(record: Record, number: int) -> dict[str, Any]:
    """What is kept of a candidate on a workload: of a final the samples as well, which decide."""
    if not record.passed:
        return {"status": record.status.value, "reason": record.reason}
    found: dict[str, Any] = {"status": "passed", "us": float(f"{paired.centre(record.rounds_us):.7g}")}
    if number == FINAL:
        found["samples"] = [float(f"{us:.7g}") for us in record.rounds_us]
    return found
