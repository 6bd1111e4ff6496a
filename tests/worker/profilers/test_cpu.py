"""The cpu tool on real algos, through the worker: torch's ops, a C++ algo's functions by perf."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from worker.profilers import targets

from gdn_cli.catalog import registry
from gdn_cli.machine import inventory
from gdn_cli.parsing import to_json
from gdn_cli.worker import profilers
from gdn_cli.worker.profilers import Reading, cpu, perf, symbols

CPP = """
#include <thread>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
namespace ffi = tvm::ffi;
namespace {
struct Job { volatile double sum = 0; };
__attribute__((noinline)) void burn(Job& job, int n) {
  for (int i = 0; i < n; ++i) {
    job.sum = job.sum + 1.0 / (i + 1);
  }
}
}  // namespace
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  Job job;
  std::thread thread([&] { burn(job, 300000); });
  thread.join();
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
"""


def profiled(
    tool: str, name: str, folder: Path, algos: Path | None = None, **more: str
) -> Reading:
    """A tool's whole way for one decode, each of its runs in a worker."""
    known = registry.load(str(algos)) if algos else registry.load()
    sizes = {"bytes_in": 3_000_000, "bytes_out": 1_000_000}
    ask, replies = targets.replies(tool, known, name, folder, **sizes, **more)
    reading = profilers.module(tool).read(ask, folder, replies)
    assert msgspec.convert(to_json(reading), Reading) == reading
    return reading


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cpu, "_SECONDS", 0.6)


@pytest.fixture(scope="module")
def burner(tmp_path_factory, write_algo):
    folder = tmp_path_factory.mktemp("algos")
    write_algo(
        folder,
        "burner",
        {"kernel.cpp": CPP},
        language="cpp",
        entry_point="kernel.cpp::run",
        destination_passing=True,
    )
    return folder


def test_libraries_of_a_folder_that_is_a_link(tmp_path):
    (tmp_path / "builds").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "builds")
    library = shutil.copy(_ctypes.__file__, tmp_path / "builds" / "own.so")
    ctypes.CDLL(str(link / "own.so"))
    assert list(perf.loaded(str(link))) == [str(library)]


@pytest.mark.skipif(inventory.cxx() is None, reason="no C++ compiler")
@pytest.mark.slow
def test_perf_finds_the_function_that_takes_the_time(burner, tmp_path, monkeypatch):
    # unoptimised, the time is in other lines
    monkeypatch.setenv("CXX", os.environ["GDN_TESTS_CXX"])
    if perf.missing() is not None:
        pytest.skip("perf cannot be used here")
    reading = profiled("cpu", "burner", tmp_path, algos=burner)
    (found,) = reading.found
    # a C++ algo has no ops
    functions, hot = found.tables
    name, library, share, count = functions.rows[0]
    assert name == "burn" and "burner" in library and share > 50 and count > 5
    assert sum(row[2] for row in functions.rows) > 90
    assert reading.files == ("perf.data",)
    where, share, text = hot.rows[0]
    assert where.startswith("kernel.cpp:1") and share > 50
    assert text in (
        "job.sum = job.sum + 1.0 / (i + 1);",
        "for (int i = 0; i < n; ++i) {",
    )


@pytest.mark.skipif(inventory.cxx() is None, reason="no C++ compiler")
@pytest.mark.slow
def test_without_perf_a_cpp_algo_has_its_figures_and_torchs_ops(
    burner, tmp_path, monkeypatch
):
    monkeypatch.setattr(perf, "missing", lambda: "there is no perf here")
    reading = profiled("cpu", "burner", tmp_path, algos=burner)
    (found,) = reading.found
    assert [t.key for t in found.tables] == ["ops"] and reading.files == ()
    # it joins a thread
    assert found.value("switches_voluntary") > 0.5 and found.value("cpu_us") > 0
    assert 0 < found.value("threads_busy") <= (os.cpu_count() or 1) + 0.5
    rate = 4_000_000 / found.value("time_us") / 1e3
    assert found.value("rate") == pytest.approx(rate)
    assert reading.notes == ("no functions: there is no perf here",)


@pytest.mark.slow
def test_the_ops_of_a_torch_algo(tmp_path, monkeypatch, write_algo):
    algos = tmp_path / "algos"
    body = "    y = q.float()\n    for _ in range(3):\n        y = y @ y.mT\n    return y, state\n"
    write_algo(
        algos,
        "three",
        f"import torch\n\ndef run(q, k, v, state, A_log, a, dt_bias, b, scale):\n{body}",
    )
    monkeypatch.setattr(perf, "missing", lambda: "perf is not permitted here (why)")
    reading = profiled("cpu", "three", tmp_path, algos=algos)
    (found,) = reading.found
    (ops,) = found.tables
    per_call = {row[0]: row[1] for row in ops.rows}
    assert per_call["aten::matmul"] == 3 and per_call["(outside any op)"] == 1
    assert sum(row[3] for row in ops.rows) == pytest.approx(100)
    assert "torch uses" in next(f.note for f in found.facts if f.key == "threads_busy")
    assert reading.notes == ("no functions: perf is not permitted here (why)",)


def test_a_perf_that_is_not_permitted_says_why(tmp_path, monkeypatch):
    targets.script(tmp_path / "perf", "#!/bin/sh\necho 'Error:' >&2\nexit 255\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert perf.missing().startswith("perf does not work here ['Error:']: as root")


# --- names and samples

V4 = "_ZN41_GLOBAL__N__4eb81770_9_kernel_cu_b147438113gdn_decode_v4EPK13__nv_bfloat16S2_S2_PKfS4_S2_S4_S2_fPS0_Pf"


@pytest.mark.parametrize(
    "name, plain",
    [
        (V4, "gdn_decode_v4"),
        ("gdn_decode_kernel", "gdn_decode_kernel"),
        ("<unnamed>::gdn_decode_v4(const __nv_bfloat16 *, float)", "gdn_decode_v4"),
        (
            "void at::f<4, at::g<float> >(int, float (*)(int))",
            "at::f<4, at::g<float> >",
        ),
        ("void at::k<4, at::F(int)>(int, T3)", "at::k<4, at::F(int)>"),
        ("void (anonymous namespace)::k<float, (int)4>(int)", "k<float, (int)4>"),
        ("gdn::Pool::serve(int) [clone .isra.0]", "gdn::Pool::serve"),
        ("A::operator()(int) const", "A::operator()"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("(no symbol)", "(no symbol)"),
        ("_Zbroken", "_Zbroken"),
    ],
)
def test_names_are_short(name, plain):
    assert symbols.short(name) == plain


def test_functions_by_their_samples():
    spots = Counter(
        {
            perf.Spot(1, "(anonymous namespace)::burn(int)", "/b/k.so"): 1500,
            perf.Spot(2, "(anonymous namespace)::burn(int)", "/b/k.so"): 500,
            perf.Spot(3, "f<" + "x" * 90 + ">", "/b/k.so"): 1000,
            perf.Spot(4, "[unknown]", "/usr/lib/libgomp.so.1"): 1000,
        }
    )
    (table,) = perf.table(spots)
    assert table.rows == (
        ("burn", "k.so", 50.0, 2000),
        ("f", "k.so", 25.0, 1000),
        ("(no symbol: OpenMP, mostly waiting)", "libgomp.so.1", 25.0, 1000),
    )
    assert perf.table(Counter()) == []


def test_perf_script_is_read_line_by_line():
    burn = (
        "7 2329.275: 7f573f012220 (anonymous namespace)::burn(int) (/tmp/a (1)/k.so)\n"
    )
    text = (
        "  7 2329.274:  ffffffff8157ae7d clear_page_erms ([kernel.kallsyms])\n"
        f"{burn}  {burn}"
        "  7 2329.276:      7f573f012221 [unknown] (/tmp/k.so)\n"
        "  8 2329.277:      7f573f012220 another_process (/tmp/k.so)\nperf: another line\n"
    )
    assert perf.parsed(text, 7) == {
        perf.Spot(0xFFFFFFFF8157AE7D, "clear_page_erms", "[kernel.kallsyms]"): 1,
        perf.Spot(
            0x7F573F012220, "(anonymous namespace)::burn(int)", "/tmp/a (1)/k.so"
        ): 2,
        perf.Spot(0x7F573F012221, "[unknown]", "/tmp/k.so"): 1,
    }


def test_a_sample_counts_for_the_line_that_it_is_inlined_into(tmp_path, monkeypatch):
    frames = (
        "0x10\n/usr/lib/gcc/fma.h:9\n/b/kernel.cpp:2 (discriminator 3)\n0x20\n??:0\n"
    )
    targets.script(tmp_path / "addr2line", f"#!/bin/sh\nprintf '{frames}'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    places = {0x1010: 3, 0x1020: 1}
    spots = Counter({perf.Spot(at, "f", "/b/k.so"): n for at, n in places.items()})
    (table,) = perf.hot(spots, {"/b/k.so": 0x1000}, {"kernel.cpp": "a\n  b;\n"})
    assert table.rows == (("kernel.cpp:2", 75.0, "b;"),)
    assert perf.hot(spots, {}, {}) == []
