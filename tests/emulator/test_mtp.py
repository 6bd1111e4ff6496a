"""The CUDA kernel of gdn_mtp and gdn_mtp_packed on a CPU: several tokens of each
sequence, states from slots of a pool, every way to keep new ones, against a step in
float64.
"""

import ctypes
import itertools
import math
import shutil

import pytest
import serving_steps as steps
import torch
from emulator import emulation
from oracle import error
from serving_steps import between_heads, heads_apart, same

OUTPUTS, LAST, SLOTS, BUFFER = range(4)  # what is kept: mtp_verify's modes
# rows, warps of a row, groups of rows
CUTS = [(8, 4, 1), (16, 1, 4), (16, 2, 2), (16, 4, 1), (8, 1, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# 16 bits: one rounding of a new state
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}

ARGUMENTS = """
struct Call {
  void *slots, *accepted, *cu_seqlens, *pool, *k, *q, *v, *a, *b, *A_log, *dt_bias, *output, *states, *states_rows;
  int64_t slot_stride, states_stride, state_stride, batch[5], token[5];  // strides of k, q, v, a, b
  float scale, epsilon;
  int32_t B, H, HV, tokens, slots_step, columns, first_slot, mode, shift, rows_shift, dt_bias_half, slots_end, half_tokens, k_first;
  uint32_t head_bytes;
};
void fill(gdn::MtpArguments& p, const Call& c) {
  using bf = __nv_bfloat16;
  p.slots = c.slots, p.accepted = c.accepted, p.cu_seqlens = (int32_t*)c.cu_seqlens, p.pool = c.pool;
  p.slot_stride = c.slot_stride, p.k = (bf*)c.k, p.q = (bf*)c.q, p.v = (bf*)c.v, p.a = (bf*)c.a, p.b = (bf*)c.b;
  p.A_log = (float*)c.A_log, p.dt_bias = c.dt_bias, p.output = (bf*)c.output, p.states = c.states;
  p.states_rows = c.states_rows, p.states_stride = c.states_stride, p.state_stride = c.state_stride;
  p.k_batch = c.batch[0], p.q_batch = c.batch[1], p.v_batch = c.batch[2], p.a_batch = c.batch[3];
  p.k_token = c.token[0], p.q_token = c.token[1], p.v_token = c.token[2], p.a_token = c.token[3];
  p.b_batch = c.batch[4], p.b_token = c.token[4];
  p.scale = c.scale, p.epsilon = c.epsilon, p.HV = c.HV, p.slots_step = c.slots_step, p.tokens = c.tokens;
  p.columns = c.columns, p.first_slot = c.first_slot, p.mode = c.mode, p.dt_bias_half = c.dt_bias_half;
  p.slot_shift = c.shift, p.accepted_shift = c.accepted ? c.shift : 0, p.rows_shift = c.rows_shift;
  p.slots_end = c.slots_end, p.head_bytes = c.head_bytes;
  p.by_HV = gdn::Divisor(c.HV), p.by_group = gdn::Divisor(c.HV / c.H);
}
"""
DRIVER = (
    f"""
#include "mtp.cuh"
{ARGUMENTS}"""
    + """
template <typename Token, typename T, int TOKENS, bool WRITES, int ROWS, int SPLIT, int GROUPS>
void launch(const gdn::MtpArguments& p, uint32_t heads) {
  emulated::launch(heads * (128 / (ROWS * GROUPS)), (SPLIT * GROUPS + 1) * 32,
                   [&] { gdn::gdn_mtp<T, TOKENS, WRITES, ROWS, SPLIT, GROUPS, 0, 0, 1, false, Token>(p); });
}
template <typename Token, typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS>
int k_first(const gdn::MtpArguments& p, uint32_t heads) {
  emulated::launch(heads * (128 / (ROWS * GROUPS)), (SPLIT * GROUPS + 1) * 32,
                   [&] { gdn::gdn_mtp<T, TOKENS, true, ROWS, SPLIT, GROUPS, 0, 0, 1, false, Token, true>(p); });
  return 0;
}
template <typename T>
int k_first(int cut, const Call& c, const gdn::MtpArguments& p) {
  using bf = __nv_bfloat16;
  const uint32_t heads = c.B * c.HV;
  if constexpr (!std::is_same_v<T, __half>) {
    if (cut == 0) return k_first<bf, T, 4, 8, 4, 1>(p, heads);
    if (cut == 1) return k_first<__half, T, 4, 16, 2, 2>(p, heads);
    if (cut == 2) return k_first<bf, T, 8, 16, 2, 2>(p, heads);
  }
  return 1;
}
template <typename Token, typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS>
int launch(const gdn::MtpArguments& p, uint32_t heads) {
  if (p.mode == gdn::OUTPUTS) launch<Token, T, TOKENS, false, ROWS, SPLIT, GROUPS>(p, heads);
  else launch<Token, T, TOKENS, true, ROWS, SPLIT, GROUPS>(p, heads);
  return 0;
}
template <typename T>
int run(int cut, const Call& c) {
  using bf = __nv_bfloat16;
  gdn::MtpArguments p{};
  fill(p, c);
  if (c.k_first) return k_first<T>(cut, c, p);
  int i = 0;
#define CUT(r, s, g)                                                                               \\
  if (i++ == cut && c.half_tokens) {                                                               \\
    if constexpr (!std::is_same_v<T, __half> && s > 1) { /* two cuts are enough */                 \\
      if (c.tokens <= 4) return launch<__half, T, 4, r, s, g>(p, c.B * c.HV);                      \\
      return launch<__half, T, 8, r, s, g>(p, c.B * c.HV);                                         \\
    }                                                                                              \\
  } else if (i - 1 == cut)                                                                         \\
  if constexpr (!std::is_same_v<T, __half> || s == 1) { /* one is enough */                        \\
    if (c.tokens <= 4) return launch<bf, T, 4, r, s, g>(p, c.B * c.HV);                            \\
    return launch<bf, T, 8, r, s, g>(p, c.B * c.HV);                                               \\
  }
  @CUTS@
  return 1;
}
extern "C" int verify(int dtype, int cut, const Call* c) {
  return dtype == 0 ? run<float>(cut, *c) : dtype == 1 ? run<__nv_bfloat16>(cut, *c) : run<__half>(cut, *c);
}
"""
)


Call = emulation.structure(DRIVER, "Call")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    shutil.copy(emulation.CUDA / "gdn" / "decode.cuh", folder)
    kernel = emulation.CUDA / "gdn" / "mtp.cuh"
    return emulation.library(folder, DRIVER, kernel, cuts=CUTS, flags=("-O0",))


class Problem:
    """A call's tensors: B sequences of T tokens, [B, T] slots that are all different
    and not 0, NaN in slot 0. With `lengths` all tokens in one row, and a sequence for
    each length. `gap`: NaN between tokens and between slots.
    """

    limit = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # of outputs

    def __init__(
        self,
        H,
        HV,
        B,
        T,
        dtype=torch.float32,
        gap=0,
        lengths=(),
        tokens=torch.bfloat16,
    ):
        draw = torch.Generator().manual_seed(100 * B + 10 * HV + T)
        self.H, self.HV, self.B, self.T = H, HV, B, T
        self.ends = [0, *itertools.accumulate(lengths or [T] * B)]
        self.one_row = bool(lengths)
        many = self.ends[-1]

        def rows(n, *shape, dtype=tokens, gap=gap):
            width = math.prod(shape)
            whole = torch.full((n, width + gap), math.nan, dtype=dtype)
            whole[:, :width] = torch.randn(n, width, generator=draw).to(dtype)
            return whole[:, :width].unflatten(1, shape)

        self.q, self.k = (rows(many, H, 128, gap=8 * gap) for _ in range(2))
        self.k *= 0.1
        self.v, self.a, self.b = rows(many, HV, 128), rows(many, HV), rows(many, HV)
        self.A_log, self.dt_bias = (torch.randn(HV, generator=draw) for _ in range(2))
        self.pool = rows(B * T + 1, HV, 128, 128, dtype=dtype, gap=64 * gap)
        self.pool[0] = math.nan
        self.slots = (torch.randperm(B * T, generator=draw) + 1).int().view(B, T)
        self.accepted = torch.randint(1, T + 1, (B,), generator=draw).int()
        self.states = torch.full((B + 1, T, HV, 128, 128), math.nan, dtype=dtype)
        self.states_rows = None
        self.output = torch.full((many, HV, 128), math.nan, dtype=tokens)

    def call(self, library, cut, mode, **how):
        """Writes `output`, and states into `pool` or `states`."""
        given = ctypes.byref(self.arguments(mode, **how))
        dtype = DTYPES.index(self.pool.dtype)
        assert library.verify(dtype, cut, given) == 0

    def arguments(self, mode, *, first_slot=1, epsilon=1e-6, scale=0.1):
        five = [self.k, self.q, self.v, self.a, self.b]
        # an attribute, so that it is there in the call
        self.cu_seqlens = torch.tensor(self.ends, dtype=torch.int32)
        buffer = mode == BUFFER
        states = self.states if buffer else self.pool
        rows = self.states_rows
        return Call(
            **{name: getattr(self, name) for name in (*"kqvab", "A_log", "dt_bias")},
            slots=self.slots,
            accepted=self.accepted,
            cu_seqlens=self.cu_seqlens if self.one_row else None,
            pool=self.pool,
            output=self.output,
            states=states,
            states_rows=rows,
            slot_stride=self.pool.stride(0),
            states_stride=states.stride(0) if buffer else 0,
            state_stride=states.stride(1 if buffer else 0),
            batch=tuple(0 if self.one_row else self.T * x.stride(0) for x in five),
            token=tuple(x.stride(0) for x in five),
            scale=scale,
            epsilon=epsilon,
            B=self.B,
            H=self.H,
            HV=self.HV,
            tokens=self.T,
            slots_step=self.slots.stride(0) * self.slots.element_size(),
            columns=1 if self.slots.ndim == 1 else self.T,
            first_slot=first_slot,
            mode=mode,
            shift=self.slots.element_size().bit_length() - 1,
            rows_shift=2 if rows is None else rows.element_size().bit_length() - 1,
            dt_bias_half=self.dt_bias.dtype == self.q.dtype,
            slots_end=len(self.pool),
            half_tokens=self.q.dtype == torch.float16,
            k_first=self.pool.stride(-1) != 1,
            head_bytes=self.pool.stride(1) * self.pool.element_size(),
        )

    def right(self, mode, *, first_slot=1, epsilon=1e-6, scale=0.1):
        """(output, {slot: state}, {(row, token): state}) in float64, token by token."""
        output = torch.zeros(self.output.shape, dtype=torch.float64)
        pool, states = {}, {}
        live = range(first_slot, len(self.pool))
        for i in range(self.B):
            accepted = 1 if self.accepted is None else int(self.accepted[i])
            slots = self.slots[i].view(-1).tolist()
            if not 1 <= accepted <= self.T or slots[accepted - 1] not in live:
                continue
            start = slots[accepted - 1]
            rows = slice(self.ends[i], self.ends[i + 1])
            tokens = [x[rows] for x in (self.q, self.k, self.v, self.a, self.b)]
            how = self.A_log, self.dt_bias, scale, epsilon >= 0
            output[rows], after = steps.walk(self.pool[start], *tokens, *how)
            row = i if self.states_rows is None else int(self.states_rows[i])
            for t, S in enumerate(after):
                if mode == SLOTS and slots[t] in live:
                    pool[slots[t]] = S
                if mode == BUFFER:
                    states[row, t] = S
            if mode == LAST:
                pool[start] = after[-1] if len(after) else self.pool[start].double()
        return output, pool, states


class KFirst(Problem):
    """The same with states that are [K, V] in memory."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.pool = self.pool.mT.contiguous().mT
        self.states = self.states.mT.contiguous().mT


def check_order(library, mode, cut, kind) -> None:
    """Equal calls of `kind`, a Problem, have the same bits in another order of warps."""
    expected, problem = kind(1, 1, 2, 4), kind(1, 1, 2, 4)
    expected.call(library, cut, SLOTS)
    order = ctypes.c_int.in_dll(library, "_ZN8emulated4modeE")
    order.value = mode
    try:
        problem.call(library, cut, SLOTS)
    finally:
        order.value = 0
    assert torch.equal(problem.output, expected.output)
    assert torch.equal(problem.pool[1:], expected.pool[1:])


def check(library, problem, cut, mode, **how):
    """A call's outputs, the states that it wrote, and that no bit of anything else changed."""
    output, pool, states = problem.right(mode, **how)
    before = problem.pool.clone()
    limit = TOLERANCE[before.dtype]
    problem.call(library, cut, mode, **how)
    assert error(problem.output, output) < problem.limit[problem.output.dtype]
    assert problem.output[output.abs().sum((1, 2)) == 0].eq(0).all()
    for slot, found in enumerate(problem.pool):
        if slot in pool:
            assert error(found, pool[slot]) < limit
        else:
            assert same(found, before[slot])
    for at in itertools.product(range(problem.B + 1), range(problem.T)):
        if at in states:
            assert error(problem.states[at], states[at]) < limit
        else:
            assert problem.states[at].isnan().all()


def same_bits(library, cut, mode, *problems):
    """Assert that all of these give the first one's outputs and states."""
    first, *others = problems
    for problem in problems:
        problem.call(library, cut, mode)
    for problem in others:
        assert torch.equal(problem.output, first.output)
        assert same(problem.pool[1:], first.pool[1:])
        assert same(problem.states, first.states)


EVERY_MODE = pytest.mark.parametrize("mode", [OUTPUTS, LAST, SLOTS, BUFFER])
MOST = pytest.mark.parametrize("mode", [OUTPUTS, SLOTS])


EACH = [(cut, dtype) for cut in range(len(CUTS)) for dtype in DTYPES[:2]]


@pytest.mark.parametrize(("cut", "dtype"), [*EACH, (1, torch.float16)], ids=str)
@pytest.mark.parametrize("T", [2, 4, 8])
def test_a_state_for_each_token_in_its_slot(library, cut, T, dtype):
    check(library, Problem(1, 1, 2, T, dtype), cut, SLOTS)


@EVERY_MODE
@pytest.mark.parametrize("T", [3, 4, 6])
def test_every_way_to_keep_states(library, mode, T):
    check(library, Problem(1, 3, 2, T), T % 3, mode)
    check(library, Problem(1, 1, 2, T, torch.bfloat16), T % 2, mode)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("T", [3, 8])
@EVERY_MODE
def test_tokens_of_float16(library, mode, T, dtype):
    """Subnormal numbers among them, and a bias of 16 bits."""
    for cut, bias in ((0, torch.float32), (2, torch.float16)):
        problem = Problem(1, 2, 2, T, dtype, tokens=torch.float16)
        problem.dt_bias = problem.dt_bias.to(bias)
        problem.q[:, :, :20] *= 1e-6
        check(library, problem, cut, mode)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("mode", [LAST, SLOTS, BUFFER])
@pytest.mark.parametrize(("cut", "T"), [(0, 3), (1, 4), (2, 8)])
def test_k_first_states(library, cut, T, mode, dtype):
    tokens = torch.float16 if cut == 1 else torch.bfloat16
    problem = KFirst(1, 2, 3, T, dtype, tokens=tokens)
    problem.accepted[1] = 0
    check(library, problem, cut, mode)


def test_states_go_to_rows_of_a_buffer(library):
    problem = Problem(1, 2, 3, 3)
    problem.states_rows = torch.tensor([2, 0, 3], dtype=torch.int32)
    check(library, problem, 1, BUFFER)


def test_one_slot_for_each_sequence(library):
    """Of 64 bits, and in a column of a table."""
    for wide in (False, True):
        problem = Problem(1, 2, 3, 4)
        column = problem.slots[:, 1]
        problem.slots = column.contiguous().long() if wide else column
        problem.accepted = None
        for mode in (OUTPUTS, LAST, BUFFER):
            check(library, problem, 0, mode)


@MOST
def test_padding_and_counts_out_of_range_are_zeros_and_touch_no_state(library, mode):
    problem = Problem(1, 2, 9, 3)
    counts = [1, 0, 3, 4, -1, 2, 2**31 - 1, 1, 1]
    problem.accepted = torch.tensor(counts, dtype=torch.int32)
    # 0 starts nowhere, 2 and 5 skip a token
    problem.slots[0, 0], problem.slots[2, 1], problem.slots[5, 2] = 0, 0, -1
    # so do 7 and 8, with slots that the pool does not have
    problem.slots[7, 0], problem.slots[8, 1] = len(problem.pool), 2**31 - 1
    check(library, problem, 0, mode)


FAR = [2**31, 2**32 + 1, -(2**32) + 2, -(2**63) + 3, 2**63 - 1]


@MOST
def test_numbers_of_64_bits_are_no_slots_and_no_counts_by_their_low_words(
    library, mode
):
    problem = Problem(1, 1, 2 * len(FAR) + 1, 2)
    problem.slots = problem.slots.long()
    problem.accepted = torch.ones(problem.B, dtype=torch.int64)
    # where a sequence starts, or where it only writes; then counts
    for i, far in enumerate(FAR):
        problem.slots[i, i % 2] = far
        problem.accepted[len(FAR) + i] = 2**32 + 1 if i % 2 else -(2**32) + 1
    check(library, problem, 0, mode)


def test_a_row_of_64_bits_is_none_by_its_low_word(library):
    problem = Problem(1, 1, 3, 2)
    problem.states_rows = torch.tensor([2**32, 1, -(2**63) + 3])
    problem.slots, problem.accepted = problem.slots.long(), problem.accepted.long()
    problem.call(library, 1, BUFFER)
    assert problem.states[1].isfinite().all()
    assert problem.states[[0, 2, 3]].isnan().all()


@EVERY_MODE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_slot_may_lie_apart(library, mode, dtype):
    dense, apart = Problem(1, 3, 2, 3, dtype), Problem(1, 3, 2, 3, dtype)
    apart.pool = heads_apart(dense.pool, 96)
    apart.states = heads_apart(dense.states.flatten(0, 1), 96).unflatten(0, (3, 3))
    same_bits(library, 1, mode, dense, apart)
    assert between_heads(apart.pool).isnan().all()
    assert between_heads(apart.states.flatten(0, 1)).isnan().all()


def test_slot_0_is_a_state_where_only_negative_slots_are_padding(library):
    problem = Problem(1, 1, 2, 2)
    problem.pool[0] = 0.5
    problem.slots = torch.tensor([[0, 1], [-1, 3]], dtype=torch.int32)
    problem.accepted = None
    check(library, problem, 2, SLOTS, first_slot=0)


@pytest.mark.parametrize(
    ("lengths", "T"), [([3, 1, 4, 2], 4), ([1, 8, 5], 8), ([1, 0, 2], 2)]
)
@EVERY_MODE
def test_sequences_of_different_lengths(library, lengths, T, mode):
    check(library, Problem(1, 2, len(lengths), T, lengths=lengths), T % 3, mode)


def test_rows_of_slots_may_lie_4_gib_apart(library):
    """Two rows with nothing but address space in between: a product of 32 bits would
    wrap to the first one.
    """
    problem = Problem(1, 1, 3, 1)
    try:
        table = torch.empty(2 * (2**29 + 8) + 8, dtype=torch.int32)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    slots = problem.slots[:, 0]
    problem.slots, problem.accepted = table.as_strided((3, 1), (2**29 + 8, 1)), None
    problem.slots.copy_(slots[:, None])
    check(library, problem, 0, SLOTS)


@pytest.mark.parametrize("cut", [0, 1])
def test_strided_tokens_and_slots_are_the_same_bits(library, cut):
    dense, strided = Problem(2, 4, 2, 3), Problem(2, 4, 2, 3, gap=1)
    for name in ("q", "k", "v", "a", "b", "pool"):
        getattr(strided, name).copy_(getattr(dense, name))
    strided.A_log, strided.dt_bias = dense.A_log, dense.dt_bias
    same_bits(library, cut, SLOTS, dense, strided)


def test_without_the_norm_and_with_a_bias_in_bfloat16(library):
    problem = Problem(2, 2, 2, 4)
    problem.dt_bias = problem.dt_bias.bfloat16()
    check(library, problem, 3, SLOTS, epsilon=-1.0)


@pytest.mark.parametrize("T", [4, 8])
def test_a_decay_of_0_forgets_everything_and_divides_by_nothing(library, T):
    problem = Problem(1, 2, 2, T)
    problem.A_log.fill_(4)
    problem.a[1::2] = 60  # g is 0 for every second token, and tiny or 1 for the others
    problem.a[::2] = -60
    check(library, problem, 0, SLOTS)
    problem.pool[1:] *= 1e30
    problem.call(library, 0, OUTPUTS)
    assert problem.output.isfinite().all()


# the binding's for 0
@pytest.mark.parametrize("epsilon", [1e-6, torch.finfo(torch.float32).tiny])
def test_keys_of_zeros_divide_by_no_zero(library, epsilon):
    problem = Problem(1, 1, 2, 4)
    problem.q[:], problem.k[:] = 0, 0
    check(library, problem, 2, SLOTS, epsilon=epsilon)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
def test_a_nan_in_a_later_token_does_not_reach_the_earlier_ones(library, name):
    problem, clean = Problem(1, 1, 1, 4), Problem(1, 1, 1, 4)
    getattr(problem, name)[2] = math.nan
    for each in (problem, clean):
        each.call(library, 0, SLOTS)
    assert torch.equal(problem.output[:2], clean.output[:2])
    assert problem.output[2].isnan().all()
    earlier = clean.slots[0, :2].long()
    assert torch.equal(problem.pool[earlier], clean.pool[earlier])


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("mode", [2, 4, 6])  # emulated::Mode
def test_the_same_bits_in_every_order_of_warps(library, mode, cut):
    check_order(library, mode, cut, Problem)
    if cut < 3:
        check_order(library, mode, cut, KFirst)
