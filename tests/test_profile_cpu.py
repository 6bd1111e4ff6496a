"""The cpu tool on real algos, through the worker: torch's ops, a C++ algo's functions and lines, and what stands at an
address."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

from gdn_cli import jobs, machine, pack, profilers, registry
from gdn_cli.profilers import Ask, Reading, Reply, cpu, sampling, symbols
from gdn_cli.workloads import embedded

CPP = """
#include <pthread.h>
#include <signal.h>
#include <thread>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
namespace ffi = tvm::ffi;
namespace {
struct Job { volatile double sum = 0; };
__attribute__((noinline)) void burn(Job& job, int n) {
  for (int i = 0; i < n; ++i) {
    job.sum = job.sum + 1.0 / (i + 1);  // the hot line
  }
}
}  // namespace
void Run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView state, ffi::TensorView A_log,
         ffi::TensorView a, ffi::TensorView dt_bias, ffi::TensorView b, ffi::Optional<double> scale,
         ffi::TensorView output, ffi::TensorView new_state) {
  Job job;
  sigset_t all, old;  // as pools do: without the preloaded pthread_sigmask nothing of this thread would be seen
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  std::thread thread([&] { burn(job, 300000); });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  thread.join();
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
"""
BURN = next(i for i, line in enumerate(CPP.splitlines(), 1) if "the hot line" in line)


def profiled(
    tool: str, name: str, folder: Path, *, algos: Path | None = None, mode: str = "cpu", l2: str = "cold"
) -> Reading:
    """A tool's whole way for one decode with B = 1, each of its runs in a worker."""
    known = registry.load(str(algos)) if algos else registry.load()
    op = known.ops["gdn_decode"]
    algo = next(a for a in known.algos if (a.name, a.op) == (name, op.name))
    definition, solution = pack.definition(op, known), pack.pack(algo, op)
    workload = min(embedded(op), key=lambda w: w.axes["batch_size"])
    ask = Ask(tool, solution, mode, l2=l2, bytes_in=3_000_000, bytes_out=1_000_000)
    module, replies = profilers.module(tool), []
    module.find()
    for run in module.runs(ask, folder):
        job = jobs.Job(
            "profile", op, definition, solution, mode, (workload,), algo=algo, wrap=run.wrap, env=run.env,
            profile={"task": tool, "params": run.params, "l2": l2},
        )  # fmt: skip
        outcome = jobs.execute(job)
        assert outcome.status == "done", (outcome.reason, outcome.tail)
        (record,) = outcome.records
        assert record.passed, record
        replies.append(Reply(run, "done", answer=record.answer, tail=tuple(outcome.tail)))
    reading = module.read(ask, folder, replies)
    assert Reading.from_json(reading.to_json()) == reading
    return reading


def quick(monkeypatch, *ways: str) -> None:
    """Short runs, and only these ways to sample."""
    monkeypatch.setattr(cpu, "_COUNTED_S", 0.05)
    monkeypatch.setattr(cpu, "_SAMPLED_S", 0.6)
    choose = sampling.choose
    monkeypatch.setattr(sampling, "choose", lambda folder: choose(folder, ways))


def table(found: profilers.Found, key: str) -> profilers.Table:
    return next(t for t in found.tables if t.key == key)


@pytest.fixture(scope="module")
def burner(tmp_path_factory, write_algo):
    folder = tmp_path_factory.mktemp("algos")
    write_algo(
        folder, "burner", {"kernel.cpp": CPP}, language="cpp", entry_point="kernel.cpp::run", destination_passing=True
    )
    return folder


def perf_works() -> bool:
    return bool(sampling.shutil.which("perf")) and sampling._perf_fails("perf") is None


@pytest.mark.skipif(machine.cxx() is None, reason="no C++ compiler")
@pytest.mark.parametrize("way", ["signal", "perf"])
def test_the_function_and_the_line_that_take_the_time_are_found(way, burner, tmp_path, monkeypatch):
    if way == "perf" and not perf_works():
        pytest.skip("perf cannot be used here")
    quick(monkeypatch, way)
    (found,) = (reading := profiled("cpu", "burner", tmp_path, algos=burner)).found
    functions = table(found, "functions")
    name, library, share, count = functions.rows[0]
    assert name == "burn" and "burner" in library
    assert share > 50 and count > 5
    assert sum(row[2] for row in functions.rows) == pytest.approx(100)
    assert reading.files == (("perf.data",) if way == "perf" else ())
    assert not (tmp_path / "sampler.so").exists()
    if sampling.shutil.which("addr2line"):
        hot = {where: source for where, _, _, source in table(found, "hot").rows}
        assert "the hot line" in hot[f"kernel.cpp:{BURN}"]
    if sampling.shutil.which("objdump"):
        where, _, line, instruction = table(found, "instructions").rows[0]
        assert re.fullmatch(r"burn\+0x[0-9a-f]+", where) and instruction
    assert found.value("cpu_us") > 0 and 0 < found.value("threads_busy") <= (os.cpu_count() or 1) + 0.5
    assert found.value("rate") == pytest.approx(4_000_000 / found.value("time_us") / 1e3)
    assert not [t for t in found.tables if t.key == "ops"]  # it has none


def test_the_ops_of_a_torch_algo_and_no_functions_where_nothing_can_sample(tmp_path, monkeypatch, write_algo):
    algos = tmp_path / "algos"
    body = "    y = q.float()\n    for _ in range(3):\n        y = y @ y.mT\n    return y, state\n"
    write_algo(algos, "three", f"import torch\n\ndef run(q, k, v, state, A_log, a, dt_bias, b, scale):\n{body}")
    quick(monkeypatch)
    reading = profiled("cpu", "three", tmp_path, algos=algos)
    (found,) = reading.found
    (ops,) = found.tables
    per_call = {row[0]: row[1] for row in ops.rows}
    assert per_call["aten::matmul"] == 3 and per_call["(outside any op)"] == 1
    assert sum(row[3] for row in ops.rows) == pytest.approx(100)
    assert "torch uses" in next(f.note for f in found.facts if f.key == "threads_busy")
    assert any(note.startswith("no functions") for note in reading.notes)


# --- names and addresses ------------------------------------------------------------------------------------------

V4 = "_ZN41_GLOBAL__N__4eb81770_9_kernel_cu_b147438113gdn_decode_v4EPK13__nv_bfloat16S2_S2_PKfS4_S2_S4_S2_fPS0_Pf"


@pytest.mark.parametrize(
    "name, plain",
    [
        (V4, "gdn_decode_v4"),
        ("gdn_decode_kernel", "gdn_decode_kernel"),
        ("<unnamed>::gdn_decode_v4(const __nv_bfloat16 *, float)", "gdn_decode_v4"),
        ("void at::elementwise<4, at::f<float> >(int, float (*)(int))", "at::elementwise<4, at::f<float> >"),
        ("gdn::Pool::serve(int) [clone .isra.0]", "gdn::Pool::serve"),
        ("A::operator()(int) const", "A::operator()"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("(no symbol)", "(no symbol)"),
        ("_Zbroken", "_Zbroken"),
    ],
)  # fmt: skip
def test_names_are_short(name, plain):
    assert symbols.short(name) == plain


def test_names_of_torchs_loops_are_read_by_their_kernel():
    loop = "c10::function_ref<void (char**)>::callback_fn<at::native::AVX2::VectorizedLoop2d<at::native::mul_kernel("
    assert sampling.readable(loop + "x" * 80) == "at::native::mul_kernel"
    assert sampling.readable("f<" + "x" * 90 + ">") == "f<...>"
    assert sampling.readable("burn") == "burn"


def test_an_inlined_headers_time_is_at_the_algos_own_line(monkeypatch):
    header = "_mm512_add_ps", "/usr/lib/gcc/include/avx.h", 9
    own, caller = ("f", "/b/rows.h", 2), ("g", "/b/k.cpp", 3)
    frames = {
        16: [header, ("x", "/lib/made.cpp", 7), own, caller],
        32: [header, ("h", "/inductor/main.cpp", 5)],
        48: [header],
    }
    monkeypatch.setattr(symbols, "lines", lambda library, addresses: {a: frames[a] for a in addresses})
    symbol = symbols.Symbol(16, 64, "f")
    spots = [sampling.Spot(n, symbols.Place("/nowhere.so", at, symbol)) for n, at in ((6, 16), (3, 32), (1, 48))]
    functions, hot = sampling.tables(spots, {"rows.h": "// one\n  x += y;\n", "k.cpp": ""})
    assert functions.rows == (("f", "nowhere.so", 100.0, 10),)
    assert hot.rows == (
        ("rows.h:2", 60.0, "f", "x += y;"), ("main.cpp:5", 30.0, "h", ""), ("avx.h:9", 10.0, "_mm512_add_ps", ""),
    )  # fmt: skip


def test_an_address_of_this_process_has_its_library_and_its_function():
    maps = symbols.mappings(Path("/proc/self/maps").read_text())
    cos = ctypes.cast(ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev, ctypes.c_void_p).value
    found = symbols.place(cos + 1, maps)
    assert found.symbol.name == "_ZSt9terminatev" and "libstdc++" in found.library
    assert symbols.short(found.symbol.name) == "std::terminate"
    assert symbols.place(8, maps) == ("", None, None)  # nothing is mapped there


def test_perf_script_is_read_line_by_line():
    text = (
        "  7 2329.274:  ffffffff8157ae7d clear_page_erms\n"
        "  7 2329.275:      7f573f012220 burn(int, float)\n"
        "  7 2329.276:      7f573f012220 \n"
        "  8 2329.277:      7f573f012220 another_process\n"
        "perf: something else\n"
    )
    user, kernel = sampling.parsed(text, 7)
    assert user == {0x7F573F012220: 2} and kernel == {"clear_page_erms": 1}


def test_broken_files_have_no_symbols(tmp_path):
    for content in (b"", b"no elf", b"\x7fELF\x02\x01" + b"\xff" * 60):
        file = tmp_path / f"{len(content)}.so"
        file.write_bytes(content)
        assert symbols.elf(str(file)) is None
