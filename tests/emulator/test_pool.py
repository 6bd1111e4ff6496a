"""The kernel of cuda-v5-packed on a CPU: states in the slots of a pool, strided rows,
padding, fresh slots, the norm of q and k, for states of float32, bfloat16 and float16
and tokens of bfloat16 and float16, against float64.
"""

import ctypes
import math

import pytest
import serving_steps as steps
import torch
from emulator import emulation
from oracle import error
from serving_steps import between, between_heads, heads_apart

CUTS = [
    (8, 1, 1, 4),
    (16, 1, 1, 8),
    (16, 2, 1, 4),
    (16, 4, 1, 1),
    (16, 4, 2, 1),
    (32, 8, 1, 2),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.1
# one rounding of the new state
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}

DRIVER = """
#include "decode.cuh"
struct Call {
  void *slots, *qkv, *pool, *a, *b, *A_log, *dt_bias, *new_pool, *new_slots, *has_state, *output;
  int64_t slot_stride, new_slot_stride, qkv_stride, a_stride, b_stride;
  float scale, epsilon;
  int32_t B, H, HV, first_slot, slots_step, new_slots_step, dt_bias_half, slots_wide, new_slots_wide, slots_end;
  int32_t given, wide_beta, half_tokens, k_first;
  uint32_t head_bytes;
};
template <int LANES, int ROWS, int PASSES, int WARPS, typename Pool>
void launch(const Pool& p, uint32_t heads) {
  emulated::launch(heads * (128 / (WARPS * (32 / LANES) * ROWS * PASSES)), WARPS * 32,
                   [&] { gdn::gdn_decode_v5<Pool, LANES, ROWS, PASSES, WARPS, 0, 0, 1>(p); });
}
template <int LANES, int WARPS, typename Pool>
int columns(const Pool& p, uint32_t heads) {
  emulated::launch(heads * (128 / (WARPS * (32 / LANES) * (16 / sizeof(typename Pool::State)))), WARPS * 32,
                   [&] { gdn::gdn_decode_k_first<Pool, LANES, WARPS, 1>(p); });
  return 0;
}
template <typename Pool>
int k_first(int cut, const Pool& p, uint32_t heads) {
  return cut == 0 ? columns<8, 2>(p, heads) : columns<16, 1>(p, heads);
}
template <typename T>
int run(int cut, const Call& c) {
  using bf = __nv_bfloat16;
  gdn::GivenGates<gdn::PlainPool<T>> p{};
  p.slots = c.slots, p.pool = (T*)c.pool, p.slot_stride = c.slot_stride, p.first_slot = c.first_slot;
  p.by_HV = gdn::Divisor(c.HV), p.by_group = gdn::Divisor(c.HV / c.H), p.HV = c.HV, p.H = c.H;
  p.slots_step = c.slots_step, p.new_slots_step = c.new_slots_step, p.dt_bias_half = c.dt_bias_half;
  p.slots_wide = c.slots_wide, p.new_slots_wide = c.new_slots_wide, p.slots_end = p.new_slots_end = c.slots_end;
  p.head_bytes = c.head_bytes;
  p.has_state = (bool*)c.has_state, p.qkv = (bf*)c.qkv, p.a = c.a, p.b = c.b, p.wide_beta = c.wide_beta, p.A_log = (float*)c.A_log;
  p.dt_bias = c.dt_bias, p.qkv_stride = c.qkv_stride, p.a_stride = c.a_stride, p.b_stride = c.b_stride;
  p.scale = c.scale, p.epsilon = c.epsilon, p.new_pool = (T*)c.new_pool, p.new_slots = c.new_slots;
  p.new_slot_stride = c.new_slot_stride, p.output = (bf*)c.output;
  const gdn::PlainPool<T>& plain = p;
  const gdn::GivenGates<gdn::PoolArguments<T>> given{p};
  const gdn::PoolArguments<T>& any = p;
  const gdn::HalfTokens<gdn::GivenGates<gdn::PoolArguments<T>>> half_given{given};
  const gdn::HalfTokens<gdn::PoolArguments<T>> half{any};
  const uint32_t heads = c.B * c.HV;
  int i = 0;
  if (c.k_first && c.half_tokens) return c.given ? k_first(cut, half_given, heads) : k_first(cut, half, heads);
  if (c.k_first) return c.given ? k_first(cut, given, heads) : k_first(cut, any, heads);
#define CUT(l, r, n, w) \\
  if (i++ == cut) { \\
    if (c.half_tokens && c.given) return launch<l, r, n, w>(half_given, heads), 0; \\
    if (c.half_tokens) return launch<l, r, n, w>(half, heads), 0; \\
    if (c.given) return p.plain() ? launch<l, r, n, w>(p, heads) : launch<l, r, n, w>(given, heads), 0; \\
    return p.plain() ? launch<l, r, n, w>(plain, heads) : launch<l, r, n, w>(any, heads), 0; \\
  }
  @CUTS@
  return 1;
}
extern "C" int decode(int dtype, int cut, const Call* c) {
  return dtype == 0 ? run<float>(cut, *c) : dtype == 1 ? run<__nv_bfloat16>(cut, *c) : run<__half>(cut, *c);
}
"""


Call = emulation.structure(DRIVER, "Call")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    kernel = emulation.CUDA / "gdn" / "decode.cuh"
    folder = tmp_path_factory.mktemp("pool")
    return emulation.library(folder, DRIVER, kernel, cuts=CUTS, flags=("-O0",))


class Problem:
    """A call's tensors; `gap` elements lie between rows and between slots, and NaN in them."""

    def __init__(
        self,
        H,
        HV,
        slots,
        count,
        dtype=torch.float32,
        gap=0,
        tokens=torch.bfloat16,
    ):
        B = len(slots)
        draw = torch.Generator().manual_seed(B * 100 + HV)
        self.H, self.HV = H, HV

        def rows(n, width, gap, dtype=tokens):
            whole = torch.full((n, width + gap), math.nan, dtype=dtype)
            whole[:, :width] = torch.randn(n, width, generator=draw).to(dtype)
            return whole[:, :width]

        self.qkv = rows(B, (2 * H + HV) * 128, 8 * gap)
        self.a, self.b = rows(B, HV, gap), rows(B, HV, 2 * gap)
        pool = rows(count, HV * 128 * 128, 64 * gap, dtype)
        self.pool = pool.unflatten(1, (HV, 128, 128))
        self.A_log, self.dt_bias = (torch.randn(HV, generator=draw) for _ in range(2))
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.output = torch.full((B, HV, 128), math.nan, dtype=tokens)

    def call(
        self,
        library,
        cut,
        *,
        new_slots=None,
        has_state=None,
        first_slot=1,
        epsilon=1e-6,
    ):
        """Writes `output`, and new states into `pool`."""
        slots, pool = self.slots, self.pool
        new_slots = slots if new_slots is None else new_slots
        given = Call(
            slots=slots,
            qkv=self.qkv,
            pool=pool,
            a=self.a,
            b=self.b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            new_pool=pool,
            new_slots=new_slots,
            has_state=has_state,
            output=self.output,
            slot_stride=pool.stride(0),
            new_slot_stride=pool.stride(0),
            qkv_stride=self.qkv.stride(0),
            a_stride=self.a.stride(0),
            b_stride=self.b.stride(0),
            scale=SCALE,
            epsilon=epsilon,
            B=len(slots),
            H=self.H,
            HV=self.HV,
            first_slot=first_slot,
            slots_step=slots.stride(0) * slots.element_size(),
            new_slots_step=new_slots.stride(0) * new_slots.element_size(),
            dt_bias_half=self.dt_bias is not None
            and self.dt_bias.dtype == self.qkv.dtype,
            slots_wide=slots.dtype == torch.int64,
            new_slots_wide=new_slots.dtype == torch.int64,
            slots_end=max(len(pool), first_slot),
            head_bytes=pool.stride(1) * pool.element_size(),
            given=self.A_log is None,
            wide_beta=self.b.dtype == torch.float32,
            half_tokens=self.qkv.dtype == torch.float16,
            k_first=pool.stride(-1) != 1,
        )
        assert library.decode(DTYPES.index(pool.dtype), cut, ctypes.byref(given)) == 0

    def right(self, *, new_slots=None, has_state=None, first_slot=1, epsilon=1e-6):
        """(output, {slot: new state}) in float64."""
        output, states = torch.zeros(self.output.shape, dtype=torch.float64), {}
        heads = self.qkv.unflatten(1, (-1, 128))
        q, k, v = heads.split([self.H, self.H, self.HV], dim=1)
        live = range(first_slot, len(self.pool))
        for i, slot in enumerate(self.slots.tolist()):
            if slot not in live:
                continue
            state = self.pool[slot]
            if has_state is not None and not has_state[i]:
                state = torch.zeros_like(state)
            token = [x[i : i + 1] for x in (q, k, v, self.a, self.b)]
            how = self.A_log, self.dt_bias, SCALE, epsilon >= 0
            (output[i],), (after,) = steps.walk(state, *token, *how)
            target = slot if new_slots is None else int(new_slots[i])
            if target in live:
                states[target] = after
        return output, states


def check(library, problem, cut, **how):
    """A call's outputs, the slots that it wrote, and that no bit of another slot changed."""
    output, states = problem.right(**how)
    before = problem.pool.clone()
    problem.call(library, cut, **how)
    rounding = 3e-3 if problem.output.dtype == torch.bfloat16 else 4e-4
    assert error(problem.output, output) < rounding
    for slot, found in enumerate(problem.pool):
        if slot in states:
            assert error(found, states[slot]) < TOLERANCE[before.dtype]
        else:
            assert torch.equal(found, before[slot])
    live = range(how.get("first_slot", 1), len(before))
    padding = [i for i, slot in enumerate(problem.slots.tolist()) if slot not in live]
    assert not problem.output[padding].any()


def same_bits(library, cut, problem, other):
    for each in (problem, other):
        each.call(library, cut)
    assert torch.equal(problem.output, other.output)
    assert torch.equal(problem.pool, other.pool)


EACH = range(len(CUTS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", EACH, ids=lambda i: "x".join(map(str, CUTS[i])))
def test_slots_of_a_pool(library, cut, dtype):
    check(library, Problem(1, 3, [3, 1], 5, dtype), cut)


@pytest.mark.parametrize("cut", [0, 3, 4])
def test_strided_rows_and_slots_are_the_same_bits(library, cut):
    dense, strided = (Problem(2, 4, [2, 1, 4], 5, gap=gap) for gap in (0, 3))
    for name in ("qkv", "a", "b", "pool"):
        getattr(strided, name).copy_(getattr(dense, name))
    strided.A_log, strided.dt_bias = dense.A_log, dense.dt_bias
    same_bits(library, cut, dense, strided)
    # nothing between the slots was written
    assert between(strided.pool).isnan().all()


@pytest.mark.parametrize("slots", [[0, 2, -1, 1, 0], [-1], [0, 0, 3]])
def test_padding_is_zeros_and_touches_no_state(library, slots):
    check(library, Problem(1, 2, slots, 4), 2)


def test_slot_0_is_a_state_where_only_negative_slots_are_padding(library):
    check(library, Problem(1, 2, [0, -1, 2], 3), 1, first_slot=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_slot_is_live_where_the_first_is_beyond_the_pool(library, dtype):
    check(library, Problem(1, 2, [0, -1, 2], 3, dtype), 1, first_slot=9)


def test_slots_of_64_bits_and_a_bias_in_bfloat16(library):
    problem = Problem(2, 2, [3, -1, 1], 4)
    problem.slots, problem.dt_bias = problem.slots.long(), problem.dt_bias.bfloat16()
    check(library, problem, 3)


@pytest.mark.parametrize("beta", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["plain", "int64 slots"])
def test_gates_that_are_given(library, wide, beta):
    problem = Problem(2, 4, [3, -1, 1], 4, gap=3)
    log_g = torch.full_like(problem.a, math.nan, dtype=torch.float32)
    problem.a = log_g.copy_(-problem.a.float().square())
    problem.a[0, 0], problem.a[2, 1] = -math.inf, 0.0
    problem.b = problem.b.float().sigmoid().to(beta)
    problem.A_log = problem.dt_bias = None
    if wide:
        problem.slots = problem.slots.long()
    check(library, problem, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", EACH, ids=lambda i: "x".join(map(str, CUTS[i])))
def test_tokens_of_float16(library, cut, dtype):
    """Subnormal numbers among them, and a bias of 16 bits."""
    problem = Problem(1, 3, [3, 0, 1], 5, dtype, gap=3, tokens=torch.float16)
    problem.qkv[:, :20] *= 1e-6
    check(library, problem, cut)
    problem.dt_bias = problem.dt_bias.half()
    check(library, problem, cut)


@pytest.mark.parametrize("beta", [torch.float32, torch.float16], ids=str)
def test_gates_that_are_given_beside_tokens_of_float16(library, beta):
    problem = Problem(2, 4, [3, -1, 1], 4, tokens=torch.float16)
    problem.a = -problem.a.float().square()
    problem.b = problem.b.float().sigmoid().to(beta)
    problem.A_log = problem.dt_bias = None
    check(library, problem, 3)


@pytest.mark.parametrize("given", [False, True], ids=["raw", "given"])
@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [0, 1], ids=["8 lanes", "16 lanes"])
def test_k_first_states(library, cut, dtype, tokens, given):
    """Padding, a fresh slot, other slots, heads that lie apart, int64."""
    problem = Problem(2, 4, [3, -1, 1, 2, 9], 7, dtype, gap=3, tokens=tokens)
    problem.pool[1] = math.nan
    problem.slots = problem.slots.long()
    if given:
        problem.a = -problem.a.float().square()
        problem.b = problem.b.float().sigmoid()
        problem.A_log = problem.dt_bias = None
    v_first = problem.pool
    problem.pool = heads_apart(v_first.mT.contiguous(), 96).mT
    has_state = torch.tensor([True, True, False, True, True])
    new_slots = torch.tensor([3, 4, 1, 5, 2])
    check(library, problem, cut, has_state=has_state, new_slots=new_slots)
    assert between_heads(problem.pool.mT).isnan().all()


FAR = [2**31, 2**32, 2**32 + 1, -(2**32) + 2, -(2**63) + 3, -3 - 2**32, 2**63 - 1]


@pytest.mark.parametrize("cut", [0, 4])
def test_numbers_of_64_bits_are_no_slots_by_their_low_words(library, cut):
    problem = Problem(1, 2, [0] * (len(FAR) + 1), 4)
    problem.slots = torch.tensor([*FAR, 2])
    check(library, problem, cut)
    check(library, problem, cut, first_slot=0)
    problem.slots = torch.arange(len(FAR) + 1) % 4
    check(library, problem, cut, first_slot=0, new_slots=torch.tensor([*FAR, 2]))


def test_a_slot_that_the_pool_does_not_have_is_padding(library):
    problem = Problem(1, 2, [4, 2, 2**31 - 1, 5, 1], 4)
    check(library, problem, 1)


@pytest.mark.parametrize("cut", [0, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_slot_may_lie_apart(library, cut, dtype):
    dense, apart = (Problem(1, 3, [3, 1], 5, dtype) for _ in range(2))
    apart.pool = heads_apart(dense.pool, 96)
    same_bits(library, cut, dense, apart)
    assert between_heads(apart.pool).isnan().all()


def test_slots_in_a_column_of_a_table(library):
    problem = Problem(2, 4, [3, 0, 1], 5)
    table = torch.full((3, 2), 99, dtype=torch.int32)
    table[:, 0] = problem.slots
    problem.slots = table[:, 0]
    check(library, problem, 2)


@pytest.mark.parametrize("cut", [2, 4])
def test_a_fresh_slot_starts_from_zeros_whatever_it_holds(library, cut):
    problem = Problem(1, 2, [1, 2, 3], 4)
    problem.pool[2] = math.nan
    check(library, problem, cut, has_state=torch.tensor([True, False, True]))


def test_new_states_may_go_to_other_slots_or_nowhere(library):
    problem = Problem(1, 2, [1, 2, 3, 4], 8)
    for cut, dtype in ((3, torch.int64), (2, torch.int32)):
        new_slots = torch.tensor([5, 6, -1, 8], dtype=dtype)
        check(library, problem, cut, new_slots=new_slots)


def test_without_the_norm_q_and_k_are_taken_as_they_are(library):
    problem = Problem(1, 2, [1, 2], 3)
    problem.qkv[:, 128:256] *= 0.1
    check(library, problem, 2, epsilon=-1.0)


# the binding's for 0
@pytest.mark.parametrize("epsilon", [1e-6, torch.finfo(torch.float32).tiny])
def test_keys_of_zeros_divide_by_no_zero(library, epsilon):
    problem = Problem(1, 2, [1, 2], 3)
    problem.qkv[:, :256] = 0
    problem.call(library, 2, epsilon=epsilon)
    assert not problem.output.any()
    assert problem.pool.isfinite().all()
