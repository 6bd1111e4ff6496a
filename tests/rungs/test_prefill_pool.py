"""cuda-chunk-packed's kernels on a CPU (emulator/), on every path, against float64:
slots of a pool, strided rows, padding, fresh sequences, the norms of q and k.
"""

import ctypes
import math
import shutil

import helpers
import pytest
import torch
from emulator import emulation
from oracle import error
from rungs import test_prefill_chunk as chunk
from rungs import test_prefill_packed as packed
from serving_steps import apart, between, between_heads, bits, heads_apart, same

FOLDER = helpers.OURS / "_cuda" / "prefill_pool"
D = 128

DRIVER = """
template <int GROUPS>
CUtensorMap state_map(const Prefill& p) {
  const int blocks = p.half_pool ? 2 : 4;
  if (K_FIRST)
    return {p.pool, {64, int64_t{p.state_row(p.HV - 1)} + HEAD_DIM, blocks, p.slots},
            {2, blocks * 128, 128, p.slot_stride * (p.half_pool ? 2 : 4)}, {64, 128, GROUPS * blocks / 2, 1}};
  return {p.pool, {64, int64_t{p.state_row(p.HV - 1)} + HEAD_DIM, blocks, p.slots},
          {2, blocks * 128, 128, p.slot_stride * (p.half_pool ? 2 : 4)}, {64, GROUPS * 64, blocks, 1}};
}
CUtensorMap new_state_map(const Prefill& p) { return state_map<1>(p); }
struct Given {
  void *q, *k, *v, *a, *b, *A_log, *dt_bias, *pool, *indices, *has_state, *cu_seqlens, *output, *checkpoints, *starts;
  int64_t qk_row, v_row, a_row, b_row, slot_stride, head_stride, slots, num_tokens, num_checkpoints;
  float scale, epsilon;
  int H, HV, N, first_slot, long_indices, long_lengths, half_pool, half_bias, every, indices_step, k_first;
};
Call call(const Given& g) {
  return {(Token*)g.q, (Token*)g.k, (Token*)g.v, (Token*)g.a, (Token*)g.b, (float*)g.A_log, g.dt_bias, g.pool, g.indices,
          (bool*)g.has_state, g.cu_seqlens, (Token*)g.output, g.checkpoints, g.starts, g.num_checkpoints, g.every,
          g.qk_row, g.v_row, g.a_row, g.b_row, g.slot_stride, g.head_stride, g.slots, g.num_tokens,
          g.scale, g.epsilon, g.H, g.HV, g.N, g.first_slot, uint32_t(g.indices_step), bool(g.long_indices),
          bool(g.long_lengths), bool(g.long_lengths), bool(g.half_pool), bool(g.half_bias),
          false, false, bool(g.k_first)};
}
extern "C" void prefill(int warps, int mode, int members, int segment, const Given* g, void** t) {
  Prefill p{};
  static_cast<Call&>(p) = call(*g);
  p.prepared = (char*)t[0], p.ends = (float*)t[1], p.transfers = (float*)t[2], p.segment = segment;
  if (segment && warps > 8 && warps < 30) forget(p, (float*)t[4], (int*)t[5], 2 * segment, warps == ONE);
  if (warps < 0 || warps > 40) p.plan = (Plan*)t[3], p.ctas = -warps;
  emulated::mode = mode;
  run(p, warps, members);
}
extern "C" int in_one(int64_t T, int64_t N, int64_t HV) { return in_one_launch(T, N, HV / 2, HV, HOME); }
"""

RECURRENT = (
    """
#include "recurrent_call.cuh"
using namespace gdn;
"""
    + DRIVER[DRIVER.index("struct Given") : DRIVER.index("extern")]
    + """
template <int WARPS, int SPLIT, int AHEAD, typename Call>
void launch(const Call& p) {
  using L = Layout<WARPS, SPLIT, AHEAD, true>;
  emulated::launch({uint32_t(p.N * p.HV) * (128 / (16 * WARPS)), 1, 1}, L::THREADS, L::BYTES, 1,
                   [&] { gdn_prefill_recurrent<WARPS, SPLIT, AHEAD, Call>(p); });
}
template <int WARPS, int SPLIT, int AHEAD>
void launch(const Tensors& t) {
  const PackedCall p = packed_call(t);
  if (t.k_first) launch<WARPS, SPLIT, AHEAD>(PackedArguments<true>{p});
  else launch<WARPS, SPLIT, AHEAD>(PackedArguments<false>{p});
}
extern "C" void prefill(int cut, int mode, int, int, const Given* g, void**) {
  Tensors t;
  static_cast<Call&>(t) = call(*g);
  emulated::mode = mode;
  if (cut == 0) launch<1, 2, 2>(t);
  if (cut == 1) launch<2, 1, 2>(t);
  if (cut == 2) launch<4, 1, 1>(t);
}
"""
)


Given = emulation.structure(DRIVER, "Given")


def chunked_of(folder, *, races=False, k_first=False, tokens=emulation.TOKENS):
    """The library of cuda-chunk's kernels."""
    own = FOLDER / "call.h", FOLDER / "tensors.cuh", tokens
    return chunk.library_of(folder, DRIVER, *own, races=races, k_first=k_first)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    return chunked_of(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def chunked_k_first(tmp_path_factory):
    return chunked_of(tmp_path_factory.mktemp("k_first"), k_first=True)


@pytest.fixture(scope="module")
def chunked_f16(tmp_path_factory):
    return chunked_of(tmp_path_factory.mktemp("f16"), tokens=emulation.TOKENS_F16)


def recurrent_of(folder, *, races=False, tokens=emulation.TOKENS):
    """The library of cuda-recurrent's kernel."""
    shutil.copy(tokens, folder)
    for name in ("call.h", "tensors.cuh", "recurrent_call.cuh"):
        shutil.copy(FOLDER / name, folder)
    kernel = emulation.CUDA / "gdn" / "recurrent.cuh"
    return emulation.library(folder, RECURRENT, kernel, races=races)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    return recurrent_of(tmp_path_factory.mktemp("recurrent"))


@pytest.mark.parametrize(
    ("shape", "one"),
    [("8x1024", True), ("16x512", False), ("32x256", False), ("64x64", False)],
)
def test_one_launch_or_two(chunked, shape, one):
    """Sequences and tokens of each, 8 value heads: which was faster
    (before-after-cuda-chunk-packed.json).
    """
    N, tokens = map(int, shape.split("x"))
    assert chunked.in_one(N * tokens, N, 8) == one


# and -3: work tiles in order of length, by 3 CTAs
SPLIT, SYNC, ONE, TWO = chunk.SPLIT, 8, chunk.ONE, chunk.TWO
QUARTER, HALF = chunk.QUARTER, chunk.HALF
PATHS = {
    "recurrent, split": 0,
    "recurrent": 1,
    "recurrent, four": 2,
    "mma.sync, split": SPLIT,
    "mma.sync": SYNC,
    "one warpgroup": ONE,
    "two": TWO,
    "ordered": -3,
    "TMA, quarter": QUARTER,
    "TMA": HALF,
    "TMA, ordered": chunk.TMA - 3,
    "one launch": chunk.FUSED[0],
    "one launch, ordered": chunk.FUSED[2],
}


@pytest.fixture(params=PATHS)
def path(request, chunked, recurrent):
    """(library, how): every kernel that a call can reach."""
    library = recurrent if request.param.startswith("recurrent") else chunked
    return library, PATHS[request.param]


def call(
    path,
    args,
    *,
    mode=0,
    segment=0,
    members=1,
    first_slot=1,
    epsilon=1e-6,
    kept=None,
):
    """Writes new states into the pool; returns the output. kept: checkpoints, where
    they start, chunks between them.
    """
    library, how = path
    rows, a, b, A_log, dt_bias, pool, slots, has_state, cu, scale = args
    T, N, HV = len(rows), len(slots), pool.shape[1]
    H = (rows.shape[1] // D - HV) // 2
    guarded = chunk.full(math.nan, T + 64, HV, D, dtype=rows.dtype)
    memory = chunk.Memory(library, T, N, HV, segment).tensors
    places, starts, every = kept or (torch.empty(0), torch.empty(0), 0)
    given = Given(
        q=rows,
        k=rows[:, H * D :],
        v=rows[:, 2 * H * D :],
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        pool=pool,
        indices=slots,
        has_state=has_state,
        cu_seqlens=cu,
        output=guarded,
        checkpoints=places,
        starts=starts,
        qk_row=rows.stride(0),
        v_row=rows.stride(0),
        a_row=a.stride(0),
        b_row=b.stride(0),
        slot_stride=pool.stride(0),
        head_stride=pool.stride(1),
        slots=len(pool),
        num_tokens=T,
        num_checkpoints=len(places),
        scale=scale or D**-0.5,
        epsilon=epsilon,
        H=H,
        HV=HV,
        N=N,
        first_slot=first_slot,
        long_indices=slots.dtype == torch.int64,
        long_lengths=cu.dtype == torch.int64,
        half_pool=pool.dtype == torch.bfloat16,
        half_bias=dt_bias.dtype == rows.dtype,
        every=every,
        indices_step=slots.stride(0) * slots.element_size(),
        k_first=pool.stride(-1) != 1,
    )
    table = emulation.addresses(*memory)
    library.prefill(how, mode, members, segment, ctypes.byref(given), table)
    assert guarded[T:].isnan().all(), "a write behind the output"
    return guarded[:T]


def faults(path, args, output=4.5e-3, state=3e-3, right=None, **how):
    """What is wrong with a call."""
    right = right or packed.exact(*args)
    old = args[5].clone()
    found = call(path, args, **how), args[5]
    first_slot = how.get("first_slot", 1)
    return packed.differences(args, old, found, right, output, state, first_slot)


def slow(lengths, slots, P, H=1, HV=2, **how):
    """Inputs in which no chunk is forgotten."""
    return packed.inputs(lengths, slots, P, H, HV, decay=-4.0, **how)


def rows_outside_enter_no_state(path, args, before, after, **how):
    """Rows before the first and after the last sequence hold NaN in all that they have.
    Outputs there are not written: they keep the NaN that `call` puts there.
    """
    inside = slice(before, before + len(args[0]))
    for i in range(3):
        length = before + len(args[i]) + after
        rows = args[i].new_full((length, args[i].shape[1]), math.nan)
        rows[inside] = args[i]
        args[i] = rows
    args[8] += before
    output, states = packed.exact(*args)
    old = args[5].clone()
    found = call(path, args, **how)
    assert error(found[inside], output[inside]) < 4.5e-3
    assert found[:before].isnan().all()
    assert found[inside.stop :].isnan().all()
    assert packed.wrong_states(args[5], states, 3e-3) == []
    others = [i for i in range(len(old)) if i not in states]
    assert same(args[5][others], old[others])


@pytest.mark.parametrize(
    ("lengths", "slots", "before", "after"),
    [
        ([70], [2], 0, 50),
        ([70], [2], 70, 0),
        ([3, 65, 20], [4, 2, 1], 5, 130),
    ],
)
@pytest.mark.sampled(3)
def test_rows_outside_of_the_sequences_enter_no_state(
    path, lengths, slots, before, after
):
    """Engines pad their rows."""
    rows_outside_enter_no_state(path, slow(lengths, slots, 5), before, after)


@pytest.mark.parametrize("how", [SPLIT, SYNC, ONE, TWO, HALF])
@pytest.mark.parametrize("before", [0, 70])
@pytest.mark.sampled(5)
def test_rows_outside_of_the_sequences_enter_no_state_in_segments(chunked, how, before):
    args = slow([200, 130], [1, 3], 4)
    rows_outside_enter_no_state((chunked, how), args, before, 140, segment=1)


@pytest.mark.sampled(2)
def test_a_gate_of_nan_is_not_forgotten(path):
    """As in the reference: NaN in all outputs of its head from its token on, and in the
    head's state.
    """
    clean, given = (slow([70, 20], [1, 2], 3) for _ in range(2))
    given[1][66, 1] = math.nan
    expected, found = call(path, clean), call(path, given)
    assert found[66:70, 1].isnan().all()
    assert given[5][1, 1].isnan().all()
    assert torch.equal(found[:, 0], expected[:, 0])
    assert torch.equal(found[70:], expected[70:])
    assert torch.equal(given[5][1, 0], clean[5][1, 0])
    assert torch.equal(given[5][2], clean[5][2])
    # back to the begin of its chunk, or of its 16 tokens, at most
    assert torch.equal(found[:64], expected[:64])


@pytest.mark.parametrize("how", [SYNC, ONE, TWO, HALF])
def test_a_gate_of_nan_is_not_forgotten_in_segments(chunked, how):
    args = slow([300], [1], 2)
    args[1][70, 0] = math.nan
    found = call((chunked, how), args, segment=1)
    assert found[70:, 0].isnan().all()
    assert args[5][1, 0].isnan().all()
    for x in (found[:64, 0], found[:, 1], args[5][1, 1]):
        assert x.isfinite().all()


@pytest.mark.sampled(7)
def test_what_lies_apart_has_the_same_bits(path):
    """Rows, slots, and heads of a slot; slots in a column of a table."""
    dense, rows, heads = (slow([70, 17], [3, 1], 4, 2, 4) for _ in range(3))
    output, states = packed.exact(*dense)
    for i, gap in ((0, 64), (1, 3), (2, 5), (5, 64)):
        rows[i] = apart(rows[i], gap)
    heads[5] = heads_apart(heads[5], 2 * D)
    table = torch.full((2, 2), 99, dtype=torch.int32)
    table[:, 0] = heads[6]
    heads[6] = table[:, 0]
    expected = call(path, dense)
    for args in (rows, heads):
        assert torch.equal(call(path, args), expected)
        assert same(args[5], dense[5])
    # nothing between the slots, or their heads, was written
    assert between(rows[5]).isnan().all()
    assert between_heads(heads[5]).isnan().all()
    assert error(expected, output) < 4.5e-3
    assert packed.wrong_states(dense[5], states, 3e-3) == []


def test_numbers_of_64_bits_are_no_slots_by_their_low_words(path):
    args = slow([5, 20, 3], [1, 2, 3], 4)
    args[6] = torch.tensor([2**32 + 1, 2, -(2**63) + 3])
    before = args[5].clone()
    found = call(path, args)
    assert not bits(found[:5]).any()
    assert not bits(found[25:]).any()
    assert found[5:25].isfinite().all()
    assert same(args[5][[0, 1, 3]], before[[0, 1, 3]])
    assert not same(args[5][2], before[2])


def k_first_faults(path, half, **how):
    args = slow([70, 3, 0, 129, 20, 130], [4, 0, 2, 6, 1, 3], 8, fresh=(2, 3))
    pool = args[5].bfloat16() if half else args[5]
    args[5] = heads_apart(pool.mT.contiguous(), 2 * D).mT
    found = faults(path, args, state=4.5e-3, **how)
    assert between_heads(args[5].mT).isnan().all()
    return found


HALVES = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])


@HALVES
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.sampled(2)
def test_k_first_states_token_by_token(recurrent, cut, half):
    assert k_first_faults((recurrent, cut), half) == []


CHUNKED = [name for name, how in PATHS.items() if "recurrent" not in name]


@pytest.mark.slow
@HALVES
@pytest.mark.parametrize("name", CHUNKED)
def test_k_first_states_in_chunks(chunked_k_first, name, half):
    assert k_first_faults((chunked_k_first, PATHS[name]), half) == []


@pytest.mark.slow
@HALVES
@pytest.mark.parametrize("how", [SPLIT, SYNC, ONE, TWO, HALF])
def test_k_first_states_in_segments(chunked_k_first, how, half):
    assert k_first_faults((chunked_k_first, how), half, segment=1, mode=2) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [SYNC, ONE, TWO, QUARTER])
def test_k_first_states_within_sequences(chunked_k_first, how):
    args = slow([130, 70], [1, 2], 3)
    args[5] = args[5].mT.contiguous().mT
    right = [
        packed.beginning(args, args[5], 0, 64),
        packed.beginning(args, args[5], 0, 128),
    ]
    right.append(packed.beginning(args, args[5], 1, 64))
    kept = torch.full((3, 2, D, D), math.nan)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    assert faults((chunked_k_first, how), args, kept=(kept, starts, 1)) == []
    assert packed.wrong_states(kept.mT, dict(enumerate(right)), 4.5e-3) == []


@pytest.fixture(scope="module")
def recurrent_f16(tmp_path_factory):
    return recurrent_of(tmp_path_factory.mktemp("f16"), tokens=emulation.TOKENS_F16)


def float16_faults(path, half, **how):
    """Tokens that bfloat16 does not hold. An operand's rounding is an eighth of bfloat16's."""
    args = slow([70, 3, 0, 129, 20, 130], [4, 0, 2, 6, 1, 3], 8, fresh=(2, 3))
    draw = torch.Generator().manual_seed(3)
    for i in (0, 1, 2, 4):
        noise = torch.rand(args[i].shape, generator=draw) * 4e-3
        args[i] = (args[i].float() * (1 + noise)).half()
    if half:
        args[5] = args[5].bfloat16()
    return faults(path, args, output=6e-4, state=3e-3 if half else 6e-4, **how)


@HALVES
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.sampled(2)
def test_float16_token_by_token(recurrent_f16, cut, half):
    assert float16_faults((recurrent_f16, cut), half) == []


@pytest.mark.slow
@HALVES
@pytest.mark.parametrize("name", CHUNKED)
def test_float16_in_chunks(chunked_f16, name, half):
    assert float16_faults((chunked_f16, PATHS[name]), half) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [SPLIT, SYNC, ONE, TWO, HALF])
def test_float16_in_segments(chunked_f16, how):
    assert float16_faults((chunked_f16, how), False, segment=1, mode=2) == []


@pytest.mark.parametrize("how", [ONE, TWO, -3])
@pytest.mark.sampled(3)
def test_chunk_after_chunk(chunked, how):
    """A CTA of the intra-chunk kernel that goes through chunks gives the same bits as
    one CTA for each.
    """

    def results(ctas, mode):
        args = slow([20, 64 * 4 + 5, 0, 64], [4, 2, 3, 1], 5)
        chunked.fit(ctas)
        return call((chunked, how), args, mode=mode), args[5]

    try:
        expected = results(1 << 30, 0)
        for ctas, modes in ((1, (0, 3, 7)), (3, (0, 1, 2, 4, 5, 8, 16))):
            for mode in modes:
                assert all(map(same, results(ctas, mode), expected)), (ctas, mode)
    finally:
        chunked.fit(1 << 30)


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.sampled(5)
def test_slots_padding_fresh_sequences_and_norms(path, mode):
    args = slow([70, 3, 0, 129, 20, 0], [4, 0, 2, 6, -1, 1], 8, fresh=(2, 3))
    assert faults(path, args, mode=mode) == []


@pytest.mark.sampled(2)
def test_numbers_of_64_bits_a_bias_in_bfloat16_and_slot_0(path):
    args = slow([65, 5], [3, 1], 4)
    args[4] = args[4].bfloat16()
    args[6], args[8] = args[6].long(), args[8].long()
    right = packed.exact(*args)
    for i in (0, 2):
        args[5][i] = args[5][i + 1].clone()
    assert faults(path, args, right=right) == []
    args = slow([5, 65], [1, 2], 3)  # where only what is below 0 is padding
    output, states = packed.exact(*args)
    args[5][:2] = args[5][1:].clone()
    args[6] -= 1
    right = output, {slot - 1: state for slot, state in states.items()}
    assert faults(path, args, right=right, first_slot=0) == []


@pytest.mark.sampled(3)
def test_a_pool_in_bfloat16(path):
    args = slow([70, 3, 0, 129, 20], [4, 0, 2, 6, 1], 8, fresh=(2, 3))
    args[5] = args[5].bfloat16()
    assert faults(path, args, state=4.5e-3) == []


def test_without_the_norm_and_without_has_initial_state(path):
    args = slow([70, 17], [3, 1], 4)
    rows = args[0].float()
    for i in (0, D):
        rows[:, i : i + D] = torch.nn.functional.normalize(rows[:, i : i + D], dim=-1)
    args[0] = rows.bfloat16()
    right = packed.exact(*args)
    args[7] = None
    how = dict(right=right, epsilon=-1.0, output=6e-3, state=6e-3)
    assert faults(path, args, **how) == []


# the binding's for 0
@pytest.mark.parametrize("epsilon", [1e-6, torch.finfo(torch.float32).tiny])
@pytest.mark.sampled(3)
def test_keys_of_zeros_divide_by_no_zero(path, epsilon):
    args = slow([70, 3], [1, 2], 3)
    args[0][:, : 2 * D] = 0
    assert not bits(call(path, args, epsilon=epsilon)).any()
    assert args[5][1:].isfinite().all()


@pytest.mark.parametrize("how", [SPLIT, SYNC, ONE, TWO, HALF])
@pytest.mark.parametrize(("segment", "half", "mode"), [(1, False, 2), (2, True, 1)])
@pytest.mark.sampled(5)
def test_segments(chunked, how, segment, half, mode):
    """The other two pairs of lengths and types are those of test_states_within_sequences."""
    args = slow([200, 64, 0, 140, 130], [1, 5, 0, 2, 3], 6, fresh=(3,))
    if half:
        args[5] = args[5].bfloat16()
    assert faults((chunked, how), args, segment=segment, mode=mode, state=4.5e-3) == []


def independent(path, mode, segment=0):
    """Assert that NaN in one sequence reaches no other."""
    clean, given = (slow([10, 70, 10, 65], [4, 1, 2, 3], 5) for _ in range(2))
    given[0][80:90] = math.nan
    expected = call(path, clean, segment=segment)
    found = call(path, given, mode=mode, segment=segment)
    for rows in (slice(80), slice(90, None)):
        assert torch.equal(found[rows], expected[rows])
    assert torch.equal(given[5][[1, 3, 4]], clean[5][[1, 3, 4]])
    assert not found[80:90].isfinite().any()


@pytest.mark.sampled(5)
def test_a_sequence_does_not_depend_on_its_neighbours(path):
    """A tile holds rows of the next sequence, too: nothing of them may reach this one,
    not even as 0 x NaN.
    """
    independent(path, mode=3)


@pytest.mark.parametrize("how", [SPLIT, SYNC, ONE, TWO, QUARTER, HALF])
@pytest.mark.sampled(2)
def test_a_sequence_in_segments_does_not_depend_on_its_neighbours(chunked, how):
    independent((chunked, how), mode=7, segment=1)


@pytest.mark.slow
def test_groups_of_heads_and_many_tiles(chunked):
    lengths, slots = [70, 5, 130, 64, 0, 33], [6, 2, 9, 1, 0, 3]
    for how in (-1, -4, TWO, chunk.TMA - 4):
        args = slow(lengths, slots, 10, 2, 6, fresh=(0,))
        assert faults((chunked, how), args, members=3, mode=5) == []


SLOW = [pytest.param(segment, False, marks=pytest.mark.slow) for segment in (0, 2)]


@pytest.mark.parametrize("how", [SYNC, ONE, TWO, QUARTER])
@pytest.mark.parametrize(("segment", "half"), [(1, True), *SLOW])
@pytest.mark.sampled(4)
def test_states_within_sequences(chunked, how, half, segment):
    """After each `every` chunks that are full, and nowhere else."""
    lengths, slots = [200, 64, 140, 0, 70], [1, 5, 2, 4, 0]
    for every, count in ((1, 6), (2, 2)):
        args = slow(lengths, slots, 6, fresh=(2,))
        args[5] = args[5].bfloat16() if half else args[5]
        starts = torch.tensor([2, 6, 8, 11, 12], dtype=torch.int32)
        used = {}
        for n, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            for i in range(length // (64 * every) if slot else 0):
                state = packed.beginning(args, args[5], n, (i + 1) * 64 * every)
                used[int(starts[n]) + i] = state
        assert len(used) == count
        kept = torch.full((14, 2, D, D), math.nan, dtype=args[5].dtype)
        given = dict(kept=(kept, starts, every), segment=segment, mode=3)
        assert faults((chunked, how), args, state=4.5e-3, **given) == []
        assert packed.wrong_states(kept, used, 4.5e-3) == []
        assert kept[[i for i in range(14) if i not in used]].isnan().all()
