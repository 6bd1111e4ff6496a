"""gdn_prefill_packed: the algos against tests/oracle.py; slots,
padding, fresh sequences.
"""

import math

import helpers
import oracle
import pytest
import torch
from oracle import error
from serving_steps import apart, between, bits, same

from gdn_cli.catalog.workloads import embedded, select, stressed, twin
from gdn_cli.errors import UsageError
from gdn_cli.worker import trace_set_writer
from gdn_cli.worker.judge import check, dataset

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_prefill_packed"]
D = 128


def inputs(
    lengths,
    slots,
    P,
    H,
    HV,
    device="cpu",
    fresh=(),
    scale=None,
    decay=-1.0,
):
    """The op's inputs. Slot 0, slots of fresh sequences and all that no sequence names
    hold NaN: whoever reads them is found out. q and k have any length, as a convolution
    leaves them.
    """
    g, T = torch.Generator().manual_seed(sum(lengths) * 10 + HV), sum(lengths)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    pool = randn(P, HV, D, D)
    read = [slot for i, slot in enumerate(slots) if slot > 0 and i not in fresh]
    pool[[i for i in range(P) if i not in read]] = math.nan
    q, k = randn(T, H * D) * 3, randn(T, H * D) * 0.2
    k[1:2] *= 0.005  # what is added below the root shows
    k[2:3] *= 1e4  # its square is beyond float16
    row = torch.cat([q, k, randn(T, HV * D)], dim=1).bfloat16()
    a, b = (randn(T, HV).bfloat16() for _ in range(2))
    A_log = randn(HV) + decay
    dt_bias = randn(HV) * 0.25
    indices = torch.tensor(slots, dtype=torch.int32)
    has_state = torch.tensor([i not in fresh for i in range(len(slots))])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    made = row, a, b, A_log, dt_bias, pool, indices, has_state, ends
    return [*(x.to(device) for x in made), scale]


def exact(*args):
    """(output, {slot: new state}) in float64."""
    output, pool = oracle.gdn_prefill_packed(*args)
    slots = [slot for slot in args[6].tolist() if slot > 0]
    return torch.from_numpy(output), {s: torch.from_numpy(pool[s]) for s in slots}


def faults(kernel, args, output=5e-3, state=5e-3):
    """What is wrong with a call. An output that nothing wrote is NaN."""
    right, old = exact(*args), args[5].clone()
    if kernel.destination_passing:
        found, pool = args[0].new_full(right[0].shape, math.nan), args[5]
        kernel(args, [found, pool])
    else:
        found, pool = kernel.returns(args)
    return differences(args, old, (found, pool), right, output, state)


def differences(args, old, found, right, output, state, first_slot=1):
    """What is wrong with outputs and a pool that was `old`: padding and others' slots, too."""
    tokens, pool = found
    right_tokens, states = right
    others = [i for i in range(len(pool)) if i not in states]
    wrong = [f"slot {i}" for i in others if not same(pool[i], old[i])]
    cu = args[8].tolist()
    for i, slot in enumerate(args[6].tolist()):
        if slot < first_slot and bits(tokens[cu[i] : cu[i + 1]]).any():
            wrong.append(f"padding {i}")
    if not (off := error(tokens, right_tokens)) < output:
        wrong.append(f"output {off:.2g}")
    return wrong + wrong_states(pool, states, state)


def wrong_states(pool, states, limit):
    """Slots that do not hold the state that is to be there."""
    off = {slot: error(pool[slot], state) for slot, state in states.items()}
    return [f"slot {slot}: {e:.2g}" for slot, e in off.items() if not e < limit]


# lengths, slots, slots of the pool, sequences that start from zeros
CASES = {
    "one": ([5], [1], 2, ()),
    "padding around": ([3, 70, 1, 4, 0], [0, 3, -1, 1, 0], 5, ()),
    "fresh ones": ([5, 0, 64, 0], [4, 2, 1, 3], 5, (1, 2)),
    "the last slot": ([17, 65], [6, 1], 7, (0,)),
    "padding alone": ([3, 2], [0, -1], 3, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_on_a_cpu(case):
    lengths, slots, P, fresh = CASES[case]
    kernel = helpers.built(f"{OP.name}/pt-reference", "cpu")[1]
    for H, HV, scale in ((2, 6, None), (1, 1, 0.3)):
        args = inputs(lengths, slots, P, H, HV, fresh=fresh, scale=scale)
        assert faults(kernel, args, 3e-3, 1e-5) == []


def test_twins_have_room_in_their_pool_and_every_fourth_sequence_is_fresh():
    def drawn(workload):
        return dict(zip(OP.inputs, dataset.load_inputs(OP, workload), strict=True))

    (w,) = select(OP, embedded(OP), chosen=["seq_lens=3x2+5"])
    sizes = {"total_seq_len": 11, "num_seqs": 4, "len_cu_seqlens": 5, "pool_size": 9}
    assert w.axes == sizes
    x = drawn(w)
    assert x["has_initial_state"].tolist() == [True, True, True, False]
    assert x["cu_seqlens"].tolist() == [0, 2, 4, 6, 11]
    assert x["cu_seqlens"].dtype == torch.int32
    assert len(set(x["state_indices"].tolist())) == 4
    said = "pool_size=2 with num_seqs=2; .*give num_seqs \\+ 1 or more"
    with pytest.raises(UsageError, match=said):
        twin(OP, {"total_seq_len": 9, "num_seqs": 2, "pool_size": 2})
    (hard,) = stressed(OP, ["padding"])
    slots = drawn(hard)["state_indices"].tolist()
    assert slots[0] == slots[4] == 0
    assert slots[-1] == -1


def test_a_data_set_holds_what_is_true_or_false(tmp_path):
    w = twin(OP, {"total_seq_len": 4, "num_seqs": 4})
    path = tmp_path / "blob.safetensors"
    trace_set_writer.write_blob(OP, w, path, tmp_path)
    tensors, _ = dataset.blob_header(path)
    assert tensors["has_initial_state"] == ("BOOL", (4,))
    assert trace_set_writer.complete(w, path)


# --- on a GPU

gpu = pytest.mark.gpu

# lengths, slots, slots of the pool, fresh sequences: on an H200 with 2/4 heads each has
# another path (dispatch_rule.h)
ON_GPU = {
    **CASES,
    "token by token": ([300, 0, 17, 64], [4, 1, 0, 2], 6, (3,)),
    "one warpgroup": ([1100], [2], 4, ()),
    "one warpgroup, fresh": ([900, 1000, 3], [2, 1, 0], 4, (1,)),
    "segments": ([1500], [1], 3, ()),
    "segments, fresh": ([1500, 70], [2, 1], 3, (0,)),
    "segments of padding": ([1400, 70], [0, 1], 3, ()),
    "tiles in turn": ([130] * 40, [*range(2, 41), -1], 50, (0, 7, 38)),
    "longest first": (
        [*(37 * i % 211 for i in range(39)), 900],
        [*range(40, 1, -1), 0],
        50,
        (0, 7, 38),
    ),
}


@pytest.fixture(scope="module")
def on_gpu():
    return helpers.built(f"{OP.name}/cuda-chunk-packed", "cuda")[1]


@pytest.fixture(scope="module")
def library(on_gpu):
    import tvm_ffi

    return tvm_ffi.load_module(str(on_gpu.runnable.metadata.misc["binary"]))


def called(library, args, checkpoints=()):
    """The output of the function that a server calls."""
    name = "chunk_prefill_checkpoints" if checkpoints else "chunk_prefill"
    HV = args[5].shape[1]
    qk = (args[0].shape[1] - HV * D) // 2
    rows = args[0].split([qk, qk, HV * D], dim=1)
    out = args[0].new_full((len(args[0]), HV, D), math.nan)
    tokens = (x.unflatten(1, (-1, D)) for x in rows)
    library.get_function(name)(*tokens, *args[1:], out, 1, 1e-6, *checkpoints)
    return out


def on_gpu_inputs(case, H=2, HV=4, **how):
    lengths, slots, P, fresh = ON_GPU[case]
    return inputs(lengths, slots, P, H, HV, "cuda", fresh, **how)


@gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_on_a_gpu(on_gpu, case):
    for decay in (-1.0, -4.0):
        assert faults(on_gpu, on_gpu_inputs(case, decay=decay)) == []


@gpu
@pytest.mark.parametrize("heads", [(1, 3), (4, 8), (2, 2)], ids=str)
def test_at_other_heads_on_a_gpu(on_gpu, heads):
    for name in ("token by token", "tiles in turn"):
        assert faults(on_gpu, on_gpu_inputs(name, *heads)) == []


SOME = ["token by token", "one warpgroup, fresh", "segments, fresh"]


@gpu
@pytest.mark.parametrize("case", [*SOME, "longest first"])
def test_a_pool_of_bfloat16_and_rows_and_slots_that_lie_apart_on_a_gpu(library, case):
    args = on_gpu_inputs(case, decay=-4.0)
    for dtype, limit in ((torch.float32, 5e-3), (torch.bfloat16, 6e-3)):
        given = check.cloned(args)
        given[4], given[5] = given[4].bfloat16(), given[5].to(dtype)
        given[6], given[8] = given[6].long(), given[8].long()
        right_output, right = exact(*given)
        for i, gap in ((0, 64), (1, 3), (2, 5), (5, 64)):
            given[i] = apart(given[i], gap)
        assert error(called(library, given), right_output) < 6e-3
        assert wrong_states(given[5], right, limit) == []
        assert between(given[5]).isnan().all()


@gpu
def test_a_slot_beyond_two_to_the_31_elements_on_a_gpu(library):
    P = 68_000  # 4.5 GB
    args = inputs([70, 5], [1, 2], 3, 1, 2, "cuda")
    right_output, right = exact(*args)
    small = args[5]
    args[5] = torch.zeros(P, 2, D, D, dtype=torch.bfloat16, device="cuda")
    args[5][P - 1], args[5][P - 3] = small[1], small[2]
    args[6] = torch.tensor([P - 1, P - 3], device="cuda")
    assert error(called(library, args), right_output) < 6e-3
    assert wrong_states(args[5], {P - 1: right[1], P - 3: right[2]}, 6e-3) == []
    assert not args[5][: P - 3].any()
    assert not args[5][P - 2].any()


@gpu
@pytest.mark.parametrize("case", ["token by token", "segments, fresh", "tiles in turn"])
def test_a_graph_follows_its_slots_on_a_gpu(on_gpu, case):
    """Captured once, replayed with other slots, other padding and other lengths of as
    many tokens.
    """
    lengths, slots, *_ = ON_GPU[case]
    args = on_gpu_inputs(case)
    args[5] = torch.randn(args[5].shape, device="cuda")
    start = args[5].clone()
    output = args[0].new_empty(len(args[0]), 4, D)
    graph = helpers.captured(lambda: on_gpu(args, [output, args[5]]))
    args[5].copy_(start)
    args[6].copy_(torch.tensor([*slots[1:], slots[0]]))
    args[7].copy_(~args[7])
    args[8].copy_(torch.tensor([0, *lengths[::-1]]).cumsum(0))
    right_output, right = exact(*args)
    graph.replay()
    assert error(output, right_output) < 6e-3
    assert wrong_states(args[5], right, 5e-3) == []


@gpu
@pytest.mark.parametrize("case", [*SOME, "tiles in turn"])
def test_states_within_sequences_on_a_gpu(library, case):
    """A checkpoint is the state that the sequence's beginning alone leaves."""
    lengths, slots, *_ = ON_GPU[case]
    args = on_gpu_inputs(case, decay=-4.0)
    right_output, right = exact(*args)
    before = args[5].clone()
    counts = [n // 128 for n in lengths]
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0)
    kept = torch.full((int(starts[-1]), 4, D, D), math.nan, device="cuda")
    assert error(called(library, args, (kept, starts, 128)), right_output) < 6e-3
    assert wrong_states(args[5], right, 5e-3) == []
    longest = sorted(range(len(lengths)), key=lambda n: -lengths[n])[:3]
    for n in longest:
        if slots[n] <= 0:
            assert kept[starts[n] : starts[n + 1]].isnan().all()
        elif counts[n]:
            state = beginning(args, before, n, 128 * counts[n])
            assert error(kept[int(starts[n + 1]) - 1], state) < 5e-3


def beginning(args, pool, n, length):
    """The state that the first tokens of sequence n leave in float64."""
    row, a, b, A_log, dt_bias, _, slots, has_state, cu, scale = args
    rows = slice(int(cu[n]), int(cu[n]) + length)
    tokens = row[rows], a[rows], b[rows], A_log, dt_bias
    one = slice(n, n + 1)
    ends = torch.tensor([0, length])
    _, states = exact(*tokens, pool, slots[one], has_state[one], ends, scale)
    return states[int(slots[n])]


@gpu
def test_what_cannot_be_is_refused_on_a_gpu(on_gpu, library):
    def good():
        return inputs([5, 3], [1, 2], 3, 2, 4, "cuda")

    def refused(says, call, i, x):
        args = good()
        args[i] = x
        before = args[5].clone()
        with pytest.raises(ValueError, match=says):
            call(args)
        assert same(before, args[5])

    def op(args):
        on_gpu(args, [args[0].new_zeros(8, 4, D), args[5]])

    def server(args):
        called(library, args)

    row, a, b, _, _, pool, _, has_state, cu, _ = good()
    refused("1000 columns are not", op, 0, row[:, :1000].contiguous())
    dense = "mixed_qkv: expected dense but for its first axis"
    refused(dense, op, 0, row.T.contiguous().T)
    shape = r"a: expected bfloat16 \[8, 4\], got bfloat16 \[8, 3\]"
    refused(shape, server, 1, a[:, :3])
    refused("b: expected bfloat16", server, 2, b.float())
    refused("cu_seqlens: expected int32, got float", server, 8, cu.float())
    refused("cu_seqlens: expected shape", server, 8, cu[:2])
    refused("has_initial_state: expected bool, got", server, 7, has_state.int())
    with pytest.raises(ValueError, match="new_pool: expected pool itself, in place"):
        on_gpu(good(), [row.new_zeros(8, 4, D), pool.clone()])
