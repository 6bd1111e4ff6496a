"""`gdn watch`: what it sees of files, and what each save comes to."""

from __future__ import annotations

import itertools
import json

import helpers
import pytest
from cli import test_schemas
from typer.testing import CliRunner

from gdn_cli import errors
from gdn_cli.catalog import registry
from gdn_cli.cli import app
from gdn_cli.report import watch as shown
from gdn_cli.run import planning, watch
from gdn_cli.schema.output import Saved
from gdn_cli.schema.statuses import Status

RIGHT = (
    "from .right import run as right\n\ndef run(*inputs):\n    return right(*inputs)\n"
)
WRONG = RIGHT.replace(
    "return right(*inputs)",
    "output, state = right(*inputs)\n    return output * 2, state",
)


def test_a_change_is_seen_once_and_when_it_is_whole():
    looks = iter("aaabccccdcaaa")
    seen = watch.changes(lambda: next(looks), lambda: None)
    assert list(itertools.islice(seen, 3)) == ["a", "c", "a"]


def test_the_contents_are_sources_and_algo_toml(tmp_path):
    folder = helpers.write_algo(tmp_path, "mine", {"main.py": "x", ".main.py.swp": "y"})
    (folder / "README.md").write_text("z")
    algo = registry.load(str(tmp_path)).find("mine")
    files = {path.name: text for path, text in watch.contents(algo).items()}
    assert files.keys() == {"algo.toml", "main.py"} and files["main.py"] == b"x"


@pytest.fixture
def attempt(tmp_path):
    """Of an algo that is written anew for each."""
    pytest.importorskip("torch")
    folder = helpers.write_algo(tmp_path, "mine", RIGHT)
    work = watch.Attempts(
        load=lambda: registry.load(str(tmp_path)),
        name="mine",
        op=None,
        which=planning.Selected(["0", "batch_size=4"]),
        settings=planning.Settings("check"),
        device="cpu",
        say=print,
    )

    def save(source: str = "", file: str = "main.py") -> Saved:
        (folder / file).write_text(source)
        return work()

    return save


@pytest.mark.slow  # two builds and a comparison
def test_a_right_one_is_compared_with_the_last_right_one(attempt, monkeypatch):
    monkeypatch.setitem(watch._PLAN, "seconds", 0.05)
    first = attempt(RIGHT)
    assert (first.status, first.size, first.ratio) == (Status.PASSED, "B=1", None)
    wrong = attempt(WRONG)
    assert wrong.status is Status.WRONG and wrong.reason.startswith("output: ")
    assert wrong.first_wrong["output"].startswith("at [0, 0, 0, ")
    assert attempt("def run(:\n").status is Status.BUILD_FAILED
    again = attempt(RIGHT + "\n")
    assert again.status is Status.PASSED and again.low < again.ratio < again.high
    assert again.verdict in ("FASTER", "SLOWER", "SAME", "UNCLEAR")
    broken = attempt("nope", "algo.toml")
    assert broken.status is Status.UNPACKABLE and "algo.toml" in broken.reason


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"status": Status.PASSED, "size": "B=1"}, "12:03:11 right at B=1"),
        (
            {"status": Status.PASSED, "size": "B=1", "ratio": 1.04, "low": 0.99, "high": 1.094, "verdict": "UNCLEAR"},
            "12:03:11 right at B=1, UNCLEAR: 1.04x the last good (0.99 to 1.09)",
        ),
        (
            {"status": Status.WRONG, "reason": "output: 3 wrong", "first_wrong": {"output": "at [0, 7]: NaN"}},
            "12:03:11 wrong: output: 3 wrong; first wrong at [0, 7]: NaN",
        ),
        (
            {"status": Status.BUILD_FAILED, "reason": "k.cpp:3:1: error: a\nk.cpp:4:1: error: b"},
            "12:03:11 build failed: k.cpp:3:1: error: a (and 1 more: gdn run)",
        ),
    ],
)  # fmt: skip
def test_a_save_is_a_line(fields, line, capsys):
    shown.show_saved(Saved(time="12:03:11", algo="mine", **fields))
    assert capsys.readouterr().out == f"{line}\n"


def test_an_algo_that_cannot_run_here_is_an_error(gdn):
    done = gdn("watch", "cuda-v5", "--json")
    assert (
        done.code == errors.MISSING
        and "cannot run here" in done.json["error"]["message"]
    )


def test_with_json_each_save_is_a_line_until_ctrl_c(monkeypatch):
    def changes(*_):
        yield from range(2)
        raise KeyboardInterrupt

    results = [
        Saved(time="1", algo="mine"),
        Saved(time="2", algo="mine", status=Status.PASSED),
    ]
    monkeypatch.setattr(watch, "changes", changes)
    monkeypatch.setattr(watch.Attempts, "__call__", lambda self: results.pop(0))
    done = CliRunner().invoke(app, ["watch", "pt-reference", "--json"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        test_schemas.validate("watch", line)
    assert [line["time"] for line in lines] == ["1", "2"]
    says = "gdn: 2 versions of pt-reference seen, 1 right\n"
    assert (done.exit_code, done.stderr) == (errors.OK, says)
