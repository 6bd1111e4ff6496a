"""Reading of proton's trees. The CUDA kernel's node is an H200's (Triton 3.6), all its
figures but the four stall reasons that were not written down; the Triton kernel's nodes
follow the same layout.
"""

from __future__ import annotations

import json
import shutil

import helpers
import profiles
import pytest
import screens
from worker.profilers.test_cpu import profiled

from gdn_cli.errors import GdnError, MissingError
from gdn_cli.machine.inventory import Machine
from gdn_cli.worker.profilers import Ask, Reply, Run, proton

DATA = helpers.TESTS / "data" / "proton"
SOLUTION = {
    "spec": {"language": "triton"},
    "sources": [
        {
            "path": "kernel.py",
            "content": "import triton\n    m = tl.sum(s * k)\n    s = tl.load(p_s)\n",
        }
    ],
}
ASK = Ask(SOLUTION)
TIMES, SAMPLES = (Run(name) for name in ("times", "samples"))


def replies(times=None, samples=None) -> list[Reply]:
    ok = {"calls": 100, "failed": None}
    return [
        Reply(TIMES, "done", answer=times or ok),
        samples or Reply(SAMPLES, "done", answer=ok),
    ]


@pytest.fixture
def folder(tmp_path):
    for file in DATA.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def test_means_by_kernel_and_stalls_by_line_and_the_flush_is_not_of_the_call(folder):
    screens.check("proton", profiles.told(proton.read(ASK, folder, replies())))


@pytest.mark.parametrize("name", ["/a/b/kernel.py:12@fn", "/a/b/kernel.py:fn@12"])
def test_both_spellings_of_a_source_line(name):
    assert proton._line(name) == ("/a/b/kernel.py", 12)


def test_a_kernel_without_own_figures_is_known_by_its_lines(tmp_path):
    tree = json.loads((DATA / "samples.hatchet").read_text())
    triton = tree[0]["children"][1]["children"][1]
    triton["metrics"] = {}
    (tmp_path / "x.hatchet").write_text(json.dumps(tree))
    found = proton.load(tmp_path / "x.hatchet")
    assert set(found) == {"gdn_decode_v4", "gdn_decode_kernel"}
    assert found["gdn_decode_kernel"].reasons.total() == 900


@pytest.mark.parametrize(
    "samples, reason",
    [
        (Reply(SAMPLES, "done", answer={"calls": 0, "failed": "no CUPTI"}), "no CUPTI"),
        (Reply(SAMPLES, "crashed", "crashed with SIGSEGV"), "SIGSEGV"),
    ],
)
def test_no_samples_are_a_note_and_the_times_remain(folder, samples, reason):
    (folder / "samples.hatchet").unlink()
    reading = proton.read(ASK, folder, replies(samples=samples))
    assert reading.found[1].value("time_us") == 2.1
    assert not any(found.tables for found in reading.found)
    assert any(reason in note for note in reading.notes)


def test_without_times_there_is_nothing_to_tell(folder):
    failed = replies(times={"calls": 0, "failed": "Unknown profiler"})
    with pytest.raises(MissingError, match="cannot start: Unknown profiler"):
        proton.read(ASK, folder, failed)
    tree = json.loads((DATA / "times.hatchet").read_text())
    tree[0]["children"].pop()  # the calls' scope
    (folder / "times.hatchet").write_text(json.dumps(tree))
    with pytest.raises(MissingError, match="saw no kernel"):
        proton.read(ASK, folder, replies())
    (folder / "times.hatchet").write_text('[{"children": [')
    with pytest.raises(GdnError, match="is not valid"):
        proton.read(ASK, folder, replies())


def test_find_says_what_is_missing():
    with pytest.raises(MissingError, match="triton is missing"):
        proton.find(Machine(has_package=lambda name: False))


@pytest.mark.gpu
def test_a_triton_kernel_on_a_gpu(tmp_path):
    reading = profiled("proton", "fla-recurrent", tmp_path, mode="cuda")
    (kernel,) = [found for found in reading.found if found.name]
    assert kernel.name == "gdn_decode_kernel"
    assert kernel.value("launches") == 1.0 and kernel.value("share") == 100.0
    assert 0.1 < kernel.value("time_us") < 1000
    assert {"times.hatchet", "samples.hatchet"} == set(reading.files)
    assert [table.key for table in kernel.tables] == ["samples", "hot"]
    for table in kernel.tables:
        assert 50 < sum(row[1] for row in table.rows) <= 100.001
    assert any(
        row[0].startswith("kernel.py:") and row[3] for row in kernel.tables[1].rows
    )
