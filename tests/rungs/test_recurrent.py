"""gdn_prefill/cuda-recurrent on a CPU (emulator/): fragments, gates, T, rounds and
their buffers, against float64.

What ptxas, memory and timing make of it is for a GPU to say. A lane that reads the
wrong partner, a barrier or a wait too little, or a token that reaches into the next
sequence shows here.
"""

import ctypes
import itertools
import math
import re
import subprocess

import oracle
import pytest
import torch
from emulator import emulation

from gdn_cli.catalog import registry, tuned_table
from gdn_cli.machine import inventory

ALGO = registry.load().find("gdn_prefill/cuda-recurrent")
CONSTANTS = ALGO.tune.constants
CUTS = [
    cut for cut in itertools.product(*CONSTANTS.values()) if cut[1] == 1 or cut[0] == 1
]
USUAL = (1, 2, 2)
PLAIN, MODES = 0, range(8)  # emulated::Mode: EARLY, REVERSED, TURNS and their sums

DRIVER = """
#include "recurrent.cuh"
template <int WARPS, int SPLIT, int AHEAD>
int launch(const gdn::Arguments& p, uint32_t heads) {
  using L = gdn::Layout<WARPS, SPLIT, AHEAD>;
  emulated::launch({heads * (128 / (16 * WARPS)), 1, 1}, L::THREADS, L::BYTES, 1,
                   [&] { gdn::gdn_prefill_recurrent<WARPS, SPLIT, AHEAD>(p); });
  return 0;
}
extern "C" int prefill(int warps, int split, int ahead, int mode, void** t, float scale, int64_t T, int64_t N,
                       uint32_t H, uint32_t HV) {
  using bf = __nv_bfloat16;
  const gdn::Arguments p = {(float*)t[0], (int64_t*)t[1], (bf*)t[2], (bf*)t[3], (bf*)t[4], (bf*)t[5], (bf*)t[6],
                            (float*)t[7], (float*)t[8], (float*)t[9], (bf*)t[10], scale, H, HV,
                            T, T / N, gdn::Divisor(HV), gdn::Divisor(HV / H)};
  emulated::mode = mode;
#define CUT(w, s, a) if (warps == w && split == s && ahead == a) return launch<w, s, a>(p, N * HV);
  @CUTS@
  return 1;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    kernel = emulation.CUDA / "gdn" / "recurrent.cuh"
    folder = tmp_path_factory.mktemp("prefill")
    return emulation.library(folder, DRIVER, kernel, cuts=CUTS)


def inputs(lengths, H=1, HV=1, case="usual"):
    """q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale; as oracle.inputs, of any
    two head counts.
    """
    given = oracle.inputs(
        "gdn_prefill", seed=sum(lengths), lengths=lengths, case=case, heads=HV
    )
    heads = [H, H, HV, HV, HV, HV, HV, HV]
    of_heads = [
        x[:n] if x.ndim == 1 else x[:, :n] for n, x in zip(heads, given, strict=False)
    ]
    return [x.contiguous().clone() for x in of_heads] + [given[8], 0.1]


def prefill(library, given, cut=USUAL, mode=PLAIN, in_place=False):
    q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale = given
    output = torch.full_like(v, math.nan)
    state = state.clone()
    new_state = state if in_place else torch.full_like(state, math.nan)
    pointers = [state, cu_seqlens, k, q, v, a, b, A_log, dt_bias, new_state, output]
    table = emulation.addresses(*pointers)
    (T, HV, _), N, H = v.shape, len(cu_seqlens) - 1, q.shape[1]
    T, N = ctypes.c_int64(T), ctypes.c_int64(N)
    assert library.prefill(*cut, mode, table, ctypes.c_float(scale), T, N, H, HV) == 0
    return output, new_state


def agrees(given, found, state_error=2.6e-3):
    right_output, right_state = oracle.gdn_prefill(*given)
    assert oracle.error(found[1], right_state) < state_error
    # the output's rounding to bf16, and that of S and d
    assert oracle.error(found[0], right_output) < 3.2e-3


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "x".join(map(str, cut)))
def test_every_cut_of_the_rows_and_the_rounds(library, cut):
    # three value heads to a query head: no power of two
    given = inputs((49, 0, 16, 7), H=1, HV=3)
    agrees(given, prefill(library, given, cut))


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_every_length(library, length):
    given = inputs((length,))
    agrees(given, prefill(library, given))
    if length == 0:
        assert torch.equal(prefill(library, given)[1], given[3])


def test_a_mix_of_lengths_and_the_contest_s_heads(library):
    given = inputs((5, 33, 0, 1, 18), H=4, HV=8)
    agrees(given, prefill(library, given, (4, 1, 1)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(170, 3), (170, 170), (3, 0, 170)], ids=str)
@pytest.mark.parametrize(
    "cut", [(2, 1, 1), (1, 2, 1), (2, 1, 2)], ids=lambda cut: "x".join(map(str, cut))
)
@pytest.mark.sampled(11)
def test_no_warp_reads_what_is_not_there_yet_or_writes_over_what_is_read(
    library, cut, lengths, mode
):
    """Three rounds and six, guessed and not: each warp as far ahead as its barriers let
    it, or not at all, copies as early and as late as can be.
    """
    given = inputs(lengths)
    usual = prefill(library, given, (1, cut[1], 2))
    found = prefill(library, given, cut, mode)
    agrees(given, found)
    # a row's arithmetic is the same in every cut
    assert torch.equal(found[0], usual[0])


def test_in_place(library):
    given = inputs((20, 0, 33), H=2, HV=2)
    apart, new_state = prefill(library, given)
    output, same = prefill(library, given, in_place=True)
    assert torch.equal(output, apart) and torch.equal(same, new_state)


@pytest.mark.parametrize("case", oracle.CASES)
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_extreme_gates_repeated_keys_and_a_large_state(library, case, size):
    given = inputs((130,), case=case)
    given[3] *= size
    agrees(given, prefill(library, given))


@pytest.mark.parametrize(
    "A_log, a", list(itertools.product((-10.0, 0.0, 10.0), (-10.0, -1.0, 10.0)))
)
def test_gates_at_their_ends(library, A_log, a):
    """At A_log = 10, a = -10 a softplus of 4.5e-5 decides; at 10, 10 a decay is 2^-300,000."""
    given = inputs((33,))
    given[4], given[6] = torch.full((1,), A_log), torch.zeros(1)
    given[5] = torch.full_like(given[5], a)
    agrees(given, prefill(library, given))


def test_what_was_forgotten_stays_forgotten_and_what_came_after_is_kept(library):
    """Every third token forgets all, by 2^-2000: sums of such logarithms would have no
    digits left for the others'.
    """
    given = inputs((62,))
    given[4], given[6] = torch.full((1,), 5.0), torch.zeros(1)
    given[5][:] = torch.where(torch.arange(62) % 3 == 0, 10.0, -5.0).bfloat16()[:, None]
    agrees(given, prefill(library, given))


def test_keys_of_alternating_sign_with_beta_1(library):
    given = inputs((96,), case="still")
    given[1] = given[1][:1].repeat(96, 1, 1)
    given[1][1::2] *= -1
    given[7] = torch.full_like(given[7], 20.0)
    agrees(given, prefill(library, given))


@pytest.mark.skipif(inventory.cuda_home() is None, reason="no nvcc here")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.slow
def test_the_cuts_in_use_compile_without_spills(tmp_path, arch):
    rows = tuned_table.rows(ALGO.tune, tuned_table.load(ALGO))
    cuts = {",".join(str(row.constants[name]) for name in CONSTANTS) for row in rows}
    kernel = (
        "template __global__ void gdn::gdn_prefill_recurrent<{}>"
        "(const __grid_constant__ gdn::Arguments);\n"
    )
    lines = '#include "recurrent.cuh"\n', *map(kernel.format, sorted(cuts))
    (tmp_path / "cuts.cu").write_text("".join(lines))
    nvcc = inventory.cuda_home() / "bin" / "nvcc"
    flags = "-std=c++17", "-O2", f"-arch={arch}", "-cubin", "-Xptxas", "-v"
    shared = {ALGO.folder.parent.parent.joinpath(path).parent for path in ALGO.shares}
    includes = [f"-I{folder}" for folder in (ALGO.folder, *sorted(shared))]
    command = [nvcc, *flags, *includes, "-o", "cuts.cubin", "cuts.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilled = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    assert re.findall(spilled, done.stderr) == [("0", "0")] * len(cuts)
