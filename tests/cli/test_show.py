"""`gdn list` and `gdn show`: all algos, and everything about one."""

import pytest
from helpers import REGISTRY
from typer.main import get_command

from gdn_cli.cli import app
from gdn_cli.errors import UsageError
from gdn_cli.paths import ALGOS_DIR, CONFIGS_DIR, PACKAGE


@pytest.mark.torch
def test_list_shows_the_summaries_in_one_line_each(gdn):
    lines = gdn("list").out.splitlines()
    assert max(map(len, lines)) <= 80
    # decode's is the first
    line = next(line for line in lines if line.startswith("cpp-v1 "))
    assert line.split()[:6] == ["cpp-v1", "cpp", "cpu", "C++", "for", "the"]
    wide = gdn("list", env={"COLUMNS": "200"}).out.splitlines()
    assert any(line.endswith(REGISTRY.find("cuda-v5").summary) for line in wide)


def test_show_says_what_is_known(gdn):
    done = gdn("show", "cuda-v5", "--json")
    found, algo = done.json, REGISTRY.find("cuda-v5")
    assert done.code == 0
    assert (found["op"], found["summary"], found["here"], found["reason"]) == (
        "gdn_decode", algo.summary, None, "no GPU here",
    )  # fmt: skip
    files = {f["path"].rpartition("/")[2]: f["lines"] for f in found["files"]}
    assert set(files) == {"kernel.cu", "tuned.h", *(path.name for path in algo.shares)}
    assert files["kernel.cu"] == len(
        (algo.folder / "kernel.cu").read_text().splitlines()
    )
    assert found["provenance"]["license"] == "Apache-2.0"
    assert found["log"] == str(ALGOS_DIR / "gdn_decode" / "README.md")
    assert found["contract"] == str(CONFIGS_DIR / "gdn_decode.toml")
    assert found["reference"].endswith("gdn_decode/pt-reference/main.py")


@pytest.mark.torch
def test_show_on_a_screen(gdn, tmp_path):
    # a home without runs: without a terminal a title is not wrapped, and that of
    # another test's run is long
    done = gdn("show", "cpp-v1", env={"COLUMNS": "60", "GDN_HOME": str(tmp_path)})
    assert max(len(line) for line in done.out.splitlines() if "/" not in line) <= 60
    assert done.code == 0 and "license   Apache-2.0" in done.out
    assert "log " in done.out
    assert "here      yes, on cpu" in done.out and "kernel.cpp " in done.out
    assert "gdn modal run" in gdn("show", "cuda-v1").out
    done = gdn("show", "cpp-v")
    assert done.code == 2 and "did you mean cpp-v1" in done.err


@pytest.mark.parametrize("algo", sorted(a.full_name for a in REGISTRY.algos))
def test_every_algo_is_in_the_log_of_its_op(algo):
    op, _, name = algo.partition("/")
    assert f"`{name}`" in (ALGOS_DIR / op / "README.md").read_text()


# --- names where files may stand, and files of another kind


@pytest.mark.torch
def test_names_of_algos_stand_where_files_do(gdn):
    done = gdn("run", "cpp-v1", "pt-reference", "-w", "0", "--json")
    assert done.code == 0 and {r["algo"] for r in done.json["records"]} == {
        "cpp-v1",
        "pt-reference",
    }
    # what is typed goes before a variable
    done = gdn("run", "cpp-v1", "-w", "0", "--json", env={"ALGO": "nope"})
    assert done.code == 0 and {r["algo"] for r in done.json["records"]} == {"cpp-v1"}
    done = gdn("bench", "cpp-v")
    assert (done.code, done.err.splitlines()[:1]) == (
        2,
        ["gdn: unknown algo 'cpp-v'"],
    ) and "did you mean cpp-v1" in done.err


def test_a_file_that_is_no_algo(tmp_path, gdn):
    root = PACKAGE.parent.parent
    packed = tmp_path / "s.json"
    assert gdn("pack", "--algo", "cpp-v1", "-o", packed).code == 0
    for args, says in (
        (["run", "results/h200/decode-sweep.json"], "required field `name`"),
        (["run", "algos/gdn_decode/cpp-v1"], "unknown op 'algos/gdn_decode'"),
        (["report", packed], "holds no records of gdn"),
    ):
        done = gdn(*args, cwd=root)
        assert done.code == 2 and says in done.err and "Traceback" not in done.err


def test_errors_with_json_are_one_document(gdn):
    done = gdn("bench", "--algo", "cpp-v", "--json")
    hint = "did you mean cpp-v1? `gdn list` shows all"
    assert (done.code, done.json) == (
        2,
        {
            "error": {
                "id": "unknown_algo",
                "message": "unknown algo 'cpp-v'",
                "hint": hint,
                "suggestion": "cpp-v1",
                "code": 2,
            }
        },
    )
    assert done.err == f"gdn: unknown algo 'cpp-v'\n  {hint}\n"
    done = gdn("data", "list", "--nope", "--json")
    assert done.code == 2 and "No such option: --nope" in done.json["error"]["message"]


def test_suggestions_are_of_things_that_exist(gdn):
    done = gdn("bench", env={"ALGO": "nope"})
    assert done.err == "gdn: unknown algo 'nope'\n  `gdn list` shows all\n"


@pytest.mark.torch
def test_what_could_not_run_is_an_error_where_nothing_ran(gdn):
    done = gdn("run", "cuda-v5")
    assert (
        done.code == 3 and done.out == "" and "not run cuda-v5: no GPU here" in done.err
    )
    done = gdn("run", "cuda-v5", "cpp-v1", "-w", "0")
    assert "not run cuda-v5" in done.out and done.complaints == ""


def test_tune_writes_into_no_installed_gdn(monkeypatch, capsys):
    monkeypatch.setattr("gdn_cli.paths.IN_CHECKOUT", False)
    with pytest.raises(UsageError, match="is part of the installed gdn") as e:
        get_command(app).main(["tune", "--algo", "cuda-v5"], standalone_mode=False)
    assert "gdn new my-cuda-v5 --from gdn_decode/cuda-v5 --into DIR" in e.value.hint
