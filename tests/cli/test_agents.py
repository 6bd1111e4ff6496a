"""What a program that drives gdn reads: errors, the list of commands, AGENTS.md."""

from __future__ import annotations

import helpers
import pytest

ROOT = helpers.TESTS.parent


@pytest.mark.parametrize(
    ("args", "kind", "suggestion", "code"),
    [
        (["run", "cpp-v2", "--json"], "unknown_algo", "cpp-v1", 2),
        (["run", "--jsn", "--json"], "usage", "--json", 2),
        (["bench", "nope-at-all", "--json=summary"], "unknown_algo", None, 2),
        (["bench", "cpp-v1", "--gpus", "0", "--json"], "missing", None, 3),
    ],
)
def test_an_error_has_an_id_and_the_name_that_was_meant(
    args, kind, suggestion, code, gdn
):
    done = gdn(*args)
    error = done.json["error"]
    assert (done.code, error["id"], error["suggestion"]) == (code, kind, suggestion)
    assert error["code"] == code and error["message"]


def test_every_command_is_listed_with_its_options(gdn):
    listed = {c["name"]: c for c in gdn("commands", "--json").json["commands"]}
    assert {"run", "modal bench", "data build"} <= set(listed)
    options = {tuple(p["names"]): p for p in listed["run"]["parameters"]}
    workload = options["--workload", "-w"]
    assert workload["repeatable"] and not workload["required"] and workload["help"]
    assert options["--algo",]["environment"] == "ALGO"
    assert options["--json",]["flag"]
    assert "gdn run " in gdn("commands").out
    some = gdn("commands", "data", "run", "--json").json["commands"]
    assert [each["name"] for each in some] == ["data build", "data list", "run"]
    assert gdn("commands", "dta", "--json").json["error"]["id"] == "unknown_command"


def test_a_summary_is_short_and_names_the_file_with_the_rest(gdn):
    pytest.importorskip("torch")
    done = gdn("run", "cpp-v1", "-w", "0", "--json=summary")
    (line,) = done.json["lines"]
    assert (line["algo"], line["size"], line["status"]) == ("cpp-v1", "B=1", "passed")
    assert done.json["passed"] and len(done.out) < 1000
    assert '"records"' in open(done.json["records"]).read()


def test_the_page_for_agents_is_thirty_lines():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
