"""cuda-v5's kernel on a CPU (emulator/): its indices, sums and gates for every way to
cut a row, against float64.

What ptxas, memory and timing make of it is for a GPU to say; a lane that reads the
wrong partner shows here.
"""

import ctypes
import itertools
import math

import oracle
import pytest
import torch
from emulator import emulation
from oracle import error

CUTS = [
    (lanes, rows, passes, warps)
    for lanes, rows, passes, warps in itertools.product(
        (8, 16, 32), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)
    )
    if warps * (32 // lanes) * rows * passes <= 128
    and 2 * rows <= lanes
    and rows * 128 // lanes <= 32
    if passes == 1 or (rows >= 4 and warps in (1, 4))
]

DRIVER = """
#include "decode.cuh"
template <typename T, int LANES, int ROWS, int PASSES, int WARPS>
void launch(const gdn::Arguments<T>& p, uint32_t heads) {
  emulated::launch(heads * (128 / (WARPS * (32 / LANES) * ROWS * PASSES)), WARPS * 32,
                   [&] { gdn::gdn_decode_v5<gdn::Arguments<T>, LANES, ROWS, PASSES, WARPS, 0, 0, 1>(p); });
}
template <typename T>
int run(int lanes, int rows, int passes, int warps, void** t, float scale, uint32_t B, uint32_t H, uint32_t HV) {
  using bf = __nv_bfloat16;
  const gdn::Arguments<T> p = {(T*)t[0], (bf*)t[1], (bf*)t[2], (bf*)t[3], (bf*)t[4], (bf*)t[5], (float*)t[6],
                               (float*)t[7], (T*)t[8], (bf*)t[9], scale, HV, gdn::Divisor(HV), gdn::Divisor(HV / H)};
#define CUT(l, r, n, w) \
  if (lanes == l && rows == r && passes == n && warps == w) return launch<T, l, r, n, w>(p, B * HV), 0;
  @CUTS@
  return 1;
}
extern "C" int decode(int bf16, int lanes, int rows, int passes, int warps, void** t, float scale, uint32_t B,
                      uint32_t H, uint32_t HV) {
  return (bf16 ? run<__nv_bfloat16> : run<float>)(lanes, rows, passes, warps, t, scale, B, H, HV);
}
extern "C" uint32_t divide(uint32_t n, uint32_t d) { return gdn::Divisor(d).divide(n); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    kernel = emulation.CUDA / "gdn" / "decode.cuh"
    folder = tmp_path_factory.mktemp("decode")
    return emulation.library(folder, DRIVER, kernel, cuts=CUTS, flags=("-O0",))


def inputs(B, H, HV, dtype=torch.float32):
    """q, k, v, state, A_log, a, dt_bias, b as the definition has them, keys of length 1."""
    draw = torch.Generator().manual_seed(B * 1000 + HV)

    def randn(*shape):
        return torch.randn(*shape, generator=draw)

    q, k, v = (randn(B, 1, heads, 128).bfloat16() for heads in (H, H, HV))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    state = randn(B, HV, 128, 128).to(dtype)
    A_log, dt_bias = randn(HV), randn(HV)
    a, b = (randn(B, 1, HV).bfloat16() for _ in range(2))
    return [q, k, v, state, A_log, a, dt_bias, b]


def decode(library, cut, given, in_place=False):
    q, k, v, state, A_log, a, dt_bias, b = given
    B, _, HV, _ = v.shape
    output = torch.full_like(v, math.nan)
    state = state.clone()
    new_state = state if in_place else torch.full_like(state, math.nan)
    gates = a, b, A_log, dt_bias
    table = emulation.addresses(state, k, q, v, *gates, new_state, output)
    how = int(state.dtype == torch.bfloat16), *cut, table, ctypes.c_float(0.1)
    assert library.decode(*how, B, q.shape[2], HV) == 0
    return output, new_state


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "x".join(map(str, cut)))
def test_every_cut_of_a_row(library, cut):
    given = inputs(B=2, H=1, HV=3)  # three value heads to a query head: no power of two
    output, new_state = decode(library, cut, given)
    right_output, right_state = oracle.gdn_decode(*given, 0.1)
    assert error(new_state, right_state) < 1e-6
    assert error(output, right_output) < 3e-3  # one rounding to bf16


BF16 = [(8, 1, 1, 4), (16, 4, 1, 2), (32, 8, 1, 1), (16, 4, 2, 4), (32, 8, 4, 4)]


@pytest.mark.parametrize("cut", BF16, ids=lambda cut: "x".join(map(str, cut)))
def test_a_state_in_bf16(library, cut):
    given = inputs(B=1, H=2, HV=4, dtype=torch.bfloat16)
    output, new_state = decode(library, cut, given)
    right_output, right_state = oracle.gdn_decode(*given, 0.1)
    exact = torch.from_numpy(right_state).to(torch.bfloat16)
    # only where float32 and float64 fall to different sides
    assert (new_state != exact).float().mean() < 1e-3
    assert error(output, right_output) < 3e-3


def test_in_place(library):
    given = inputs(B=2, H=2, HV=2)
    apart, new_state = decode(library, (16, 2, 1, 2), given)
    output, same = decode(library, (16, 2, 1, 2), given, in_place=True)
    assert torch.equal(output, apart) and torch.equal(same, new_state)


@pytest.mark.parametrize(
    "A_log, a", list(itertools.product((-10.0, 0.0, 10.0), (-10.0, -1.0, 10.0)))
)
def test_gates_at_their_ends(library, A_log, a):
    """At A_log = 10, a = -10 a softplus of 4.5e-5 decides, which log(1 + x) would lose."""
    given = inputs(B=1, H=1, HV=1)
    given[4][:], given[5][:], given[6][:] = A_log, a, 0
    _, new_state = decode(library, (16, 2, 1, 2), given)
    assert error(new_state, oracle.gdn_decode(*given, 0.1)[1]) < 3e-6


@pytest.mark.parametrize(
    "d", [1, 2, 3, 5, 7, 8, 12, 48, 63, 64, 65, 1000, 65535, 2**20 + 1, 2**31 - 1]
)
def test_division_without_a_division(library, d):
    numbers = {0, 1, d - 1, d, d + 1, 2 * d - 1, 2**31 - 1, 2**31 - 2, 2**30, 123456789}
    numbers |= {d * q + r for q in (3, 1000, (2**31 - 1) // d - 1) for r in (-1, 0, 1)}
    for n in sorted(n for n in numbers if 0 <= n < 2**31):
        assert library.divide(n, d) == n // d, (n, d)
