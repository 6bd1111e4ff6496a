"""The types of records: reading, refusals in one line, and who is at fault for a status."""

from __future__ import annotations

import copy
import json

import building
import helpers
import msgspec
import pytest

from gdn_cli.errors import FAILED, MISSING, OK, REMOTE, GdnError, UsageError
from gdn_cli.records import store
from gdn_cli.run import execute, jobs
from gdn_cli.schema import record_types
from gdn_cli.schema.record_types import Blame, Record, Status
from gdn_cli.worker import messages, serve

RESULTS = helpers.TESTS.parent / "results"
_DELETE = object()


def committed():
    found = (json.loads(file.read_text()) for file in sorted(RESULTS.glob("*/*.json")))
    return [
        d
        for d in found
        if isinstance(d, dict) and d.get("schema") in (1, 2) and "records" in d
    ]


# --- reading


@pytest.mark.skipif(not RESULTS.exists(), reason="the records are in a checkout only")
def test_every_committed_file_is_read_and_nothing_of_it_is_lost():
    documents = committed()
    assert len(documents) > 20 and {d["schema"] for d in documents} == {1, 2}
    for old in documents:
        new = json.loads(store.dumps(record_types.document_of(old)))
        assert not list(lost(old, new))


def lost(old, new, where="$"):
    """Values of the old JSON that are not in the new one. Schema 1's clocks are a state
    after the measurement.
    """
    if isinstance(old, dict):
        for key, value in old.items():
            if key == "clocks":
                yield from lost(value, new["gpu_state"]["after"], f"{where}.{key}")
            elif key in new or value not in (None, [], {}, False):
                yield from lost(value, new.get(key), f"{where}.{key}")
    elif isinstance(old, list):
        if not isinstance(new, (list, tuple)) or len(old) != len(new):
            yield where
        else:
            for i, pair in enumerate(zip(old, new, strict=True)):
                yield from lost(*pair, f"{where}[{i}]")
    elif old != new or type(old) is not type(new):
        yield where


def test_a_record_of_schema_1_is_what_it_would_be_today(tmp_path):
    timing = {
        "tier": "cupti",
        "median_us": 2.0,
        "low_us": 2.0,
        "high_us": 2.0,
        "samples": 9,
    }
    old = {"op": "gdn_decode", "algo": "a", "mode": "cuda", "status": "passed"}
    records = [
        old | {"timing": timing, "clocks": {"sm_mhz": 1980}},
        old | {"status": "wrong"},
    ]
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"schema": 1, "command": "bench", "records": records}))
    a, b = store.load(file).records
    assert (a.tier, a.timing.histogram, a.timing.ci_low_us) == ("cupti", (), None)
    assert (a.gpu_state.after.sm_mhz, a.median_us) == (1980, 2.0)
    assert (b.tier, b.timing, b.workload, b.median_us) == (None, None, None, None)


def test_a_fresh_record_is_read_as_it_was_written(gdn, tmp_path):
    made = gdn("run", "--algo", "pt-reference", "-w", "0", "--out", tmp_path / "x.json")
    assert made.code == 0, made.err
    written = json.loads((tmp_path / "x.json").read_text())
    assert json.loads(store.dumps(store.load(tmp_path / "x.json"))) == written


@pytest.mark.parametrize("what", ["record", "reply"])
def test_schema_names_every_field(what, gdn):
    done = gdn("schema", what)
    form = {"record": record_types.Document, "reply": messages.Reply}[what]
    assert done.json["$defs"][form.__name__]["properties"].keys() == set(
        form.__struct_fields__
    )
    assert done.json["$defs"]["Record"]["properties"].keys() == set(
        Record.__struct_fields__
    )
    assert set(done.json["$defs"]["Status"]["enum"]) == {
        status.value for status in Status
    }


def test_an_unknown_schema_is_one_line(gdn):
    done = gdn("schema", "recrod")
    assert (done.code, done.out) == (
        2,
        "",
    ) and "unknown schema 'recrod'\n  did you mean record?" in done.err


# --- refusals

GOOD = {
    "schema": 2, "command": "compare", "time": "2026-11-21T14:12:11Z", "options": {"l2": "cold"},
    "environments": {"cuda": {"gpu": "NVIDIA H200", "sms": 132, "versions": {"torch": "2.11"}}},
    "missing": [{"op": "gdn_decode", "algo": "c", "reason": "no nvcc"}],
    "modal": {"gpu": "B200", "image": "gdn", "command": "run", "calls": [{"id": "fc", "keys": ["k"], "limit_s": 60}]},
    "comparisons": [
        {"op": "gdn_decode", "mode": "cuda", "tier": "cupti", "baseline": "a", "algo": "b", "ratio": 1.1, "low": 1.0,
         "high": 1.2, "verdict": "FASTER", "rounds": 9, "log_sd": 0.1, "df": 8, "level": 0.99, "threshold": 0.005,
         "method": "m", "resolution": 0.01},
    ],
    "records": [
        {"op": "gdn_decode", "algo": "a", "source_hash": None, "mode": "cuda", "tier": "cupti",
         "workload": {"uuid": "u", "axes": {"batch_size": 1}, "index": 0, "origin": "twin"}, "status": "passed",
         "reason": None, "check": {"passed": True, "errors": {"output": 1e-3}, "max_abs_error": None},
         "timing": {"tier": "cupti", "median_us": 2.0, "low_us": 1.9, "high_us": 2.1, "samples": 9, "kernels": 1,
                    "histogram": [[2.0, 9]], "host": None},
         "doubts": [], "gpu_state": {"before": {"sm_mhz": 345}, "during": [], "after": {"throttle": ["hw_thermal"]}}},
    ],
}  # fmt: skip
R, T = "records.0.", "records.0.timing."


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("schema", 3, "has schema 3, this gdn reads 1 and 2"),
        ("schema", _DELETE, "has schema None"),
        ("schema", [2] * 99, "has schema [2, 2"),
        ("records", _DELETE, "holds no records"),
        ("records", {}, "holds no records"),
        ("command", _DELETE, "missing required field `command`"),
        ("environments.cuda", "H200", "Expected `object`, got `str` - at `$.environ"),
        ("comparisons.0.log_sd", 1e300, "Expected `float` <= 1000000.0"),
        (R + "status", "fine", "Invalid enum value 'fine' - at `$.records[0].status`"),
        (R + "check.errors.output", float("nan"), "JSON is malformed"),
        (T + "median_us", 0, "Expected `float` >= 1e-100 - at `$.records[0].timing.me"),
        (T + "samples", 10**30, "does not fit in 64 bits"),
        (R + "answer", "bomb", "nested more than 100 deep"),
    ],
)
def test_a_malformed_document_is_one_line_with_file_and_path(
    key, value, said, tmp_path
):
    document = copy.deepcopy(GOOD)
    *path, last = (int(step) if step.isdigit() else step for step in key.split("."))
    inner = document
    for step in path:
        inner = inner[step]
    if value is _DELETE:
        del inner[last]
    else:
        inner[last] = value
    text = json.dumps(document).replace('"bomb"', "[" * 500 + "]" * 500)
    refused(tmp_path, text, said)


def refused(folder, text: str, said: str) -> None:
    file = folder / "bad.json"
    file.write_text(text)
    with pytest.raises(UsageError) as e:
        store.load(file)
    assert e.value.message.startswith(str(file)) and said in e.value.message
    assert "\n" not in e.value.message and len(e.value.message) < 400


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, '{"records": 3}', "\x00"],
)
def test_a_file_that_is_not_a_document_is_one_line(text, tmp_path):
    refused(tmp_path, text, "holds no records of gdn")


def test_a_good_document_is_good(tmp_path):
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    assert store.load(tmp_path / "good.json").records[0].median_us == 2.0


# --- whose fault


@pytest.mark.parametrize(
    ("status", "code", "blame", "exit"),
    [
        ("passed", None, Blame.NONE, OK),
        ("wrong", None, Blame.ALGO, FAILED),
        ("crashed", None, Blame.ALGO, FAILED),
        ("unpackable", None, Blame.ALGO, FAILED),
        ("build_failed", FAILED, Blame.ALGO, FAILED),
        # nvcc, or a package, is not here
        ("build_failed", MISSING, Blame.MACHINE, MISSING),
        ("tier_unavailable", None, Blame.MACHINE, MISSING),
        ("refused", MISSING, Blame.MACHINE, MISSING),  # the data
        ("remote_failed", REMOTE, Blame.REMOTE, REMOTE),
        ("crashed", REMOTE, Blame.REMOTE, REMOTE),
    ],
)
def test_everybody_asks_the_record_whose_fault_it_is(status, code, blame, exit):
    record = building.record("a", status=status, code=code)
    assert (
        record.blame is blame and jobs.Outcome(record.status, code=code).blame is blame
    )
    assert execute.exit_code(building.document(record), True) == exit


def test_every_status_says_whose_fault_it_is():
    assert {status.blame for status in Status} == set(Blame)
    assert [s for s in Status if s.blame is Blame.NONE] == [Status.DONE, Status.PASSED]


# --- the worker's side


def test_events_travel_whatever_an_algo_has_said():
    record = building.record(
        "a", status="error", reason="half a character: \ud800", trace=["x"]
    )
    assert msgspec.convert(json.loads(serve._json(record)), Record) == record
    nobody = messages.Event(at=None)
    # which is not the same as nothing said
    assert json.loads(serve._json(nobody)) == {"at": None}


def test_names_that_are_not_utf_8_do_not_make_a_file_unreadable(tmp_path):
    """A folder's name is in an option, in a trace, in a reason."""
    record = building.record(
        "a", status="error", reason="m\udcffy: no", trace=["m\udcffy", "größe 😀"]
    )
    options = {"dataset": "/m\udcffy", "m\udcffy": [1]}
    document = record_types.Document(
        schema=2, command="run", options=options, records=[record]
    )
    file = tmp_path / "r.json"
    file.write_text(store.dumps(document))
    back = store.load(file)
    assert back.records[0].reason == "m\ufffdy: no" and back.records[0].trace == [
        "m\ufffdy",
        "größe 😀",
    ]
    assert back.options == {"dataset": "/m\ufffdy", "m\ufffdy": [1]}


def test_a_name_without_a_file_is_one_line(tmp_path):
    with pytest.raises(GdnError, match="none.json: cannot be read"):
        store.load(tmp_path / "none.json")
