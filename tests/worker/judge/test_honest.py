"""Hard cases for results: kernels that are right only once, files in the way, clashing
names, a killed command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import helpers
import pytest

from gdn_cli import errors
from gdn_cli.catalog import pack, registry, trace_set
from gdn_cli.catalog.tiers import FLOORS
from gdn_cli.catalog.workloads import select
from gdn_cli.run import planning
from gdn_cli.schema.record_types import Status
from gdn_cli.worker import timing
from gdn_cli.worker.executor import measuring
from gdn_cli.worker.judge import tasks
from gdn_cli.worker.messages import Reply
from gdn_cli.worker.request import Serving, Timing
from gdn_cli.worker.timing import floor

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]

_RUN = f"def run({helpers.DECODE_ARGS}):\n"
_CALL = f"right({helpers.DECODE_ARGS})"
ALGOS = {
    "honest": f"from .right import run as right\n{_RUN}    return {_CALL}\n",
    # the earlier result for these buffers, whatever is in them now
    "remembers": (
        f"from .right import run as right\nkept = {{}}\n{_RUN}    if q.data_ptr() not in kept:\n "
        f"       kept[q.data_ptr()] = {_CALL}\n    return kept[q.data_ptr()]\n"
    ),
    # right until the same values have come often in a row, as they do while it is timed; then zeros
    "tires": (
        "from .right import run as right\nseen = []\n"
        f"{_RUN}    if len(seen) < 12:\n        sum_v = float(v.float().sum())\n"
        "        seen[:] = seen + [sum_v] if sum_v in seen[-1:] else [sum_v]\n"
        f"    out, new = {_CALL}\n    return (out * 0 if len(seen) >= 12 else out), new\n"
    ),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, gdn, write_algo):
    """One bench of the three above, one that cannot be packed, and a broken one."""
    folder = tmp_path_factory.mktemp("honest")
    for name, source in ALGOS.items():
        write_algo(folder, name, source)
    (write_algo(folder, "unpackable", ALGOS["honest"]) / "notes.txt").write_text("x")
    write_algo(folder, "broken", "#", drop=("summary",))
    names = ",".join([*ALGOS, "unpackable"])
    out = folder / "keep.json"
    words = f"bench --algo {names} -w 0 --seconds 0.3 --json --algos".split()
    done = gdn(*words, folder, "--out", out)
    return done, {r["algo"]: r for r in done.json["records"]}, folder


@pytest.mark.slow
def test_a_kernel_that_is_right_only_once_gets_no_time(mixed):
    done, records, _ = mixed
    assert done.code == errors.FAILED
    honest = records["honest"]
    assert honest["status"] == "passed" and honest["timing"]["median_us"] > 0
    timed = "right when it was checked, wrong while it was timed"
    for name, reason in (("remembers", "probe "), ("tires", timed)):
        assert records[name]["status"] == "wrong" and "timing" not in records[name]
        assert records[name]["reason"].startswith(reason)


@pytest.mark.slow
def test_a_broken_algo_is_named_by_all(mixed, gdn):
    _, _, folder = mixed
    words = "run --algo all -w 0 --device cuda --json --algos".split()
    done = gdn(*words, folder)
    (broken,) = (m for m in done.json["missing"] if m["algo"] == "broken")
    assert "`summary`" in broken["reason"]


@pytest.mark.slow
def test_an_algo_that_cannot_be_packed_keeps_its_row_and_the_others_go_on(mixed):
    _, records, folder = mixed
    record = records["unpackable"]
    assert record["status"] == "unpackable" and "notes.txt" in record["reason"]


@pytest.mark.slow
def test_a_wrong_call_leaves_the_old_file_alone(mixed, gdn):
    _, _, folder = mixed
    file = folder / "keep.json"
    before = file.read_text()
    for words, code in (
        ("bench --algo pt-reference --tier events", errors.USAGE),
        # nothing runs: nothing to put there
        ("run --algo cuda-v4", errors.MISSING),
    ):
        assert gdn(*words.split(), "--out", file).code == code
        assert file.read_text() == before


def test_no_algo_passes_for_the_reference_or_for_the_floor(tmp_path, write_algo):
    solution = pack.pack(REGISTRY.find("cpp-v1"), DECODE)
    files = []
    for name in ("pt-reference", "copy", "cpp-v1"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(solution | {"name": name}))
    entries, _ = planning.choose(
        REGISTRY, "cpp-v1,cpp-v1", None, [*files, files[0]], "cpu", timed=True
    )
    mark = pack.source_hash(solution)[:6]
    names = [e.algo.name for e in entries]
    assert names == [f"pt-reference@{mark}", f"copy@{mark}", "cpp-v1", "cpp-v1@own"]
    write_algo(tmp_path, "pt-reference", ALGOS["honest"])
    mine = registry.load(str(tmp_path))
    entries, _ = planning.choose(mine, "pt-reference", None, [], "cpu", timed=True)
    assert [e.algo.name for e in entries] == ["pt-reference@own"]


def test_a_packed_file_of_another_op_is_refused(tmp_path):
    file = tmp_path / "solution.json"
    file.write_text(json.dumps(pack.pack(REGISTRY.find("cpp-v1"), DECODE)))
    with pytest.raises(errors.UsageError, match="of gdn_decode, not of gdn_prefill"):
        planning.choose(REGISTRY, None, "gdn_prefill", [file], "cpu", timed=False)


def test_a_floor_that_cannot_be_timed_is_a_record_and_no_crash(monkeypatch):
    def refuse(*args, **kwargs):
        raise timing.TierUnavailableError("no CUPTI")

    monkeypatch.setattr(measuring, "interleave", refuse)
    (workload,) = select(DECODE, trace_set.known(DECODE, None), chosen=["0"])
    about = {"op": DECODE, "definition": {}, "solution": None, "mode": "cpu"}
    about |= {"workloads": (workload,), "timing": Timing(tiers=("cupti",))}
    request = Serving(command="floor", **about)
    monkeypatch.setattr(floor, "_RATE_BYTES", {"cpu": 2**20})
    found = list(tasks.floors(request, Reply(status=Status.DONE)))
    assert [r.algo for r in found] == list(FLOORS)
    for record in found:
        assert (record.status, record.reason) == ("tier_unavailable", "cupti: no CUPTI")


def test_a_folder_inside_an_algos_folder_is_named(tmp_path, write_algo):
    write_algo(tmp_path, "one", "#")
    for inside in (tmp_path / "gdn_decode", tmp_path / "gdn_decode" / "one"):
        with pytest.raises(errors.UsageError, match="is inside an algos folder"):
            registry.load(str(inside))


def test_a_folder_grows_and_keeps_the_contests_order(tmp_path, gdn):
    for more in (["-w", "5"], ["-w", "0", "-w", "11"]):
        words = "data", "build", tmp_path / "set", "--op", "gdn_decode", *more
        assert gdn(*words).code == 0
    rows = trace_set.from_folder(DECODE, tmp_path / "set")
    known = trace_set.known(DECODE, None)
    assert [w.uuid for w in rows] == [known[i].uuid for i in (0, 5, 11)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_worker_and_a_record_that_says_so(
    number, tmp_path, write_algo
):
    pid, out, temporary = tmp_path / "pid", tmp_path / "out.json", tmp_path / "tmp"
    temporary.mkdir()
    hangs = f"""
import os, signal, subprocess
left = subprocess.Popen(["sleep", "1000000"], start_new_session=True)
open({str(pid)!r}, "w").write(f"{{os.getpid()}} {{left.pid}}")
while True: signal.pause()
"""
    write_algo(tmp_path, "hangs", hangs)
    command = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", "run", "--algos", str(tmp_path), "--algo", "pt-reference,hangs", "-w", "0",
         "--out", str(out)],
        env=helpers.environment(TMPDIR=str(temporary)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def alive() -> list[int]:
        return [
            int(each) for each in pid.read_text().split() if helpers.alive(int(each))
        ]

    try:
        until(lambda: pid.exists() and len(pid.read_text().split()) == 2)
        command.send_signal(number)
        shown, said = command.communicate(timeout=20)
        until(lambda: not alive() and not any(temporary.iterdir()))
    finally:
        command.kill()
        for each in alive() if pid.exists() else ():
            os.kill(each, signal.SIGKILL)
    document = json.loads(out.read_text())
    (record,) = document["records"]
    assert document["interrupted"] and record["status"] == "passed"
    if number == signal.SIGTERM:
        assert command.returncode == 128 + number and "Traceback" not in said
        assert "interrupted these are the measurements until then" in shown
    else:
        assert command.returncode == -number


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
