"""`gdn tune`: the candidates, the tournament, the choice, and the file that a kernel reads."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import building
import helpers
import pytest
import reports
import screens

from gdn_cli import errors
from gdn_cli.catalog import expression, pack, registry, scaffold, tuned_table
from gdn_cli.catalog.registry import Tune
from gdn_cli.catalog.tuned_table import ENDLESS, Row, Size
from gdn_cli.catalog.workloads import twin
from gdn_cli.errors import GdnError, MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.run import complete, jobs, planning
from gdn_cli.schema.record_types import Environment, Status
from gdn_cli.tune import evidence, search, tournament
from gdn_cli.tune import race as racing
from gdn_cli.tune.tournament import FINAL, FIRST, Meeting

CPP = Tune(
    "tuned.h",
    ("batch_size", "num_v_heads"),
    {"lanes": (8, 16, 32), "rows": (1, 2, 4)},
    "rows * lanes <= 64",
)


def rows_of(gpu: str, sms: int, *found: tuple[int, dict[str, int]]) -> list[Row]:
    return [Row(gpu, sms, up_to, constants) for up_to, constants in found]


# --- the generated file


def gpus_of(*rows: Row) -> dict:
    """These rows as tuning.json holds them."""
    gpus: dict = {}
    for row in rows:
        gpus.setdefault(row.gpu, {"rows": []})["rows"].append(row.to_json())
    return gpus


def write_rows(algo, *rows: Row) -> None:
    (algo.folder / "tuning.json").write_text(json.dumps({"gpus": gpus_of(*rows)}))
    (algo.folder / algo.tune.file).write_text(tuned_table.render(algo.tune, rows))


TUNED = [algo for algo in registry.load().algos if algo.tune]


@pytest.mark.parametrize("algo", TUNED, ids=lambda algo: algo.full_name)
def test_each_algos_file_is_made_of_its_tuning(algo):
    rows = tuned_table.rows(algo.tune, tuned_table.load(algo))
    text = (algo.folder / algo.tune.file).read_text()
    if any(row.gpu != tuned_table.UNTUNED for row in rows):
        assert tuned_table.render(algo.tune, rows) == text
    else:  # its author's text, with the same numbers
        found: dict = {}
        exec(text, found)
        assert found["TUNED"] == [row.to_json() for row in rows]


def test_a_copy_of_an_algo_keeps_the_rows(tmp_path, write_algo):
    algo, op = tunable(tmp_path, write_algo)
    write_rows(algo, Row("H200", 132, ENDLESS, {"rows": 1, "policy": 0}))
    scaffold.new(registry.load(str(tmp_path)), "next", algo, tmp_path)
    copy = registry.load(str(tmp_path)).find("next")
    assert tuned_table.load(copy) == tuned_table.load(algo) != {}
    # it is not packed
    assert pack.pack(copy, op)["sources"] == pack.pack(algo, op)["sources"]


GOOD = {"gpu": "H200", "sms": 132, "up_to": 8, "lanes": 8, "rows": 1}


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ([], "array"),
        ({"H200": {}}, "rows"),
        ({"H200": {"rows": [GOOD | {"sms": "132"}]}}, "does not have the form"),
        ({"H200": {"rows": [{"gpu": "H200", "sms": 1}]}}, "does not have the form"),
        ({"H200": {"rows": [GOOD | {"tile": 1}]}}, "hold lanes, rows, tile"),
    ],
)
def test_rows_of_another_form_are_refused(gpus, says):
    with pytest.raises(ValueError, match=says):
        tuned_table.rows(CPP, gpus)


# --- rows

A, B, C = ({"lanes": n, "rows": 1} for n in (8, 16, 32))


def test_neighbours_with_equal_constants_are_one_row_and_boundaries_are_geometric_middles():
    tune = Tune("tuned.h", ("batch_size",), {"lanes": (8,)})

    def table(*chosen):
        sizes = [(Size(1, size), constants) for size, constants in chosen]
        return tuned_table.table(tune, "G", 132, sizes)

    rows = table((8, A), (16, A), (32, B), (512, C), (2048, C))
    assert rows == rows_of("G", 132, (22, A), (128, B), (ENDLESS, C))
    assert table((8, A)) == rows_of("G", 132, (ENDLESS, A))
    assert table((1, A), (2, B)) == rows_of("G", 132, (1, A), (ENDLESS, B))


def test_rows_of_each_length_by_themselves():
    """1 x 512 and 2 x 256 are one size as a product, and have rows of their own where
    seq_len is the length.
    """
    constants = {"lanes": (8, 16, 32), "rows": (1,)}
    tune = Tune("tuned.h", ("batch_size",), constants, length=("seq_len",))
    sizes = Size(256, 1), Size(256, 2), Size(512, 1), Size(512, 4)
    rows = tuned_table.table(tune, "G", 132, [*zip(sizes, (A, B, C, C), strict=True)])
    assert [(row.length_up_to, row.up_to, row.constants) for row in rows] == [
        (362, 1, A),
        (362, ENDLESS, B),
        (ENDLESS, ENDLESS, C),
    ]
    text = tuned_table.render(tune, rows)
    assert "length (seq_len) and size (batch_size)" in text
    assert "int64_t length_up_to, up_to; int lanes, rows;" in text
    assert '{"G", 132, 362, 1, 8, 1}' in text
    kept = gpus_of(*rows)
    assert tuned_table.rows(tune, kept) == rows
    del kept["G"]["rows"][0]["length_up_to"]
    with pytest.raises(ValueError, match="does not have the form"):
        tuned_table.rows(tune, kept)


def test_a_kernel_takes_the_rows_of_the_nearest_gpu():
    h200, b200 = (
        rows_of("H200", 132, (8, A), (ENDLESS, B)),
        rows_of("B200", 148, (9, C)),
    )
    # 140 is as far from both: the first
    for sms, rows in ((132, h200), (1, h200), (140, h200), (141, b200), (1000, b200)):
        assert tuned_table.nearest(h200 + b200, sms) == rows
    assert tuned_table.nearest([], 132) == []


def test_other_gpus_keep_their_rows_and_estimates_go():
    h200 = rows_of("H200", 132, (8, A), (ENDLESS, B))
    b200 = rows_of("B200", 148, (ENDLESS, C))
    guess, new = rows_of("untuned", 0, (ENDLESS, A)), rows_of("H200", 132, (ENDLESS, C))
    # a kernel cannot tell it from an H200: the one tuned last goes first
    h100 = rows_of("H100", 132, (ENDLESS, B))
    for old, rows, merged in (
        (guess + b200, new, b200 + new),
        (h200 + b200, new, new + b200),
        ([], new, new),
        (b200 + h100, new, b200 + new + h100),
        (b200 + new + h100, h100, b200 + h100 + new),
    ):
        assert tuned_table.merge(old, rows) == merged


def test_the_record_says_whose_rows_were_used(tmp_path, write_algo):
    algo, op = tunable(tmp_path, write_algo)
    (row,) = rows_of("H200", 132, (ENDLESS, {"rows": 1, "policy": 0}))
    write_rows(algo, row)
    solution = pack.pack(algo, op)
    h200, other = Environment(gpu="H200", sms=132), Environment(gpu="B200", sms=148)
    assert tuned_table.built_with(algo) == [row]
    known = complete.JobRecords(
        jobs.Job.of("compare", op, {}, "cuda", (), [(algo, solution)])
    )
    cpu = Environment(cpu="x", cpus=2)
    for env, wanted in (
        (h200, ("H200", False)),
        (other, ("H200", True)),
        (cpu, (None, None)),
        (None, (None, None)),
    ):
        record = known.complete(building.record(algo.name), env, [])
        assert (record.tuned_for, record.tuned_nearest) == wanted


def test_the_screen_says_so_too(capsys):
    from gdn_cli.report import terminal

    r = {"op": "gdn_decode", "mode": "cuda", "tier": None, "check": None}
    r |= {"status": "passed", "reason": None, "tuned_nearest": True}
    r |= {"workload": {"uuid": "u", "axes": {"batch_size": 1}}}
    document = {"schema": 2, "command": "run", "environments": {}, "missing": []}
    names = ("x", "H200"), ("y", "untuned")
    document["records"] = [r | {"algo": n, "tuned_for": gpu} for n, gpu in names]
    terminal.show(reports.typed(document), registry.load(), False, Path("x.json"))
    out = capsys.readouterr().out
    assert "note x: tuned for H200, the nearest to this GPU" in out
    assert "note y: not tuned yet" in out


@pytest.mark.parametrize("tier", ["cupti", "wall"])
def test_the_screen_says_how_far_a_gpu_is_from_the_tuning(capsys, tier):
    """Times of workloads that the tuning timed too, in its tier."""
    from gdn_cli.report import terminal

    loaded = registry.load()
    table = json.loads((loaded.find("cuda-v5").own_folder / "tuning.json").read_text())
    there = table["gpus"]["NVIDIA H200"]["workloads"]
    r = {"op": "gdn_decode", "algo": "cuda-v5", "mode": "cuda", "tier": tier}
    r |= {"status": "passed", "reason": None, "check": None}
    r |= {"tuned_for": "NVIDIA H200", "tuned_nearest": True}
    document = {"schema": 2, "command": "run", "environments": {}, "missing": []}
    document["records"] = [
        r
        | {"workload": {key: timed[key] for key in ("uuid", "axes")}}
        | {"timing": reports.timing(timed["chosen_us"] * times, tier)}
        for timed, times in zip(there[:2], (1.1, 1.25), strict=True)
    ]
    terminal.show(reports.typed(document), loaded, False, Path("x.json"))
    out = " ".join(capsys.readouterr().out.split())
    far = "; calls take 1.10 to 1.25 times as long as when it was tuned there (2 workloads)"
    near = "cuda-v5: tuned for NVIDIA H200, the nearest to this GPU"
    assert near in out
    assert (near + far in out) == (tier == "cupti")


# --- algo.toml

TOML = """[tune]
file = "tuned.py"
size = ["batch_size", "num_v_heads"]
where = "rows * (policy + 1) <= 4"
[tune.constants]
rows = [1, 4]
policy = [0, 1]
"""
# Costs 4 ms for each step from the planted best (1 up to size 30, above it 4), and
# policy 1 is wrong.
MAIN = f"""from time import perf_counter_ns

from .right import run as right
from .tuned import TUNED


def run({helpers.DECODE_ARGS}):
    size = q.shape[0] * 8
    row = next(row for row in TUNED if size <= row["up_to"])
    out, new = right({helpers.DECODE_ARGS})
    until = perf_counter_ns() + 4_000_000 * abs(row["rows"] - (1 if size < 30 else 4))
    while perf_counter_ns() < until:
        pass
    return out * (1 + row["policy"]), new
"""
GUESS = (
    'TUNED = [\n    {"gpu": "untuned", "sms": 0, "up_to": 9223372036854775807, "rows": 1,'
    ' "policy": 0},\n]\n'
)


def tunable(folder: Path, write_algo, toml: str = TOML, name: str = "slow", **keys):
    write_algo(folder, name, {"main.py": MAIN, "tuned.py": GUESS}, extra=toml, **keys)
    known = registry.load(str(folder))
    algo = known.find(name)
    return algo, known.ops[algo.op]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            '"tuned.py"',
            '"tuned.h"',
            "$.tune.file: expected a file of its own in this folder, such as 'tuned.py'",
        ),
        ('"tuned.py"', '"main.py"', "$.tune.file: expected a file of its own"),
        ('"tuned.py"', '"../tuned.py"', "$.tune.file: expected a file of its own"),
        (
            '"num_v_heads"',
            '"heads"',
            "$.tune.size: expected axes of gdn_decode (batch_size, ",
        ),
        (
            "rows * (policy + 1) <= 4",
            "rows < tile",
            "expected a condition on the constants, but 'tile' is not one of rows",
        ),
        ("[1, 4]", "[1, 4.5]", "$.tune.constants"),
        ("[1, 4]", "[4294967296]", "$.tune.constants"),
        ("rows = [1, 4]", "up_to = [1]", "`$.tune.constants`"),
    ],
)
def test_a_wrong_tune_names_file_and_key(old, new, says, tmp_path, write_algo):
    toml = TOML.replace(old, new)
    if "constant" in says or "up_to" in says:
        toml = toml.replace('where = "rows * (policy + 1) <= 4"\n', "")
    assert toml != TOML
    write_algo(tmp_path, "slow", {"main.py": MAIN}, extra=toml)
    with pytest.raises(UsageError, match=re.escape(says)) as e:
        registry.load(str(tmp_path)).find("slow")
    assert f"{tmp_path}/gdn_decode/slow/algo.toml: " in str(e.value)
    assert "$.tune" in str(e.value)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a * b <= 8", True),
        ("a + b == 6 and not (a > b)", True),
        ("a // 3 == 0 or b % 3 == 2", True),
        ("1 < a < b", True),
        ("1 < b < a", False),
        ("-a + 2.0", False),
        ("a != 2", False),
    ],
)
def test_conditions(text, holds):
    assert expression.condition(text, ["a", "b"])({"a": 2, "b": 4}) is holds


@pytest.mark.parametrize(
    "text",
    [
        "c < 1",
        "a <",
        "a ** b < 9",
        "__import__('os')",
        "a.real",
        "a if b else a",
        "'x' < 'y'",
        "a in (1, 2)",
        "",
    ],
)
def test_conditions_hold_nothing_but_arithmetic_and_comparisons(text):
    with pytest.raises(ValueError):
        expression.condition(text, ["a", "b"])


def test_candidates_are_the_algo_with_one_row(tmp_path, write_algo):
    algo, op = tunable(tmp_path, write_algo)
    found, excluded = tuned_table.candidates(algo)
    assert [tuple(c.values()) for c in found] == [(1, 0), (1, 1), (4, 0)]
    assert excluded == 1
    one = tuned_table.candidate(algo, op, found[2])
    assert one.name == "slow[rows=4,policy=0]"
    assert (algo.folder / "tuned.py").read_text() == GUESS
    sources = {s["path"]: s["content"] for s in one.solution["sources"]}
    assert list(sources) == ["main.py", "right.py", "tuned.py"]
    assert sources["main.py"] == MAIN
    assert (
        '"candidate", "sms": 0, "up_to": 9223372036854775807, "rows": 4'
        in (sources["tuned.py"])
    )
    before = tuned_table.own_hash(algo, op)
    write_rows(algo, *rows_of("G", 1, (ENDLESS, found[0])))
    assert tuned_table.own_hash(algo, op) == before


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("rows > 9", "'rows > 9' leaves no candidate"),
        ("1 // policy", "'1 // policy': it divides by zero"),
    ],
)
def test_no_candidates(where, says, tmp_path, write_algo):
    algo, _ = tunable(
        tmp_path, write_algo, TOML.replace("rows * (policy + 1) <= 4", where)
    )
    with pytest.raises(UsageError, match=re.escape("algo.toml: $.tune.where: ") + says):
        tuned_table.candidates(algo)


# --- who is chosen


def met(number: int, **us: float) -> Meeting:
    return Meeting(
        number,
        tuple(us),
        {"w": us},
        {"w": {n: [t * (1 + i % 3 / 1e3) for i in range(60)] for n, t in us.items()}},
    )


def test_groups_are_compared_through_their_leader():
    """The second group ran when everything was twice as slow."""
    found = tournament.standing(
        [met(FIRST, a=10, b=12), met(FIRST, a=20, c=18, d=22)], FIRST
    )
    assert list(found) == ["c", "a", "d", "b"]
    assert found["c"] - found["a"] == pytest.approx(math.log(20 / 18))
    assert list(tournament.standing([met(FIRST, a=10, b=12)], FIRST, out={"a"})) == [
        "b"
    ]


def test_who_is_much_slower_is_dropped_and_the_best_of_all_groups_meet():
    groups = [met(FIRST, a=10, b=10.5, c=12), met(FIRST, a=10, d=10.2, e=10.8)]
    assert tournament.racing(tournament.standing(groups, FIRST)) == ["a", "d", "b", "e"]
    groups.append(met(FIRST, a=10, f=10.1, g=10.3, h=10.4))
    assert tournament.finals({8: groups}, {"f"}) == {8: ["a", "d", "g", "h", "b"]}


def test_the_final_has_close_candidates_and_the_smaller_sizes_winner():
    sizes = {
        8: [met(FIRST, a=10, b=20, c=30)],
        16: [met(FIRST, a=10.1, b=10, c=10.02, d=10.03)],
    }
    assert tournament.finals(sizes, ()) == {8: ["a", "b"], 16: ["b", "c", "d", "a"]}


def test_the_fastest_is_chosen_or_the_smaller_sizes_constants_where_these_are_as_good():
    sizes = {
        8: [met(FINAL, a=10, b=10.5)],
        16: [met(FINAL, b=10, a=10.02)],
        32: [met(FINAL, b=10, a=10.3, c=11)],
        64: [met(FINAL, b=10, c=9)],
    }
    found = tournament.choose(sizes)
    chosen = ["".join((c.chosen, c.fastest, c.second)) for c in found]
    assert [c.size for c in found] == list(sizes)
    assert chosen == ["aab", "aba", "bba", "ccb"]
    assert found[0].ahead.ratio == pytest.approx(1.05)
    assert found[0].ahead.verdict == "FASTER"
    assert found[1].behind.ratio == pytest.approx(1.002) and found[2].behind is None


@pytest.mark.parametrize(("us", "chosen"), [(10.1, "a"), (10.4, "b")])
def test_little_time_keeps_the_row_only_where_the_times_are_equal(us, chosen):
    """Four samples that scatter: the interval holds 1, and yet 4 % are no reason to
    keep the slower one.
    """
    noisy = {"b": [10, 14, 8, 10], "a": [us, 8, 14, us]}
    final = Meeting(FINAL, ("b", "a"), {"w": {"b": 10.0, "a": us}}, {"w": noisy})
    assert tournament.against(final, "a", "b").verdict == "UNCLEAR"
    found = tournament.choose({8: [met(FINAL, a=10, b=11)], 16: [final]})
    assert [c.chosen for c in found] == ["a", chosen]


# --- the race, with workers that only answer


class Workers:
    """Stands in for jobs.execute: times by a model, in us; a crash or a fault where it says so."""

    def __init__(self, us, wrong=(), crash=()) -> None:
        self.us, self.wrong, self.crash = us, wrong, crash
        self.jobs: list[jobs.Job] = []
        self.env = Environment(cpu="A CPU", cpus=2, versions={"torch": "2"})

    def __call__(self, job, on_record=lambda record, env: None, given_up=None):
        self.jobs.append(job)
        found = []
        for w in job.workloads:
            batch = w.axes["batch_size"]
            names = job.request.turns.get(w.uuid) or (job.algo.name,)
            if any((name, batch) in self.crash for name in names):
                reason = "crashed with SIGSEGV"
                return jobs.Outcome(Status.CRASHED, reason, found, self.env)
            for name in names:
                us = self.us(name, batch)
                about = {"rounds_us": [us * (1 + i % 3 / 1e3) for i in range(60)]}
                if name in self.wrong:
                    reason = "output: 3 elements beyond 1e-2"
                    about = {"status": "wrong", "reason": reason}
                found.append(building.record(name, None, w.uuid, tier="wall", **about))
                on_record(found[-1], self.env)
        return jobs.Outcome(Status.DONE, None, found, self.env)

    def compared(self) -> list[jobs.Job]:
        return [job for job in self.jobs if job.command == "compare"]

    def meetings(self) -> list[dict[int, list[int]]]:
        """Of each process: which tile sizes took turns, by batch size."""
        found = []
        for job in self.compared():
            turns = job.request.turns
            batches = {w.axes["batch_size"]: turns[w.uuid] for w in job.workloads}
            found.append({b: [tile(name) for name in batches[b]] for b in batches})
        return found


def tile(name: str) -> int:
    return int(name.split("=")[1].rstrip("]"))


WIDE = '[tune]\nfile = "tuned.py"\nsize = ["batch_size"]\n[tune.constants]\ntile = [{}]'.format(
    ", ".join(map(str, range(1, 26)))
)


def wide(tmp_path, write_algo, monkeypatch):
    """plan(*batch sizes) of an algo of one's own with 25 candidates, tile = 1 to 25."""
    (tmp_path / "own").mkdir()
    algo, op = tunable(tmp_path / "own", write_algo, WIDE)
    guess = GUESS.replace('"rows": 1, "policy": 0', '"tile": 1')
    (algo.folder / "tuned.py").write_text(guess)
    known = registry.load(str(tmp_path / "own"))
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))
    entry = planning.Entry(known.find("slow"), inventory.Place("cpu"))

    def plan(*batches: int) -> search.Plan:
        workloads = [twin(op, {"batch_size": b}) for b in batches]
        return search.plan(known, entry, workloads, None)

    return plan


@pytest.fixture
def race(tmp_path, write_algo, monkeypatch):
    """race(workers, *batch sizes) -> the State after its run."""
    plan = wide(tmp_path, write_algo, monkeypatch)
    said: list[str] = []

    def run(workers: Workers, *batches: int, **more):
        monkeypatch.setattr(racing, "execute", workers)
        settings = search.Settings("wall", **more)
        work = search.begin(plan(*batches), settings, lambda *line: None, said.append)
        racing.run(work)
        evidence.write(work)
        return work

    run.folder, run.said = tmp_path / "own" / "gdn_decode" / "slow", said
    return run


def by_tile(name: str, batch: int) -> float:
    """Tile 12 is the best at batch size 1, tile 24 at 64."""
    best = 12 if batch < 8 else 24
    return 100 + abs(tile(name) - best)


def test_25_candidates_race_in_groups_led_by_the_best_so_far(race):
    workers = Workers(by_tile)
    work = race(workers, 64, 1)
    assert workers.meetings() == [
        {1: list(range(1, 11)), 64: list(range(1, 11))},
        {1: [10, *range(11, 20)], 64: [10, *range(11, 20)]},
        {1: [12, *range(20, 26)], 64: [19, *range(20, 26)]},
        # the final: tile 12 is a tenth slower at 64
        {1: [12, 11, 13, 10, 14], 64: [24, 23, 25, 22, 21]},
    ]
    plans = [job.request.timing.plan for job in workers.compared()]
    assert [(p["target"], p["seconds"]) for p in plans] == [
        *[(0.02, 0.3)] * 3,
        (0.005, 1.0),
    ]
    rows = rows_of("A CPU", 2, (8, {"tile": 12}), (ENDLESS, {"tile": 24}))
    tune = work.plan.tune
    assert (race.folder / "tuned.py").read_text() == tuned_table.render(tune, rows)
    assert tuned_table.rows(tune, tuned_table.load(work.plan.algo)) == rows
    entry = json.loads((race.folder / "tuning.json").read_text())["gpus"]["A CPU"]
    assert [w["chosen"] for w in entry["workloads"]] == [{"tile": 12}, {"tile": 24}]
    assert entry["workloads"][0]["ratio"][0] == pytest.approx(101 / 100)


def test_who_crashes_while_it_is_timed_is_found_and_left_out(race):
    """At a size in the middle, which the first check does not see; the others of its
    group are timed again.
    """
    best = "slow[tile=12]"
    crash = {(best, 4)}
    work = race(Workers(by_tile, crash=crash), 1, 4, 64)
    left_out = search.LeftOut(
        {"tile": 12}, Status.CRASHED, "crashed with SIGSEGV", "B=4"
    )
    assert work.out == {best: left_out}
    assert [tile(c.chosen) for c in work.choices] == [11, 11, 24]
    again = Workers(by_tile, crash=crash)
    assert race(again, 1, 4, 64).choices == work.choices and again.jobs == []


def test_a_crash_that_no_single_candidate_explains_ends_it_and_keeps_the_rest(race):
    class Together(Workers):
        def __call__(self, job, *args, **kwargs):
            self.crash = {("slow[tile=1]", 64)} if job.command == "compare" else ()
            return super().__call__(job, *args, **kwargs)

    with pytest.raises(GdnError, match="timing at B=64 came to no end, .*SIGSEGV"):
        race(Together(by_tile), 1, 64)
    assert "untuned" in (race.folder / "tuned.py").read_text()
    workers = Workers(by_tile)
    race(workers, 1, 64)
    assert list(workers.meetings()[0]) == [64]
    assert {job.command for job in workers.jobs} == {"compare"}
    assert "resuming with 50 checks and 1 timings" in race.said[0]


def test_a_second_run_measures_nothing_and_fresh_all(race):
    race(Workers(by_tile), 1, 64)
    same, other, fresh = (Workers(by_tile) for _ in range(3))
    assert len(race(same, 64, 1).choices) == 2 and same.jobs == []
    race(other, 1, 64, seconds=2.0)
    race(fresh, 1, 64, fresh=True)
    assert len(other.jobs) == len(fresh.jobs) == 29


def test_evidence_names_no_folders_of_this_machine():
    said = "/tmp/home/builds/py311-cpu/x_1__71/kernel.cu:14:68: error: a/b is no number"
    assert racing._without_folders(said) == "kernel.cu:14:68: error: a/b is no number"


def test_nothing_right_is_nothing_written(race):
    wrong = [f"slow[tile={i}]" for i in range(1, 26)]
    with pytest.raises(GdnError, match="none of the 25 .* right: output: 3 el") as e:
        race(Workers(by_tile, wrong=wrong), 1)
    assert e.value.code == errors.FAILED and not (race.folder / "tuning.json").exists()


def test_a_tier_that_cannot_be_had_is_missing(race):
    class NoTier(Workers):
        def __call__(self, job, on_record=None, **more):
            if job.command == "check":
                return super().__call__(job)
            gone = {"status": "tier_unavailable", "reason": "cupti: no CUPTI here"}
            uuid = job.workloads[0].uuid
            on_record(building.record(job.names[0], None, uuid, **gone), self.env)

    with pytest.raises(MissingError, match="no CUPTI here; --tier names another one"):
        race(NoTier(by_tile), 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"gpus": 3}'])
def test_files_in_the_folder_are_never_lost(race, text):
    evidence = race.folder / "tuning.json"
    evidence.write_text(text)
    workers = Workers(by_tile)
    with pytest.raises(UsageError, match="tuning.json is not what gdn wrote"):
        race(workers, 1)
    assert evidence.read_text() == text and workers.jobs == []


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    race, monkeypatch
):
    workers = Workers(by_tile)

    def refuse(**where):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(search, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="Permission denied; tune a copy: gdn new"):
        race(workers, 1)
    assert workers.jobs == []


def test_workloads_of_one_size_decide_together():
    """Twice as fast on one, 1.5 times as slow on the other: the geometric mean decides."""
    times = {"u": {"a": 100, "b": 50}, "v": {"a": 100, "b": 150}}
    meeting = Meeting(FINAL, ("a", "b"), times)
    assert meeting.speeds()["b"] > meeting.speeds()["a"]
    assert Meeting(FINAL, ("a",), {"u": {"a": 1}, "v": {}}).speeds() == {}


# --- the command

SIZES = "-w", "batch_size=3", "-w", "batch_size=7"
OTHER = Row("A GPU", 500, ENDLESS, {"rows": 4, "policy": 0})


@pytest.fixture(scope="module")
def tuned_here(tmp_path_factory, gdn):
    """A run that Ctrl-C ends after its first check, and one that goes on."""
    folder = tmp_path_factory.mktemp("tune")
    algo, _ = tunable(folder / "own", helpers.write_algo)
    write_rows(algo, OTHER)
    # other tests may have the other cores
    env = {"GDN_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    args = (
        "tune",
        "--algo",
        "slow",
        "--algos",
        str(folder / "own"),
        "--seconds",
        "0.1",
        "--json",
        *SIZES,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", *args], env=helpers.environment(**env), stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
        # a shell's `&` has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    log: list[Path] = []
    deadline = time.monotonic() + helpers.PATIENCE_S
    while not log or '"step": "check"' not in log[0].read_text():
        assert process.poll() is None and time.monotonic() < deadline
        log = list((folder / "home" / "tunes").glob("*.jsonl"))
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=helpers.PATIENCE_S)[0]
    before = (algo.folder / "tuning.json").read_text()
    stopped = helpers.Done(process.returncode, out, "")
    went_on = gdn(*args, env=env)
    written = {
        name: (algo.folder / name).read_text() for name in ("tuned.py", "tuning.json")
    }
    return algo, stopped, before, went_on, written


@pytest.mark.slow
def test_ctrl_c_keeps_the_measurements_and_writes_nothing(tuned_here):
    _, stopped, before, went_on, _ = tuned_here
    assert stopped.code == errors.INTERRUPTED and stopped.json["interrupted"]
    assert stopped.json["result"] is None
    assert json.loads(before) == {"gpus": gpus_of(OTHER)}
    resumed = went_on.json["resumed"]
    assert 2 <= resumed["check"] < 6 and resumed["time"] == 0
    assert f"resuming with {resumed['check']} checks and 0 timings" in went_on.err


@pytest.mark.slow
def test_tune_finds_the_planted_constants_and_leaves_the_wrong_out(tuned_here):
    algo, _, _, done, written = tuned_here
    assert done.code == 0
    (out,) = done.json["left_out"]
    assert out["constants"] == {"rows": 1, "policy": 1}
    assert out["status"] == "wrong" and "output: " in out["reason"]
    result = done.json["result"]
    few, many = {"rows": 1, "policy": 0}, {"rows": 4, "policy": 0}
    # 12 ms beside one
    chosen = [(w["chosen"], w["second"]) for w in result["workloads"]]
    assert chosen == [(few, many), (many, few)]
    assert all(w["ratio"][0] > 1 for w in result["workloads"])
    gpu, sms = result["gpu"], result["sms"]
    rows = rows_of(gpu, sms, (36, few), (ENDLESS, many))
    assert written["tuned.py"] == tuned_table.render(algo.tune, [OTHER, *rows])
    evidence = json.loads(written["tuning.json"])
    assert evidence["algo"] == "gdn_decode/slow"
    assert evidence["gpus"] == gpus_of(OTHER) | {gpu: result}
    assert (result["tier"], result["l2"], result["preset"]) == ("wall", None, None)
    assert {"versions", "source_hash", "date", "space", "doubts"} <= set(result)


@pytest.mark.slow
def test_a_dry_run_needs_no_gpu_and_touches_nothing(tmp_path, write_algo, gdn):
    algo, _ = tunable(tmp_path, write_algo, devices=["cuda"])
    (algo.folder / "tuned.py").unlink()  # a fresh algo need not have it
    files = sorted(algo.folder.iterdir())
    env = {"GDN_HOME": str(tmp_path / "home")}

    def run(*more):
        return gdn("tune", "--algo", "slow", "--algos", tmp_path, *more, env=env)

    plan = run("--dry-run", "--json").json
    assert plan["dry_run"] and plan["preset"] == "sweep" and plan["excluded"] == 1
    assert len(plan["candidates"]) == 3
    sizes = [w["size"] for w in plan["workloads"]]
    assert sizes == sorted(sizes) and set(sizes) >= {8, 64, 2048}
    only = "--only", "rows=4", "--only", "policy=1,0"
    narrowed = run("--dry-run", "--json", *only).json
    assert narrowed["candidates"] == [{"rows": 4, "policy": 0}]
    assert narrowed["space"]["constants"]["rows"] == [4]
    for option, value, says in (
        ("--only", "row=4", "unknown constant 'row'"),
        ("--only", "rows=3", "algo.toml declares rows = 1, 4"),
    ):
        done = run("--dry-run", option, value)
        assert done.code == errors.USAGE and says in done.err
    shown = run("--dry-run", "-w", "batch_size=3").out
    screens.check("tune-dry-run", shown.replace(str(tmp_path), "FOLDER"))
    assert sorted(algo.folder.iterdir()) == files and not (tmp_path / "home").exists()
    done = run()
    assert done.code == errors.MISSING and "cannot run here: no GPU here" in done.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "tune takes one algo, not ''\n  gdn tune NAME"),
        ("--algo cpp-v1,cuda-v4", "tune takes one algo, not 'cpp-v1,cuda-v4'"),
        ("--algo pt-reference", "pt-reference/algo.toml declares nothing to tune"),
    ],
)
def test_wrong_usage_is_one_line(args, says, gdn):
    done = gdn("tune", *args.split())
    assert (done.code, done.out) == (errors.USAGE, "")
    assert says in done.err


def test_one_tier_only(tmp_path, write_algo, gdn):
    tunable(tmp_path, write_algo)
    done = gdn("tune", "--algo", "slow", "--algos", tmp_path, "--tier", "cupti")
    assert done.code == errors.USAGE and "cannot time algos on the CPU" in done.err
