"""`gdn profile` as a user sees it, without a GPU: folders, kept profiles, comparisons,
and every refusal.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import helpers
import pytest

from gdn_cli.machine import inventory
from gdn_cli.profile import session
from gdn_cli.worker import profilers

NO_GPU = pytest.mark.skipif(
    bool(inventory.gpus()), reason="it is about a machine without a GPU"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def profiled(folder):
    """pt-reference below the tool `torch` on the CPU: (how gdn ended, its document)."""
    done = helpers.gdn("profile", "pt-reference", "--tool", "torch", "--device", "cpu", "-w", "batch_size=2",
                       "--out", folder, "--json")  # fmt: skip
    assert done.code == 0, done.err
    return done.json["profiles"][0]


def test_a_profile_has_its_origin_and_its_survey(profiled):
    assert (
        profiled["tool"] == "torch"
        and profiled["op"] == "gdn_decode"
        and profiled["algo"] == "pt-reference"
    )
    assert (
        profiled["mode"] == "cpu"
        and profiled["label"] == "B=2"
        and profiled["l2"] is None
    )
    assert profiled["status"] == "passed" and profiled["reason"] is None
    assert profiled["environment"]["versions"]["torch"]
    survey = profiled["survey"]
    # 2 states of 8 x 128 x 128 f32 in and out; q, k [4, 128], v [8, 128] bf16 in; a, b
    # [8] bf16; A_log, dt_bias [8] f32
    state = 2 * 8 * 128 * 128 * 4
    assert survey["bytes_out"] == state + 2 * 8 * 128 * 2
    assert (
        survey["bytes_in"]
        == state + 2 * (4 + 4 + 8) * 128 * 2 + 2 * 2 * 8 * 2 + 2 * 8 * 4 + 4
    )
    assert survey["bytes_moved"] == survey["bytes_in"] + survey["bytes_out"]
    assert (
        survey["tier"] == "wall"
        and survey["time_us"] > 0
        and survey["copy_us"] > 0
        and survey["large_rate"] > 0
    )
    assert survey["ran"] is None  # nothing ran on a GPU
    assert profiled["verdict"]["bound"] in ("unclear", "bandwidth")


def test_it_has_its_own_folder(profiled, folder):
    here = Path(profiled["folder"])
    assert here.parent == folder and here.name == profiled["name"]
    assert here.name.endswith("-gdn_decode-pt-reference-B2-torch")
    # moved, it is found all the same
    assert (
        json.loads((here / "profile.json").read_text()) | {"folder": str(here)}
        == profiled
    )
    for file in profiled["reading"]["files"]:
        assert (here / file).is_file()


def test_the_list_names_it(profiled, folder):
    row = helpers.gdn("profile", "--list", "--out", folder, "--json").json["profiles"][
        0
    ]
    assert row["name"] == profiled["name"] and row["folder"] == profiled["folder"]
    assert (
        row["bound"] == profiled["verdict"]["bound"]
        and row["time_us"] == profiled["survey"]["time_us"]
    )
    shown = helpers.gdn("profile", "--list", "--out", folder)
    assert shown.code == 0 and "pt-reference" in shown.out


def test_a_kept_profile_is_shown_again_by_its_name(profiled, folder):
    again = helpers.gdn("profile", profiled["name"], "--out", folder, "--json")
    assert again.code == 0 and again.json["profiles"] == [profiled]
    by_path = helpers.gdn("profile", profiled["folder"])
    assert by_path.code == 0 and "pt-reference" in by_path.out


def test_two_kept_profiles_are_compared(profiled, folder, tmp_path):
    slower = json.loads(json.dumps(profiled)) | {"name": "slower", "algo": "slow"}
    slower["survey"]["time_us"] *= 2
    (tmp_path / "slower.json").write_text(json.dumps(slower))
    done = helpers.gdn(
        "profile", profiled["folder"], tmp_path / "slower.json", "--json"
    )
    assert done.code == 0, done.err
    first = done.json["difference"]["rows"][0]
    assert first["b"] == pytest.approx(2 * first["a"]) and first["better"] == "a"


@pytest.mark.slow
def test_a_wrong_algo_is_profiled_and_says_so(tmp_path):
    source = (
        "from .right import run as right\n\ndef run(*x):\n    o, s = right(*x)\n    return o +"
        " 1, s\n"
    )
    helpers.write_algo(tmp_path, "off", source)
    done = helpers.gdn("profile", "off", "--algos", tmp_path, "--tool", "torch", "-w", "batch_size=1",
                       "--out", tmp_path / "kept")  # fmt: skip
    assert done.code == 1
    assert "wrong" in done.out.lower() and "output" in done.out


def test_one_that_cannot_run_leaves_a_line_and_no_folder(tmp_path):
    helpers.write_algo(
        tmp_path, "dies", "import os\n\ndef run(*x):\n    os.kill(os.getpid(), 11)\n"
    )
    kept = tmp_path / "kept"
    done = helpers.gdn(
        "profile",
        "dies",
        "--algos",
        tmp_path,
        "--tool",
        "torch",
        "-w",
        "0",
        "--out",
        kept,
    )
    assert done.code == 1 and done.out == ""
    assert done.complaints.startswith("gdn: gdn_decode/dies: crashed with SIGSEGV")
    assert "Traceback" not in done.err
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["cpp-v1", "--tool", "ncx"], 2, "unknown tool 'ncx'\n  did you mean ncu?"),
        (
            ["cpp-v1", "--tool", "ncu"],
            2,
            "--tool ncu is for algos on a GPU, and gdn_decode/cpp-v1 does not run there\n",
        ),
        (
            ["cuda-v4", "--tool", "cpu"],
            2,
            "--tool cpu is for algos on a CPU, and gdn_decode/cuda-v4 does not run",
        ),
        (["cpp-v1", "--arch", "sm_90a"], 2, "--arch is for --tool sass\n"),
        (
            ["cpp-v1", "--tool", "cpu", "--check", "memcheck"],
            2,
            "--check is for --tool sanitizer\n",
        ),
        (["cuda-v4", "--tool", "sass", "--arch", "hopper"], 2, "hopper"),
        (["cuda-v4", "--tool", "sanitizer", "--check", "memchek"], 2, "memcheck"),
        (["cuda-v4", "--tool", "ncu", "--clocks", "fast"], 2, "unknown clocks 'fast'"),
        (
            ["cuda-v4", "--tool", "ncu", "--device", "cpu"],
            2,
            "--tool ncu profiles code on cuda\n",
        ),
        (["cpp-v2"], 2, "unknown algo 'cpp-v2'"),
        ([], 2, "expected one algo or two, got none\n"),
        (["a", "b", "c"], 2, "expected one algo or two, got 3\n"),
        (["cpp-v1", "-w", "batch_size=x"], 2, "batch_size"),
        (["pt-reference", "gdn_prefill/pt-reference"], 2, "are of different ops"),
    ],
)
def test_refusals(args, code, words):
    done = helpers.gdn("profile", *args)
    assert done.code == code and done.out == ""
    assert (
        done.err.startswith("gdn: ")
        and words in done.err
        and "Traceback" not in done.err
    )
    assert len(done.err.splitlines()) <= 2


@NO_GPU
@pytest.mark.parametrize(
    "tool", [name for name, t in profilers.TOOLS.items() if t.modes == ("cuda",)]
)
def test_without_a_gpu_the_gpu_tools_say_what_helps(tool, tmp_path):
    done = helpers.gdn("profile", "cuda-v4", "--tool", tool, "--out", tmp_path / "kept")
    assert done.code == 3
    assert (
        done.err
        == "gdn: gdn_decode/cuda-v4 cannot run here: no GPU here\n  `gdn modal run` rents a B200"
        " for it, which needs a Modal account and costs money; --tool sass needs no GPU\n"
    )
    assert not (tmp_path / "kept").exists()


@NO_GPU
def test_the_default_tool_is_ncu_for_algos_that_only_run_on_a_gpu():
    done = helpers.gdn("profile", "cuda-v4")
    assert done.code == 3 and "no GPU here" in done.err


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = helpers.gdn(
        "profile",
        "pt-reference",
        "--tool",
        "torch",
        "--device",
        "cpu",
        "--out",
        tmp_path / "file" / "x",
    )
    assert done.code == 2 and "cannot write" in done.err and "--out" in done.err


def test_an_empty_list_is_not_an_error(tmp_path):
    done = helpers.gdn("profile", "--list", "--out", tmp_path)
    assert done.code == 0
    assert helpers.gdn("profile", "--list", "--out", tmp_path, "--json").json == {
        "profiles": []
    }


def test_profiles_of_the_same_second_have_folders_of_their_own(tmp_path):
    names = {
        session.new_folder(
            tmp_path, ["20261121-174500", "gdn_decode", "a/b", "B=1", "ncu"]
        )
        for _ in range(3)
    }
    assert sorted(path.name for path in names) == [
        "20261121-174500-gdn_decode-ab-B1-ncu",
        "20261121-174500-gdn_decode-ab-B1-ncu-2",
        "20261121-174500-gdn_decode-ab-B1-ncu-3",
    ]


def test_listing_and_helping_import_no_torch(tmp_path):
    code = (
        "import sys; from gdn_cli.cli import app; app(['profile', '--list'],"
        " standalone_mode=False); "
    )
    code += "sys.exit('torch' in sys.modules)"
    done = helpers.python("-c", code, env={"GDN_HOME": str(tmp_path)})
    assert done.code == 0, done.err


def test_a_profile_is_not_a_record_file(profiled):
    done = helpers.gdn("report", os.path.join(profiled["folder"], "profile.json"))
    assert done.code == 2 and "holds no records" in done.err
