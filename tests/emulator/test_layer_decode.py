"""The CUDA kernel of gdn_layer on a CPU: the convolution, whose q and k all CTAs of a cluster read
and one of them shifts, the step and the norm, against float64.
"""

import ctypes
import math
import shutil
import subprocess
import sys

import helpers
import pytest
import serving_steps as steps
import torch
from emulator import emulation
from serving_steps import apart, between, heads_apart, off, same

# lanes, rows, passes, warps: 8, 4, 2, 2, 1 and 1 CTAs of a value head
CUTS = [
    (8, 1, 1, 4),
    (16, 2, 1, 8),
    (32, 8, 4, 2),
    (16, 2, 4, 4),
    (8, 4, 1, 8),
    (16, 4, 2, 8),
]
EVERY_CUT = pytest.mark.parametrize("cut", range(len(CUTS)), ids=map(str, CUTS))
DTYPES = [torch.float32, torch.bfloat16]
OUTPUT = 4e-3  # two roundings
STATE = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}
DRIVER = """
#include "layer_decode.cuh"
struct Call {
  void *slots, *qkv, *pool, *a, *b, *A_log, *dt_bias, *output;
  void *conv_state, *conv_weight, *conv_bias, *gate, *norm_weight, *output_scale;
  int64_t slot_stride, qkv_stride, a_stride, b_stride, conv_slot_stride, gate_stride, scale_row, scale_head;
  float scale, norm_epsilon;
  int32_t B, H, HV, slots_end, slots_wide, dt_bias_half, taps_inner, weight_bf16, sigmoid;
  uint32_t head_bytes, pair_bytes, word_bytes;
};
template <int LANES, int ROWS, int PASSES, int WARPS, typename Call>
void launch(const Call& p, uint32_t heads, uint32_t group) {
  using Shape = gdn::LayerDecodeShape<typename Call::State, true, LANES, ROWS, PASSES, WARPS>;
  emulated::launch({heads * Shape::TILES, 1, 1}, WARPS * 32, sizeof(typename Shape::Memory), group * Shape::TILES,
                   [&] { gdn::gdn_layer_decode<Call, true, LANES, ROWS, PASSES, WARPS, 0, 0, 1>(p); });
}
template <typename T>
int run(int cut, const Call& c) {
  using bf = __nv_bfloat16;
  gdn::LayerDecode<gdn::PlainPool<T>> p{};
  p.slots = c.slots, p.pool = (T*)c.pool, p.slot_stride = c.slot_stride, p.first_slot = 1, p.slots_end = c.slots_end;
  p.by_HV = gdn::Divisor(c.HV), p.by_group = gdn::Divisor(c.HV / c.H), p.HV = c.HV, p.H = c.H;
  p.slots_wide = c.slots_wide, p.slots_step = c.slots_wide ? 8 : 4, p.dt_bias_half = c.dt_bias_half;
  p.head_bytes = c.head_bytes, p.qkv = (bf*)c.qkv, p.a = c.a, p.b = c.b, p.A_log = (float*)c.A_log, p.dt_bias = c.dt_bias;
  p.qkv_stride = c.qkv_stride, p.a_stride = c.a_stride, p.b_stride = c.b_stride, p.scale = c.scale, p.epsilon = 1e-6f;
  p.output = (bf*)c.output, p.conv_state = (bf*)c.conv_state, p.conv_weight = (bf*)c.conv_weight;
  p.conv_bias = (bf*)c.conv_bias, p.conv_slot_stride = c.conv_slot_stride, p.pair_bytes = c.pair_bytes;
  p.word_bytes = c.word_bytes, p.taps_inner = c.taps_inner, p.gate = (bf*)c.gate, p.gate_stride = c.gate_stride;
  p.norm_weight = c.norm_weight, p.weight_bf16 = c.weight_bf16, p.norm_epsilon = c.norm_epsilon, p.sigmoid = c.sigmoid;
  const gdn::LayerDecode<gdn::PoolArguments<T>> any{p, p};
  const gdn::ScaledLayerDecode<gdn::PoolArguments<T>> scaled{any, {(float*)c.output_scale, c.scale_row, c.scale_head}};
  const uint32_t heads = c.B * c.HV, group = c.HV / c.H;
  int i = 0;
#define CUT(l, r, n, w) \\
  if (i++ == cut) return c.output_scale ? launch<l, r, n, w>(scaled, heads, group) : \\
    p.plain() ? launch<l, r, n, w>(p, heads, group) : launch<l, r, n, w>(any, heads, group), 0;
  @CUTS@
  return 1;
}
extern "C" int layer(int dtype, int cut, const Call* c) {
  return dtype == 0 ? run<float>(cut, *c) : run<__nv_bfloat16>(cut, *c);
}
"""
# a quarter of it to compile, for a pool of float32 whose heads are dense
PLAIN = DRIVER.replace(
    """c.output_scale ? launch<l, r, n, w>(scaled, heads, group) : \\
    p.plain() ? launch<l, r, n, w>(p, heads, group) : """,
    "",
).replace(
    "launch<l, r, n, w>(any, heads, group)", "launch<l, r, n, w>(p, heads, group)"
)
PLAIN = PLAIN.replace(
    "dtype == 0 ? run<float>(cut, *c) : run<__nv_bfloat16>", "run<float>"
)
Call = emulation.structure(DRIVER, "Call")
KERNEL = emulation.CUDA / "gdn" / "layer_decode.cuh"


def folder_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer_decode")
    shutil.copy(emulation.CUDA / "gdn" / "decode.cuh", folder)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulation.library(
        folder_of(tmp_path_factory), DRIVER, KERNEL, cuts=CUTS, flags=("-O0",)
    )


class Problem:
    """A call's tensors, with as many slots as the greatest number and two more."""

    sigmoid = False
    epsilon = 1e-6
    output_scale = None

    def __init__(self, H, HV, slots, dtype=torch.float32, taps_inner=False):
        draw = torch.Generator().manual_seed(len(slots) * 100 + HV)

        def randn(*shape):
            return torch.randn(*shape, generator=draw)

        B, P = len(slots), max(slots) + 2
        self.H, self.HV, self.channels = H, HV, (2 * H + HV) * 128
        self.qkv = randn(B, self.channels).bfloat16()
        self.a, self.b = randn(B, HV).bfloat16(), randn(B, HV).bfloat16()
        self.A_log, self.dt_bias = randn(HV), randn(HV)
        self.pool = randn(P, HV, 128, 128).to(dtype)
        self.slots = torch.tensor(slots, dtype=torch.int32)
        shape = (P, self.channels, 3) if taps_inner else (P, 3, self.channels)
        self.conv_state = randn(*shape).bfloat16()
        if not taps_inner:
            self.conv_state = self.conv_state.transpose(1, 2)
        self.conv_weight = randn(self.channels, 4).bfloat16()
        self.conv_bias = None
        self.z = randn(B, HV, 128).bfloat16()
        self.weight = 1 + 0.5 * randn(128)
        self.output = torch.full((B, HV, 128), math.nan).bfloat16()

    def call(self, library, cut):
        slot, channel, tap = self.conv_state.stride()
        inner = tap == 1
        given = Call(
            slots=self.slots,
            qkv=self.qkv,
            pool=self.pool,
            a=self.a,
            b=self.b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            output=self.output,
            conv_state=self.conv_state,
            conv_weight=self.conv_weight,
            conv_bias=self.conv_bias,
            gate=self.z,
            norm_weight=self.weight,
            output_scale=self.output_scale,
            scale_row=1,
            scale_head=len(self.slots),
            slot_stride=self.pool.stride(0),
            qkv_stride=self.qkv.stride(0),
            a_stride=self.a.stride(0),
            b_stride=self.b.stride(0),
            conv_slot_stride=slot,
            gate_stride=self.z.stride(0),
            scale=0.1,
            norm_epsilon=self.epsilon,
            B=len(self.slots),
            H=self.H,
            HV=self.HV,
            slots_end=len(self.pool),
            slots_wide=self.slots.dtype == torch.int64,
            dt_bias_half=self.dt_bias.dtype == torch.bfloat16,
            taps_inner=inner,
            weight_bf16=self.weight.dtype == torch.bfloat16,
            sigmoid=self.sigmoid,
            head_bytes=self.pool.stride(1) * self.pool.element_size(),
            pair_bytes=12 if inner else 4,
            word_bytes=4 if inner else 2 * tap,
        )
        dtype = DTYPES.index(self.pool.dtype)
        assert library.layer(dtype, cut, ctypes.byref(given)) == 0


def check(library, problem, cut):
    """A call against float64; what it is not to touch, bit for bit."""
    x = problem
    before = x.pool.clone(), x.conv_state.clone()
    right = steps.layer(
        x.qkv, x.a, x.b, x.A_log, x.dt_bias, *before, x.slots, 0.1, x.conv_weight,
        x.conv_bias, (x.z, x.weight, x.sigmoid, x.epsilon),
    )  # fmt: skip
    x.call(library, cut)
    assert off(x.output, right.output) < OUTPUT
    assert not x.output[x.slots <= 0].any()
    for slot, state in right.states.items():
        assert off(x.pool[slot], state) < STATE[x.pool.dtype]
        assert torch.equal(x.conv_state[slot], right.windows[slot])
    others = [slot for slot in range(len(x.pool)) if slot not in right.states]
    assert same(x.pool[others], before[0][others])
    assert same(x.conv_state[others], before[1][others])


@EVERY_CUT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps_inner", [False, True])
def test_values_and_untouched_slots(library, cut, dtype, taps_inner):
    check(library, Problem(1, 2, [2, 0, 1], dtype, taps_inner), cut)


@EVERY_CUT
@pytest.mark.parametrize(("H", "HV"), [(2, 2), (1, 3), (2, 8), (1, 8)])
def test_other_heads(library, cut, H, HV):
    lanes, rows, passes, warps = CUTS[cut]
    if HV // H * (128 // (warps * (32 // lanes) * rows * passes)) > 16:
        pytest.skip("a cluster has 16 CTAs at most")
    check(library, Problem(H, HV, [1]), cut)


@EVERY_CUT
def test_a_bias_a_sigmoid_and_narrow_constants(library, cut):
    problem = Problem(1, 2, [3, 1])
    draw = torch.Generator().manual_seed(1)
    problem.conv_bias = torch.randn(problem.channels, generator=draw).bfloat16()
    problem.sigmoid, problem.epsilon = True, 0.01
    problem.weight, problem.dt_bias = (
        problem.weight.bfloat16(),
        problem.dt_bias.bfloat16(),
    )
    check(library, problem, cut)


@EVERY_CUT
def test_outputs_of_eight_bits(library, cut):
    """A head's largest one is 448, and all are within half a step of float64 (2^-4 of it)."""
    problem, wide = Problem(1, 2, [3, 0, 1]), Problem(1, 2, [3, 0, 1])
    wide.call(library, cut)
    problem.output = torch.zeros(3, 2, 128, dtype=torch.float8_e4m3fn)
    problem.output_scale = torch.full((2, 3), math.nan)
    problem.call(library, cut)
    output, scale = problem.output.double(), problem.output_scale.T.double()
    exact = wide.output.double()
    live = problem.slots > 0
    assert (output[live].abs().amax(-1) == 448).all() and not output[~live].any()
    torch.testing.assert_close(
        scale[live] * 448, exact[live].abs().amax(-1), rtol=5e-3, atol=0
    )
    torch.testing.assert_close(scale[~live], torch.full((1, 2), 1e-10 / 448).double())
    error = (output * scale[..., None] - exact).abs()
    assert (error <= 0.067 * exact.abs() + scale[..., None] * 2**-9).all()
    assert torch.equal(problem.pool, wide.pool)


@EVERY_CUT
def test_rows_slots_and_heads_that_lie_apart(library, cut):
    problem, dense = Problem(1, 2, [2, 1]), Problem(1, 2, [2, 1])
    for name, gap in dict(qkv=8, a=1, b=3, z=5).items():
        setattr(problem, name, apart(getattr(problem, name), gap))
    problem.pool = heads_apart(problem.pool, 64)
    problem.conv_state = apart(problem.conv_state, 6)
    problem.slots = problem.slots.long()
    for each in (problem, dense):
        each.call(library, cut)
    assert torch.equal(problem.output, dense.output)
    assert torch.equal(problem.pool, dense.pool)
    assert torch.equal(problem.conv_state, dense.conv_state)
    assert between(problem.conv_state).isnan().all()


@EVERY_CUT
def test_what_padding_holds_does_not_matter(library, cut):
    problem = Problem(1, 2, [-1, 1, 100])  # the last one is beyond the pool
    problem.pool, problem.conv_state = problem.pool[:3], problem.conv_state[:3]
    before = problem.pool.clone(), problem.conv_state.clone()
    for name in ("qkv", "a", "b", "z"):
        getattr(problem, name)[[0, 2]] = math.nan
    problem.call(library, cut)
    assert not problem.output[[0, 2]].any() and problem.output[1].isfinite().all()
    for now, then in zip((problem.pool, problem.conv_state), before, strict=True):
        assert same(now[[0, 2]], then[[0, 2]])


@EVERY_CUT
@pytest.mark.parametrize("mode", [1, 2, 3, 4, 6])  # emulated::Mode
def test_the_same_bits_in_every_order_of_warps(library, mode, cut):
    ordered, other = Problem(1, 2, [2]), Problem(1, 2, [2])
    ordered.call(library, cut)
    switch = ctypes.c_int.in_dll(library, "_ZN8emulated4modeE")
    switch.value = mode
    try:
        other.call(library, cut)
    finally:
        switch.value = 0
    assert torch.equal(ordered.output, other.output)
    assert torch.equal(ordered.pool, other.pool)
    assert torch.equal(ordered.conv_state, other.conv_state)


@pytest.mark.slow
def test_no_race_in_a_head_of_one_cta(tmp_path_factory):
    folder = folder_of(tmp_path_factory)
    library = emulation.library(
        folder, PLAIN, KERNEL, cuts=CUTS[5:], races=True, flags=("-O0",)
    )
    Problem(1, 1, [1]).call(library, 0)
    assert emulation.races_in(library, folder) == set()


# what is taken out of the kernel: what then goes wrong, with which constants
WITHOUT = {
    "mbarrier_wait(shared_address(&memory.arrived), 0)": (
        "ends while accesses to it are",
        (16, 2, 1, 8),
    ),
    "flashcore::cluster_wait()": (
        "a barrier that nobody has initialised",
        (16, 2, 1, 8),
    ),
    # with a CTA for each head the wait is for the state of the convolution alone
    "if (TILES > 1 || (CONV && rank == 0)) flashcore::cluster_wait()": (
        "AssertionError",
        (16, 4, 4, 4),
    ),
}
CALL = """
import ctypes, sys
sys.path[:0] = [{tests!r}]
from emulator.test_layer_decode import Problem, check
library = ctypes.CDLL({library!r})
ctypes.c_int.in_dll(library, "_ZN8emulated4modeE").value = {mode}
check(library, Problem(1, 2, [1]), 0)
"""


@pytest.mark.slow  # compiles the kernel again
@pytest.mark.parametrize("what", WITHOUT)
def test_who_does_not_wait_for_its_peers_is_found(tmp_path_factory, tmp_path, what):
    says, cut = WITHOUT[what]
    broken = tmp_path / KERNEL.name
    whole = KERNEL.read_text()
    assert whole.count(what) == 1
    broken.write_text(whole.replace(what, ""))
    folder = folder_of(tmp_path_factory)
    library = emulation.library(folder, PLAIN, broken, cuts=[cut], flags=("-O0",))
    # its first CTA is ahead, or, where it is to be late, the last one
    mode = 0 if says == "AssertionError" else 2
    code = CALL.format(tests=str(helpers.TESTS), library=library._name, mode=mode)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert says in ended.stderr
