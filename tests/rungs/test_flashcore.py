"""The flashcore kernels on a CPU (emulator/): fragments, swizzles, masks, splits and
merges against float64.

What ptxas, memory and timing make of them is for a GPU to say. Lanes that read the
wrong partner, a wait or a barrier too little, and rows that share a maximum show here.
"""

import ctypes
import functools
import math
import re
import shutil
import subprocess

import helpers
import oracle
import pytest
import torch
import torch.nn.functional as F
from emulator import emulation
from oracle import error

from gdn_cli.catalog import tuned_table
from gdn_cli.machine import inventory
from gdn_cli.worker.judge import check

FWD = helpers.OURS / "attention_fwd"
CUDA = helpers.OURS / "_cuda" / "attention"
PTX = helpers.OURS / "_cuda" / "ptx"
REGISTRY = helpers.REGISTRY
V4 = REGISTRY.find("attention_fwd/flashcore-v4")
CAUSAL = REGISTRY.find("attention_fwd_causal/flashcore-v4-causal")
FIELDS = ("rows", "warps", "tiles", "keys", "stages", "splits", "wgmma")


def cut_of(row):
    return tuple(row.constants[name] for name in FIELDS)


def rows_of(algo):
    """Those of the file that `gdn tune` writes."""
    return tuned_table.rows(algo.tune, tuned_table.load(algo))


def instead():
    """(up to, cut) of launch.cuh's rows that stand in for those that cannot run; the
    last one is endless.
    """
    text = (CUDA / "flashcore_launch.cuh").read_text()
    table = text[text.index("INSTEAD[] = {") :]
    rows = re.findall(r'\{"", 0, ANY, ([^,]+), ([\d, ]+), MMA_SYNC\}', table)
    # MMA_SYNC = 0
    return [
        (
            int(end) if end.isdigit() else tuned_table.ENDLESS,
            (*map(int, cut.split(", ")), 0),
        )
        for end, cut in rows
    ]


USUAL = (64, 8, 1, 64, 2, 2, 0)
WIDE = (128, 8, 1, 128, 3, 1, 1)
AHEAD = (128, 16, 1, 64, 2, 2, 2)
ONCE = (32, 16, 1, 64, 1, 1, 3)
# the cuts in use, and each way to cut once more: one part and many, one row group and
# many, more stages than steps
IN_USE = {cut_of(row) for algo in (V4, CAUSAL) for row in rows_of(algo)}
CUTS = sorted(
    {
        *IN_USE,
        *(cut for _, cut in instead()),
        USUAL,
        WIDE,
        AHEAD,
        ONCE,
        (64, 4, 1, 64, 1, 1, 0),
        (64, 4, 1, 32, 3, 1, 0),
        (32, 4, 2, 32, 2, 2, 0),
        (64, 4, 1, 32, 2, 4, 0),
        (128, 8, 2, 64, 3, 2, 0),
        (64, 4, 1, 64, 3, 1, 1),
        (64, 8, 1, 128, 2, 2, 2),
        (256, 16, 1, 64, 2, 1, 1),
        (32, 8, 1, 64, 2, 1, 3),
        (64, 16, 1, 32, 2, 1, 3),
    }
)
EVERY_CUT = pytest.mark.parametrize(
    "cut", CUTS, ids=lambda cut: "x".join(map(str, cut))
)

DRIVER = """
#include <cstdint>
@INCLUDES@
using namespace flashcore;
@BEGIN@
extern "C" int attend(int rung, int causal, const int* cut, int mode, void** t, int S, int heads, int only) {
  const Problem p{(__half*)t[0], (__half*)t[1], (__half*)t[2], (__half*)t[3], S};
  const auto blocks = [&](int rows) { return uint32_t(S + rows - 1) / rows; };
  emulated::mode = mode;
  const uint32_t h = heads;
  @BODY@
  return 1;
}
"""
SIMPLE = """
  if (rung == @N@)
    return emulated::launch({blocks(@ROWS@), h, 1}, @THREADS@, @SHARED@, 1, [&] { flashcore_v@N@(p); },
                            [&](dim at) { return only < 0 || int(at.x) == only; }), 0;
"""
SPLIT = """
template <typename C, bool CAUSAL>
int split(const Problem& p, uint32_t blocks, uint32_t heads, int only) {
  const dim grid = CAUSAL ? dim{@SPLITS@, heads, blocks} : dim{@SPLITS@, blocks, heads};
  emulated::launch(grid, C::THREADS, C::shared(@SPLITS@), @SPLITS@, [&] { flashcore_v4<C, CAUSAL>(p); },
                   [&](dim at) { return only < 0 || int(CAUSAL ? blocks - 1 - at.z : at.y) == only; });
  return 0;
}
"""
CUT = """
  if (std::equal(cut, cut + 7, (const int[]){@NUMBERS@}))
    return (causal ? @RUN@<@CUT@, true> : @RUN@<@CUT@, false>)(p, blocks(@ROWS@), h, only);
"""
WIDELY = """
template <typename C, bool CAUSAL>
int wide(const Problem& p, uint32_t blocks, uint32_t heads, int only) {
  const auto map = [&](const __half* of, int rows) { return TensorMap{of, p.S, int(heads), rows}; };
  const Maps maps{map(p.q, C::ROWS), map(p.k, C::KEYS), map(p.v, C::KEYS)};
  const dim grid = CAUSAL ? dim{C::SPLITS, heads, blocks} : dim{C::SPLITS, blocks, heads};
  emulated::launch(grid, C::THREADS, C::SHARED, C::SPLITS, [&] { flashcore_v4_wide<C, CAUSAL>(maps, p); },
                   [&](dim at) { return only < 0 || int(CAUSAL ? blocks - 1 - at.z : at.y) == only; });
  return 0;
}
"""

AT_ONCE = """
template <typename C, bool CAUSAL>
int once(const Problem& p, uint32_t blocks, uint32_t heads, int only) {
  if (p.S > C::MOST_KEYS) return 2;
  const auto map = [&](const __half* of, int rows) { return TensorMap{of, p.S, int(heads), rows}; };
  const Maps maps{map(p.q, C::ROWS), map(p.k, C::KEYS), map(p.v, C::KEYS)};
  const dim grid = CAUSAL ? dim{1, heads, blocks} : dim{1, blocks, heads};
  emulated::launch(grid, C::THREADS, C::SHARED, 1, [&] { flashcore_v4_once<C, CAUSAL>(maps, p); },
                   [&](dim at) { return only < 0 || int(CAUSAL ? blocks - 1 - at.z : at.y) == only; });
  return 0;
}
"""
RUN = {0: "split", 1: "wide", 2: "wide", 3: "once"}  # by wgmma


def typed(cut):
    """The C++ type of a cut."""
    rows, warps, tiles, keys, stages, splits, wgmma = cut
    if wgmma == 3:
        return f"OnceCut<{rows}, {warps}, {keys}, {stages}>"
    if wgmma:
        ahead = str(wgmma == 2).lower()
        return f"WideCut<{rows}, {warps}, {keys}, {stages}, {splits}, {ahead}>"
    return f"Cut<{rows}, {warps}, {tiles}, {keys}, {stages}, {splits}>"


def filled(text, **names):
    for name, value in names.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def compiled(folder, rung, begin, body, *flags):
    """A library of one rung's kernel."""
    kernels = [FWD / rung / "attention.cuh"]
    if rung == "flashcore-v4":
        parts = ("", "_parts", "_wgmma", "_once")
        kernels = [CUDA / f"flashcore{part}.cuh" for part in parts]
    for file in (CUDA / "problem.cuh", CUDA / "online_softmax.cuh", *kernels):
        shutil.copy(file, folder)
    includes = "".join(f'#include "{kernel.name}"\n' for kernel in kernels)
    text = filled(DRIVER, INCLUDES=includes, BEGIN=begin, BODY=body)
    (folder / "driver.cpp").write_text(text)
    return emulation.compiled(folder, *flags)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """library("v1"), ...: "v4" as on sm_90, "v4-sm80" as on a GPU without clusters."""

    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        if not name.startswith("v4"):
            n = name[1:]
            shared = "V3_SHARED" if n == "3" else "0"
            threads = "V1_ROWS" if n == "1" else f"V{n}_THREADS"
            how = dict(SHARED=shared, THREADS=threads, ROWS=f"V{n}_ROWS", N=n)
            return compiled(folder, f"flashcore-v{n}", "", filled(SIMPLE, **how))
        old = name == "v4-sm80"
        body = ""
        for cut in [USUAL] if old else CUTS:
            numbers = ", ".join(map(str, cut))
            how = dict(NUMBERS=numbers, ROWS=cut[0], CUT=typed(cut), RUN=RUN[cut[-1]])
            body += filled(CUT, **how)
        split = filled(SPLIT, SPLITS="1" if old else "C::SPLITS")
        begin = "#include <algorithm>\n" + split + WIDELY + AT_ONCE
        arch = f"-D__CUDA_ARCH__={800 if old else 900}"
        return compiled(folder, "flashcore-v4", begin, body, arch)

    return of


PLAIN, EARLY, REVERSED = 0, 1, 2  # emulated::Mode


def attend(library, rung, given, cut=USUAL, causal=False, mode=PLAIN, only=-1):
    """The output, [heads, S, 64]; NaN where nothing was written; the guard after it
    must stay NaN.
    """
    heads, S, _ = given[0].shape
    guard = 4096
    flat = torch.full((heads * S * 64 + guard,), math.nan, dtype=torch.float16)
    table = emulation.addresses(*given, flat)
    how = int(causal), (ctypes.c_int * 7)(*cut), mode, table, S, heads, only
    assert library(rung).attend(int(rung[1]), *how) == 0
    assert flat[-guard:].isnan().all(), "a write behind the output"
    return flat[:-guard].view(heads, S, 64)


def draw(S, heads=1, seed=0):
    g = torch.Generator().manual_seed(seed * 10000 + S)
    return [torch.randn(heads, S, 64, generator=g).half() for _ in range(3)]


def exact(given, rows=slice(None), causal=False):
    """softmax(q k^T / 8) v of some rows in float64, [heads, rows, 64]; the oracle's
    formula, a matrix at a time.
    """
    q, k, v = (x.double() for x in given)
    s = q[:, rows] @ k.mT / 8
    if causal:
        at = torch.arange(k.shape[1], device=k.device)
        s.masked_fill_(at[None, :] > at[rows][:, None], float("-inf"))
    p = (s - s.amax(dim=-1, keepdim=True)).exp_()
    return p @ v / p.sum(dim=-1, keepdim=True)


# rounding the output to float16 is 2e-4; v3 and v4 also round the probabilities
LIMIT = {"v1": 2.5e-4, "v2": 2.5e-4, "v3": 3.5e-4, "v4": 3.5e-4}
RUNGS = list(LIMIT)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 511, 512, 513, 1000)


def near(library, rung, given, cut=USUAL, causal=False):
    """Assert that the output is right."""
    found = attend(library, rung, given, cut, causal)
    assert error(found, exact(given, causal=causal)) < LIMIT[rung[:2]], causal


def test_exact_is_the_oracle():
    for op, causal in (("attention_fwd", False), ("attention_fwd_causal", True)):
        given = oracle.inputs(op, seq_len=9, heads=2)
        right = getattr(oracle, op)(*given)[0]
        assert error(exact([x[0] for x in given], causal=causal), right) < 1e-14


@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.sampled(3)
def test_lengths(library, rung, S):
    near(library, rung, draw(S))


@pytest.mark.parametrize("rung, rows", [("v1", 32), ("v2", 32), ("v3", 64), ("v4", 64)])
def test_4096_by_its_last_block_of_rows(library, rung, rows):
    """The whole walk over the keys; all blocks would take minutes here."""
    S = 4096
    given, last = draw(S), (S - 1) // rows
    found = attend(library, rung, given, only=last)[:, last * rows :]
    assert error(found, exact(given, slice(last * rows, None))) < LIMIT[rung]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_every_batch_and_head_is_its_own(library, rung, batch_size):
    near(library, rung, draw(17, 8 * batch_size))


CAUSAL_TOO = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@CAUSAL_TOO
@EVERY_CUT
@pytest.mark.sampled(2)
def test_every_cut(library, cut, causal):
    """Less than a step, whole steps, and a split that is left without keys."""
    for S in (1, 65, 200):
        near(library, "v4", draw(S), cut, causal)


AROUND = (15, 63, 64, 65, 127, 128, 129, 511, 512, 513)
AT_MOST_512 = (15, 16, 17, 63, 64, 65, 127, 128, 449, 511, 512)
BY_WARPGROUPS = {
    "wide": (WIDE, AROUND),
    "ahead": (AHEAD, AROUND),
    "once": (ONCE, AT_MOST_512),
    "twice": ((32, 8, 1, 64, 2, 1, 3), AT_MOST_512),
}


@CAUSAL_TOO
@pytest.mark.parametrize("name", BY_WARPGROUPS)
@pytest.mark.sampled(2)
def test_lengths_by_warpgroups(library, name, causal):
    """On both sides of a tile's border, and of a block's; keys that only some of the
    warpgroups see; tiles that only some of the rows see, and warps without any.
    """
    cut, lengths = BY_WARPGROUPS[name]
    for S in lengths:
        near(library, "v4", draw(S), cut, causal)


@pytest.mark.parametrize("S", LENGTHS)
def test_causal_lengths(library, S):
    near(library, "v4", draw(S), host_cut(CAUSAL, 1, S), causal=True)


@CAUSAL_TOO
@pytest.mark.parametrize("S", [16, 65, 128])
@pytest.mark.parametrize("heads", [8, 24])
def test_the_cut_of_each_size(library, causal, S, heads):
    cut = host_cut(CAUSAL if causal else V4, heads, S)
    near(library, "v4", draw(S, heads), cut, causal)


def host_cut(algo, heads, S):
    """The cut that the host takes on sm_90a: the row of this size, or the next one that
    has room for as many keys.
    """
    for row in tuned_table.nearest(rows_of(algo), 132):
        if S <= row.length_up_to and heads <= row.up_to:
            rows, warps, _, keys, stages, _, wgmma = cut_of(row)
            if wgmma != 3 or S <= keys * stages * 16 * warps // rows:
                return cut_of(row)
    raise AssertionError(f"no row for {heads} heads, {S} keys")


def test_fallback_configurations_exist_for_every_size():
    """launch.cuh goes through these rows without looking for their end; they run
    wherever the others do not.
    """
    rows = instead()
    assert len(rows) >= 2
    assert rows[-1][0] == tuned_table.ENDLESS
    assert all(cut[-1] == 0 and len(cut) == 7 for _, cut in rows)


OTHERS = [("v2", USUAL), ("v3", USUAL)]


@pytest.mark.parametrize("rung, cut", [*OTHERS, *(("v4", cut) for cut in CUTS)])
@pytest.mark.sampled(3)
def test_the_order_of_threads_and_of_copies_changes_nothing(library, rung, cut):
    """A barrier or a wait too little shows as a bit that depends on who was first."""
    given = draw(200)
    expected = attend(library, rung, given, cut)
    for mode in (EARLY, REVERSED, EARLY | REVERSED):
        found = attend(library, rung, given, cut, mode=mode)
        assert torch.equal(found, expected), mode


@pytest.mark.slow
def test_before_sm_90_the_same_code_splits_nothing(library):
    near(library, "v4-sm80", draw(130))


# --- extremes


def large_logits(S):
    """Scores of up to 1e4: the two nearest are 10 apart at least, or equal."""
    q, k, v = (torch.zeros(1, S, 64) for _ in range(3))
    q[..., 0] = 250.0
    k[..., 0] = (torch.arange(S) * 37 % 320).float()
    v = draw(S)[2].float()
    return q, k, v


def equal_logits(S):
    q, k, v = draw(S)
    return q, k[:, :1].expand(k.shape), v


def equal_large_logits(S):
    """All scores are 16 * 65504^2 * 4: the rounding of that alone is an exponent of thousands."""
    _, _, v = draw(S)
    return torch.full((1, S, 64), 65504.0), torch.full((1, S, 64), 65504.0), v


def one_hot(S):
    q, k, v = draw(S)
    q[:, 3 % S] = 0
    q[:, 3 % S, 5] = 60000.0
    k[:, 7 % S, 5] = 60000.0
    return q, k, v


def rising(S):
    """Every key beats all before it: the maximum moves at each step, for each row."""
    q, k, v = draw(S)
    q[..., 0], k[..., 0] = 30.0, torch.arange(S) * 0.1
    return q, k, v


def all_negative(S):
    """No score is above 0, so that the greatest bits are not the greatest score's; and
    many are equal.
    """
    q, k, v = draw(S)
    return -q.abs(), k.abs(), v


def far_below(S):
    """The same far from 0: rounding of the scaled maximum would show."""
    q, k, v = large_logits(S)
    k[..., 0] -= 400.0
    return q, k, v


def widest_values(S):
    """v at both ends of float16, and all at one end in the first columns: sums that
    must not leave float16.
    """
    q, k, v = draw(S)
    v = torch.where(v > 0, 65504.0, -65504.0)
    v[..., :8] = 65504.0
    return q, k, v


def rounded_up(S):
    """All probabilities but one are just above 0.5 + 2^-12, and rounded up: their sum
    of v is 5e-4 too much.
    """
    q, k, v = (torch.zeros(1, S, 64) for _ in range(3))
    score = 8 * math.log(0.5 + 2.0**-12 + 2.0**-18)
    first = torch.tensor(score).half().float()
    q[..., 0], q[..., 1] = 1.0, 2.0**-6
    k[:, 1:, 0], k[:, 1:, 1] = first, (score - first) * 2**6
    return q, k, v + 65504.0


def smallest(S):
    return tuple(torch.where(x > 0, 2.0**-24, -(2.0**-24)) for x in draw(S))


EXTREMES = [
    large_logits, equal_logits, equal_large_logits, one_hot, rising, all_negative, far_below, widest_values, rounded_up,
    smallest,
]  # fmt: skip


def good_enough(found, right):
    """Finite where the float64 result fits float16, and near it; below its subnormals,
    to half a unit of them.
    """
    assert right.abs().max() < 65504 + 1e-6
    half_a_unit = float((found.double() - right).abs().max()) <= 2.0**-25 * 1.001
    return bool(found.isfinite().all()) and (half_a_unit or error(found, right) < 1e-3)


def cuts_of_each_kind(rung):
    return (USUAL, WIDE, AHEAD, ONCE) if rung == "v4" else (USUAL,)


EVERY_EXTREME = pytest.mark.parametrize(
    "make", EXTREMES, ids=lambda make: make.__name__
)


@CAUSAL_TOO
@EVERY_EXTREME
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.sampled(5)
def test_extremes(library, rung, make, causal):
    if causal and rung != "v4":
        return
    for S in (17, 200):
        given = [x.half().contiguous() for x in make(S)]
        right = exact(given, causal=causal)
        for cut in cuts_of_each_kind(rung):
            found = attend(library, rung, given, cut, causal)
            assert good_enough(found, right), (S, cut)


@pytest.mark.parametrize("rung", RUNGS)
def test_scores_that_float32_cannot_tell_apart_stay_finite(library, rung):
    """Sums of +-65504^2: which of two equal ones is greater depends on the order of the
    sum, for anyone.
    """
    q, k, v = draw(130)
    q, k = (torch.where(x > 0, 65504.0, -65504.0).half() for x in (q, k))
    for cut in cuts_of_each_kind(rung):
        found = attend(library, rung, (q, k, v), cut)
        assert found.isfinite().all()
        assert found.abs().max() <= v.abs().max()


def test_a_row_without_the_sharp_key_is_left_alone(library):
    """The maximum and the sum are a row's, not a tile's: one hot row must not push its
    neighbours to 0 / 0.
    """
    given = [x.half() for x in one_hot(64)]
    for rung in RUNGS:
        found, right = attend(library, rung, given), exact(given)
        assert max(error(found[:, i], right[:, i]) for i in range(64)) < 2e-3


NAMES = {
    "split": "flashcore_v4",
    "wide": "flashcore_v4_wide",
    "once": "flashcore_v4_once",
}


@pytest.fixture(scope="module")
def compiled_cuts(tmp_path_factory):
    """compiled_cuts("-arch=sm_90a", ...): the configurations in use in one file, nvcc's
    result and its output.
    """
    if inventory.cuda_home() is None:
        pytest.skip("no nvcc here")
    folder = tmp_path_factory.mktemp("cuts")
    for file in (*CUDA.glob("*.cuh"), *PTX.glob("*.cuh")):
        shutil.copy(file, folder)
    kernels = [
        (cut_of(row), causal)
        for algo, causal in ((V4, "false"), (CAUSAL, "true"))
        for row in rows_of(algo)
    ]
    text = ""
    for cut, causal in set(kernels):
        maps = "const __grid_constant__ Maps, " if cut[-1] else ""
        text += (
            f"template __global__ void {NAMES[RUN[cut[-1]]]}<{typed(cut)}, {causal}>"
            f"({maps}const __grid_constant__ Problem);\n"
        )
    names = ("flashcore", "flashcore_once", "tensor_map", "flashcore_wgmma")
    includes = "".join(f'#include "{name}.cuh"\n' for name in names)
    (folder / "cuts.cu").write_text(includes + "namespace flashcore {\n" + text + "}\n")

    def run(*flags):
        nvcc = inventory.cuda_home() / "bin" / "nvcc"
        command = [nvcc, "-std=c++17", "-O2", *flags, "-o", "made", "cuts.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return (folder / "made").read_text(errors="replace"), done.stderr + done.stdout

    run.count = len(set(kernels))
    return run


@pytest.mark.slow
def test_the_cuts_in_use_compile_without_spills(compiled_cuts):
    _, said = compiled_cuts("-arch=sm_90a", "-Xptxas", "-v", "-cubin")
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    # and flashcore_compiled_for
    assert spilled == [("0", "0")] * (compiled_cuts.count + 1)
    assert "serialized" not in said  # products that wait for each other, one by one


@pytest.mark.slow
def test_what_is_compiled_without_wgmma_says_so(compiled_cuts):
    """The host asks how many threads flashcore_compiled_for may have: fewer than
    COMPILED_WITH_WGMMA on sm_90.
    """

    def number(pattern, text):
        return int(re.search(pattern, text)[1])

    threads = r"\.entry \w*flashcore_compiled_for\w*\(\)\s*\.maxntid (\d+)"
    with_it, without = (
        compiled_cuts(f"-arch={arch}", "-ptx")[0] for arch in ("sm_90a", "sm_90")
    )
    source = (PTX / "tensor_map.cuh").read_text()
    least = number(r"COMPILED_WITH_WGMMA = (\d+)", source)
    assert number(threads, with_it) == least > number(threads, without)
    assert "wgmma" in with_it
    assert "wgmma.mma_async" not in without


# --- on a GPU, with its own arithmetic

ON_GPU = [
    pytest.param(algo, id=algo.full_name)
    for op in ("attention_fwd", "attention_fwd_causal")
    for algo in REGISTRY.algos_of(op)
    if algo.name.startswith("flashcore")
]
on_gpu = pytest.mark.parametrize("algo", ON_GPU)
gpu = pytest.mark.gpu


def on_device(algo, given):
    """The algo's output on the GPU; its inputs must stay as they are."""
    kernel = helpers.kernel(algo.full_name)
    before = check.cloned(given)
    output = torch.full_like(given[0], math.nan)
    kernel(given, [output])
    assert all(map(torch.equal, given, before))
    return output


def drawn(B, S):
    g = torch.Generator("cuda").manual_seed(B * 10000 + S)
    return [
        torch.randn(B, 8, S, 64, generator=g, device="cuda").half() for _ in range(3)
    ]


def right_of(given, causal):
    """exact, a batch entry at a time: 8 heads of 4096 rows are a gigabyte of scores."""
    entries = zip(*given, strict=True)
    return torch.stack([exact(entry, causal=causal) for entry in entries])


def is_causal(algo):
    return algo.op == "attention_fwd_causal"


@gpu
@pytest.mark.parametrize("S", [*LENGTHS, 4096])
@on_gpu
def test_gpu_lengths_and_batches_are_no_worse_than_pytorchs(algo, S):
    causal = is_causal(algo)
    # which way single roundings fell: more in a few thousand elements
    slack = 1.02 if S >= 128 else 1.1
    for B in (1, 2, 3, 7):
        given = drawn(B, S)
        right = right_of(given, causal)
        theirs = error(F.scaled_dot_product_attention(*given, is_causal=causal), right)
        ours = error(on_device(algo, given), right)
        assert ours < 2e-3, B
        assert ours <= slack * theirs + 1e-6, (B, theirs)


@gpu
@on_gpu
def test_gpu_few_heads_with_many_keys(algo):
    """A size by its elements, but no sequence that a cut of that size was made for."""
    if not algo.name.startswith("flashcore-v4"):
        return
    for heads, S in ((1, 4096), (2, 2048), (3, 600)):
        given = [x[:, :heads].contiguous() for x in drawn(1, S)]
        off = error(on_device(algo, given), right_of(given, is_causal(algo)))
        assert off < LIMIT["v4"], (heads, S)


@gpu
@EVERY_EXTREME
@on_gpu
def test_gpu_extremes(algo, make):
    for S in (17, 200, 512, 1000):
        given = [x.half().expand(8, -1, -1)[None].contiguous().cuda() for x in make(S)]
        right = right_of(given, is_causal(algo))
        assert good_enough(on_device(algo, given), right), S


@gpu
@on_gpu
def test_gpu_one_launch_and_nothing_allocated(algo):
    given = drawn(1, 512)
    outputs = [on_device(algo, given)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda) as profile:
        helpers.kernel(algo.full_name)(given, outputs)
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    on_cuda = torch.autograd.DeviceType.CUDA
    launches = [e for e in profile.events() if e.device_type == on_cuda]
    assert len(launches) == 1
