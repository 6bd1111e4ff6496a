"""`gdn run --emulate`: a user's CUDA algo on a CPU. What becomes of its sources, and
what is said of faults in it.
"""

from dataclasses import replace

import helpers
import pytest

from gdn_cli.catalog import registry
from gdn_cli.machine import inventory
from gdn_cli.machine.inventory import COMPILED, EMULATE, HERE, NO_GPU
from gdn_cli.worker.executor import emulation

CACHE = helpers.TESTS.parent / ".pytest_cache" / "emulated"
EXAMPLES = helpers.TESTS.parent / "examples" / "algos"
MINE = EXAMPLES / "gdn_decode" / "my-cuda" / "kernel.cu"
KERNEL = MINE.read_text()
BARRIER = "  __syncthreads();"


@pytest.mark.parametrize(
    ("cuda", "cpp"),
    [
        (
            "f<T, 8><<<dim3(n, 2), 32,\n 0, s>>>(x,\n y);",
            "emulated::launched([&] { f<T, 8>\n(x,\n y); }, dim3(n, 2), 32,  0, s);",
        ),
        (
            "ns::k <<<1, 32>>> (g(x)); // k<<<1, 2>>>(x)\n",
            "emulated::launched([&] { ns::k(g(x)); }, 1, 32);  \n",
        ),
        (
            "{ __shared__ Pair<int, 4> a, b[N > 1 ? 2 : 1][3]; }",
            "{  Pair<int, 4> (&a) = emulated::shared([] {}),"
            " (&b)[N > 1 ? 2 : 1][3] = emulated::shared([] {}); }",
        ),
        (
            "\n  alignas(16) __shared__ float x[8];",
            "\n    float (&x)[8] = emulated::shared([] {});",
        ),
        (
            "{ extern __shared__ __align__(16) float x[]; }",
            "{    float (*const x) = reinterpret_cast<  float (*)>(emulated::me->cta->base); }",
        ),
        (
            'asm volatile("ld" how ".v2 {%0, %1}, [%2];" \\\n : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");',
            'emulated::Ptx(__FILE__, __LINE__, "ld" how ".v2 {%0, %1}, [%2];")'
            '.operand("=r", (w[0])).operand("=r", (w[1])).operand("l", (p))\\\n.run();',
        ),
        ('asm("a;" :: "n"(X::Y));', 'emulated::Ptx(__FILE__, __LINE__, "a;").operand("n", (X::Y)).run();'),
        ("std::memcpy(x, y, 4);", "emulated::memcpy(x, y, 4);"),
        ("TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);", "EMULATED_EXPORT(run, Run);"),
    ],
)  # fmt: skip
def test_cuda_as_cpp(cuda, cpp):
    assert emulation.rewritten(cuda) == cpp


CUDA = {"language": "cuda", "entry_point": "kernel.cu::run", "devices": ["cuda"]}


def line_of(source: str, text: str) -> int:
    """The number of the only line that has this text."""
    (number,) = [i for i, line in enumerate(source.splitlines(), 1) if text in line]
    return number


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(name, source) -> (the record of its only run, its kernel.cu)"""
    if inventory.cxx() is None:
        pytest.skip("no C++ compiler here")

    def run(name, source):
        folder = tmp_path_factory.mktemp(name)
        here = helpers.write_algo(
            folder, name, {"kernel.cu": source}, destination_passing=True, **CUDA
        )
        # the builds are kept: the folder's name has a hash of the sources
        env = {"FIB_CACHE_PATH": str(CACHE)}
        done = helpers.gdn(
            "run", name, "--algos", folder, "--emulate", "--json", env=env
        )
        (record,) = done.json["records"]
        assert done.code == (record["status"] != "passed")
        return record, here / "kernel.cu"

    return run


def test_a_right_kernel_passes(emulated):
    record, _ = emulated("right", KERNEL)
    assert (record["status"], record["mode"]) == ("passed", "emulator")
    assert record["workload"]["axes"]["batch_size"] == 1  # the smallest, not asked for
    assert record["check"]["errors"]["output"] < 3e-3


@pytest.mark.slow
def test_a_race_and_a_read_of_what_nobody_wrote_have_a_line_each(emulated):
    first = "  if (row == 0) {"
    source = KERNEL.replace(first, f"  gates[0] = 0.f;\n{first}")
    record, file = emulated("racy", source)
    assert record["status"] == "wrong"
    races = [x for x in record["reason"].splitlines() if x.startswith("race: threads ")]
    zero, gate = (line_of(source, f"gates[0] = {x}") for x in ("0.f", "expf"))
    assert len(races) == 2  # of the new line with itself, and with the other
    assert all(" write shared byte 0x400 without a barrier, " in x for x in races)
    places = {frozenset(x.split(", ")[1].split(" and ")) for x in races}
    itself, other = f"{file}:{zero}", f"{file}:{gate}"
    assert places == {frozenset((itself,)), frozenset((itself, other))}

    # gates[1]
    record, file = emulated(
        "unwritten", KERNEL.replace("gates[1] = 1.f", "gates[0] *= 1.f")
    )
    what = "thread 127 reads shared byte 0x404, which no thread has written"
    line = line_of(KERNEL, "const float d = ")
    assert f"unwritten: {what}, {file}:{line}" in record["reason"].splitlines()


@pytest.mark.slow
def test_what_does_not_compile_names_the_users_line_and_what_is_unknown(emulated):
    source = KERNEL.replace("float Sk = 0.f", "floot Sk = 0.f")
    source = source.replace("expf(-fabsf(x))", "__no_such(x)")
    record, file = emulated("broken", source)
    assert record["status"] == "build_failed"
    bad, unknown = (line_of(source, x) for x in ("floot", "__no_such"))
    assert f"{file}:{bad}:3: error: " in record["reason"]
    assert f"{file}:{unknown}:" in record["reason"]
    assert "error: the emulator does not know '__no_such'" in record["reason"]


@pytest.mark.slow
def test_unknown_ptx_is_named(emulated):
    ptx = 'asm volatile("fence.proxy.async;\\n\\tno.such.b32 %0;" :: "r"(row));'
    source = KERNEL.replace(BARRIER, ptx + BARRIER)
    record, file = emulated("ptx", source)
    line = line_of(source, "no.such")
    said = f"RuntimeError: emulated: unknown PTX `no.such.b32 %0`, {file}:{line}"
    assert (record["status"], record["reason"]) == ("error", said)


@pytest.mark.slow
def test_a_deadlock_names_a_thread_that_waits(emulated):
    source = KERNEL.replace(BARRIER, "  if (row < 16) __syncwarp();" + BARRIER)
    record, file = emulated("deadlock", source)
    line = line_of(source, "__syncwarp")
    who = f"thread 0 of block (0, 0, 0) waits, {file}:{line}"
    said = f"RuntimeError: emulated: a barrier that not all threads reach: {who}"
    assert (record["status"], record["reason"]) == ("error", said)


# --- which algo runs where


def test_without_a_gpu_only_what_is_the_users_own_is_compiled(tmp_path):
    helpers.write_algo(tmp_path, "mine", {"kernel.cu": KERNEL}, **CUDA)
    mine = registry.load(str(tmp_path)).find("mine")
    ours, cpp = (helpers.REGISTRY.find(name) for name in ("cuda-v5", "cpp-v1"))
    with_nvcc = replace(HERE, gpus=tuple, has_package=bool, cuda_home=lambda: tmp_path)
    without = replace(with_nvcc, cuda_home=lambda: None)
    assert with_nvcc.without_gpu(mine).mode == COMPILED
    for machine, algo in ((with_nvcc, ours), (without, mine)):
        place = machine.without_gpu(algo)
        assert (place.mode, place.reason, place.hint) == (None, NO_GPU, EMULATE)
    cxx = replace(without, cxx=lambda: "c++")
    assert cxx.emulates(mine).mode == "emulator"
    assert cxx.emulates(cpp).reason == "--emulate is for CUDA, cpp-v1 is cpp"
    no_cxx = replace(cxx, cxx=lambda: None)
    assert no_cxx.emulates(mine).reason == "no C++ compiler here"


@pytest.mark.slow
def test_nvcc_compiles_what_no_gpu_runs(tmp_path, gdn):
    if HERE.cuda_home() is None or HERE.gpus():
        pytest.skip("no nvcc here, or a GPU")
    for name, source in (
        ("right", KERNEL),
        ("broken", KERNEL.replace("float Sk", "floot Sk")),
    ):
        helpers.write_algo(
            tmp_path, name, {"kernel.cu": source}, destination_passing=True, **CUDA
        )
    done = gdn("run", "right", "broken", "--algos", tmp_path, "--json")
    (record,) = done.json["records"]
    assert (done.code, record["algo"], record["status"]) == (
        1,
        "broken",
        "build_failed",
    )
    file = tmp_path / "gdn_decode" / "broken" / "kernel.cu"
    line = line_of(KERNEL, "float Sk")
    assert record["reason"].startswith(f"{file}:{line}: error: ")
    (missing,) = done.json["missing"]
    assert (missing["algo"], missing["reason"]) == ("right", f"compiled; {NO_GPU}")
    assert missing["hint"] == EMULATE
