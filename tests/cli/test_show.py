"""`gdn list` and `gdn show`: all algos, and everything about one."""

import pytest
import reports
from helpers import REGISTRY
from typer.main import get_command

from gdn_cli.catalog import registry
from gdn_cli.cli import app
from gdn_cli.errors import UsageError
from gdn_cli.machine.inventory import GET_GPU, MODAL, Place
from gdn_cli.paths import ALGOS_DIR, CONFIGS_DIR, PACKAGE
from gdn_cli.report import algos as shown

WHERE = (
    f"looked in {ALGOS_DIR}; GDN_ALGOS or --algos adds a folder of yours; `gdn list`"
    " shows all"
)


@pytest.mark.torch
def test_list_shows_the_summaries_in_one_line_each(gdn, tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    lines = gdn("list", env=home).out.splitlines()
    assert max(map(len, lines)) <= 80
    # decode's is the first
    line = next(line for line in lines if line.startswith("cpp-v1 "))
    assert line.split()[:5] == ["cpp-v1", "cpu", "C++", "for", "the"]
    wide = gdn("list", env=home | {"COLUMNS": "200"}).out.splitlines()
    assert any(line.endswith(REGISTRY.find("cuda-v5").summary) for line in wide)


def names_of(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line]


def test_list_has_a_line_for_each_other_op_and_the_best_time(gdn, tmp_path):
    record = reports.record("cpp-v1", 8, 2.0, "wall", mode="cpu", doubts=["noisy"])
    runs = tmp_path / "runs"
    runs.mkdir()
    reports.write(runs, reports.document([record]))
    lines = gdn("list", env={"GDN_HOME": str(tmp_path)}).out.splitlines()
    (mine,) = [line for line in lines if line.startswith("cpp-v1 ")]
    assert "~2.0 us  B=8" in mine
    names = names_of(lines)
    assert [name for name in names if name in REGISTRY.ops] == list(REGISTRY.ops)
    of_decode = [algo.name for algo in REGISTRY.algos_of("gdn_decode")]
    # without torch the reason takes several lines of a narrow column
    assert [name for name in names if name in of_decode] == of_decode
    assert "sdpa" not in names
    assert "sdpa" in names_of(gdn("list", "--all").out.splitlines())


def test_only_algos_that_lack_a_gpu_are_offered_one(capsys):
    places = [Place(None, "no GPU here", GET_GPU), Place(None, "x", "pip install x")]
    algos = REGISTRY.algos_of("gdn_decode")[:3]
    shown.show_list([*zip(algos, [*places, places[1]], strict=True)], [], {})
    footer = " ".join(capsys.readouterr().out.split("\n\n")[1].split())
    assert footer.startswith(f"to run 1 of them: {MODAL} to run 2 of them: pip install")


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
    assert "hint      `gdn list` says how" in gdn("show", "cuda-v1").out
    # the variable, and the folder in place of the name
    mine = REGISTRY.find("cpp-v1").folder
    assert gdn("show", env={"ALGO": "cpp-v1"}).out.startswith("gdn_decode/cpp-v1: ")
    assert gdn("show", ".", cwd=mine).out.startswith("gdn_decode/cpp-v1: ")
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
        (["run", "algos"], "algos: no algo.toml, so it is no algo"),
        (["run", "README.md"], "README.md: no algo.toml beside it, so it is no algo"),
        (["report", packed], "holds no records of gdn"),
    ):
        done = gdn(*args, cwd=root)
        assert done.code == 2 and says in done.err and "Traceback" not in done.err


def test_errors_with_json_are_one_document(gdn):
    done = gdn("bench", "--algo", "cpp-v", "--json")
    hint = f"did you mean cpp-v1? {WHERE}"
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
    assert done.err == f"gdn: unknown algo 'nope'\n  {WHERE}\n"


def test_a_folder_or_a_file_of_it_is_an_algo(tmp_path, write_algo, monkeypatch):
    folder = write_algo(tmp_path / "mine", "my-v1", "def run(): ...")
    known = registry.load()
    monkeypatch.chdir(tmp_path)
    named = "mine/gdn_decode/my-v1", "mine/gdn_decode/my-v1/main.py", folder
    for name in map(str, named):
        assert known.find(name).folder == folder
    assert known.find(named[0], "gdn_decode_qk2_v6").op == "gdn_decode_qk2_v6"
    with pytest.raises(UsageError, match="is of gdn_decode, not of gdn_prefill"):
        known.find(named[0], "gdn_prefill")
    # a name goes before a folder of that name
    (tmp_path / "cpp-v1").mkdir()
    assert known.find("cpp-v1").own_folder.parent == ALGOS_DIR / "gdn_decode"


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
