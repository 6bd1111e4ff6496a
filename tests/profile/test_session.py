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
    expected = {
        "tool": "torch",
        "op": "gdn_decode",
        "algo": "pt-reference",
        "mode": "cpu",
        "label": "B=2",
        "l2": None,
        "status": "passed",
        "reason": None,
    }
    assert profiled | expected == profiled
    assert profiled["environment"]["versions"]["torch"]
    survey = profiled["survey"]
    # 2 states of 8 x 128 x 128 f32 in and out; q, k [4, 128], v [8, 128] bf16 in; a, b
    # [8] bf16; A_log, dt_bias [8] f32
    state = 2 * 8 * 128 * 128 * 4
    bytes_out = state + 2 * 8 * 128 * 2
    bytes_in = state + 2 * (4 + 4 + 8) * 128 * 2 + 2 * 2 * 8 * 2 + 2 * 8 * 4 + 4
    assert (survey["bytes_in"], survey["bytes_out"]) == (bytes_in, bytes_out)
    assert survey["bytes_moved"] == bytes_in + bytes_out
    assert min(survey[key] for key in ("time_us", "copy_us", "large_rate")) > 0
    # nothing ran on a GPU
    assert survey["tier"] == "wall" and survey["ran"] is None
    assert profiled["verdict"]["bound"] in ("unclear", "bandwidth")


def test_it_has_its_own_folder(profiled, folder):
    here = Path(profiled["folder"])
    assert here == folder / profiled["name"]
    assert here.name.endswith("-gdn_decode-pt-reference-B2-torch")
    # moved, it is found all the same
    stored = json.loads((here / "profile.json").read_text())
    assert "folder" not in stored and stored | {"folder": str(here)} == profiled
    assert all((here / file).is_file() for file in profiled["reading"]["files"])


def test_the_list_names_it(profiled, folder):
    done = helpers.gdn("profile", "--list", "--out", folder, "--json")
    (row,) = done.json["profiles"]
    assert row["name"] == profiled["name"] and row["folder"] == profiled["folder"]
    assert row["bound"] == profiled["verdict"]["bound"]
    assert row["time_us"] == profiled["survey"]["time_us"]


def test_a_kept_profile_is_shown_again_by_its_name(profiled, folder):
    again = helpers.gdn("profile", profiled["name"], "--out", folder, "--json")
    assert again.code == 0 and again.json["profiles"] == [profiled]
    by_path = helpers.gdn("profile", profiled["folder"])
    assert by_path.code == 0 and "pt-reference" in by_path.out


def test_two_kept_profiles_are_compared(profiled, tmp_path):
    survey = profiled["survey"] | {"time_us": 2 * profiled["survey"]["time_us"]}
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(profiled | {"name": "slower", "survey": survey}))
    done = helpers.gdn("profile", profiled["folder"], slower, "--json")
    assert done.code == 0, done.err
    first = done.json["difference"]["rows"][0]
    assert first["b"] == pytest.approx(2 * first["a"]) and first["better"] == "a"


@pytest.mark.slow
def test_a_wrong_algo_has_no_time_and_is_one_line(tmp_path):
    body = "    o, s = right(*x)\n    return o + 1, s\n"
    source = f"from .right import run as right\n\ndef run(*x):\n{body}"
    helpers.write_algo(tmp_path, "off", source)
    torch = "--algos", tmp_path, "--tool", "torch", "-w", "batch_size=1"
    done = helpers.gdn("profile", "off", *torch, "--out", tmp_path / "kept")
    assert done.code == 1 and done.err.startswith("gdn: gdn_decode/off: output: ")


def test_one_that_cannot_run_leaves_a_line_and_no_folder(tmp_path):
    source = "import os\n\ndef run(*x):\n    os.kill(os.getpid(), 11)\n"
    helpers.write_algo(tmp_path, "dies", source)
    kept = tmp_path / "kept"
    torch = "--algos", tmp_path, "--tool", "torch", "-w", "0"
    done = helpers.gdn("profile", "dies", *torch, "--out", kept)
    assert done.code == 1 and done.out == ""
    assert done.complaints.startswith("gdn: gdn_decode/dies: crashed with SIGSEGV")
    assert "Traceback" not in done.err and list(kept.iterdir()) == []


@pytest.mark.parametrize(
    "args, words",
    [
        ("cpp-v1 --tool ncx", "did you mean ncu?"),
        ("cpp-v1 --tool ncu", "cpp-v1 does not run there"),
        ("cuda-v4 --tool cpu", "cuda-v4 does not run there"),
        ("cpp-v1 --arch sm_90a", "--arch is for --tool sass"),
        ("cpp-v1 --tool cpu --check memcheck", "--check is for --tool sanitizer"),
        ("cuda-v4 --tool sass --arch hopper", "hopper"),
        ("cuda-v4 --tool sanitizer --check memchek", "memcheck"),
        ("cuda-v4 --tool ncu --clocks fast", "unknown clocks 'fast'"),
        ("cuda-v4 --tool ncu --device cpu", "unknown device of ncu 'cpu'"),
        ("cpp-v2", "unknown algo 'cpp-v2'"),
        ("", "expected one algo or two, got none"),
        ("cpp-v1 -w batch_size=x", "batch_size"),
        ("pt-reference gdn_prefill/pt-reference", "are of different ops"),
    ],
)
@pytest.mark.sampled(2)
def test_refusals(args, words):
    done = helpers.gdn("profile", *args.split())
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("gdn: ") and words in done.err
    assert "Traceback" not in done.err and len(done.err.splitlines()) <= 2


GPU_TOOLS = [name for name, t in profilers.TOOLS.items() if t.modes == ("cuda",)]


@NO_GPU
@pytest.mark.parametrize("tool", [(), *(("--tool", name) for name in GPU_TOOLS)])
def test_without_a_gpu_the_gpu_tools_say_what_helps(tool, tmp_path):
    done = helpers.gdn("profile", "cuda-v4", *tool, "--out", tmp_path / "kept")
    assert done.code == 3
    assert done.err.startswith("gdn: gdn_decode/cuda-v4 cannot run here: no GPU here\n")
    assert done.err.endswith("; --tool sass needs no GPU\n")
    assert not (tmp_path / "kept").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    out = "--out", tmp_path / "file" / "x"
    done = helpers.gdn("profile", "pt-reference", "--device", "cpu", *out)
    assert done.code == 2 and "cannot write" in done.err and "--out" in done.err


def test_an_empty_list_is_not_an_error(tmp_path):
    done = helpers.gdn("profile", "--list", "--out", tmp_path, "--json")
    assert done.code == 0 and done.json == {"profiles": []}


def test_profiles_of_the_same_second_have_folders_of_their_own(tmp_path):
    names = [session.new_folder(tmp_path, ["1", "a/b", "B=1"]).name for _ in range(3)]
    assert names == ["1-ab-B1", "1-ab-B1-2", "1-ab-B1-3"]


def test_listing_and_helping_import_no_torch(tmp_path):
    code = (
        "import sys; from gdn_cli.cli import app; app(['profile', '--list'],"
        " standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    done = helpers.python("-c", code, env={"GDN_HOME": str(tmp_path)})
    assert done.code == 0, done.err


def test_a_profile_is_not_a_record_file(profiled):
    done = helpers.gdn("report", os.path.join(profiled["folder"], "profile.json"))
    assert done.code == 2 and "holds no records" in done.err
