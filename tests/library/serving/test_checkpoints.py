"""States within prompts, for prefix caches, and which of a call's states may be kept: against
float64, on a CPU and on a GPU.
"""

from __future__ import annotations

import pytest
import serving_steps as steps
import torch
from serving_steps import D, error, same

from gdn import serving
from gdn_cli.machine import inventory

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler"),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
on_a_cpu = pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler")
# a GPU's chunks round to bfloat16 within, a CPU goes token by token
LIMIT = {"cpu": 4e-3, "cuda": 1e-2}
H, HV = 1, 2


def call(lengths, slots, device, dtype=torch.float32, has=None, **changed) -> dict:
    """Prompts of these lengths; slots that no prompt reads hold NaN."""
    x = steps.tokens(sum(lengths), H, HV, device)
    x["A_log"] -= 3.0  # states that are not forgotten at once
    has = has or [True] * len(slots)
    read = {slot for slot, there in zip(slots, has, strict=True) if there}
    unread = tuple(slot for slot in range(max(slots) + 2) if slot not in read)
    pool = steps.pool(max(slots) + 2, HV, device, dtype, unread)
    return x | dict(
        scale=0.1,
        initial_state=pool,
        ssm_state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        has_initial_state=torch.tensor(has, device=device),
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
    ) | changed  # fmt: skip


def kept(x: dict, every: int, starts=None, rows: int | None = None) -> dict:
    """A call that keeps states; where they begin follows from the lengths, unless it is given."""
    counts = x["cu_seqlens"].diff() // every
    if starts is None:
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = int(counts.sum()) if rows is None else rows
    pool = x["initial_state"]
    places = pool.new_full((rows, *pool.shape[1:]), torch.nan)
    return x | dict(
        checkpoints_every=every, checkpoints=places, checkpoint_starts=starts
    )


def states(x: dict, n: int) -> torch.Tensor:
    """The state after each token of prompt n, in float64; what it starts from."""
    rows = slice(*x["cu_seqlens"][n : n + 2].tolist())
    S = x["initial_state"][int(x["ssm_state_indices"][n])]
    if not x["has_initial_state"][n]:
        S = torch.zeros_like(S)
    parts = [x[name][rows] for name in "qkvab"]
    return steps.walk(S, *parts, x["A_log"], x["dt_bias"], x["scale"])[1]


def wrong(x: dict) -> list[str]:
    """Of a call that is made here: states that are not those of float64, and rows that nothing
    belongs in but that were written.
    """
    every, starts = x["checkpoints_every"], x["checkpoint_starts"].tolist()
    limit = LIMIT[x["v"].device.type]
    right = {}
    for n, slot in enumerate(x["ssm_state_indices"].tolist()):
        after = states(x, n)
        if slot < 1:
            continue
        for i in range(len(after) // every):
            right[starts[n] + i] = after[(i + 1) * every - 1]
    serving.chunk_prefill(**x)
    faults = []
    for row, place in enumerate(x["checkpoints"]):
        if row in right and not error(place, right[row]) < limit:
            faults.append(f"row {row}: {error(place, right[row]):.2g}")
        if row not in right and not place.isnan().all():
            faults.append(f"row {row} was written")
    return faults


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("every", [64, 128])
def test_states_at_chunk_ends(device, every, dtype):
    """One token less than a chunk, a chunk, one more, two; a prompt of none; one without a state;
    padding, which keeps nothing.
    """
    lengths, slots = [63, 64, 0, 65, 128, 130, 70], [1, 2, 3, 4, 5, 6, 0]
    has = [True, False, True, True, False, True, True]
    x = kept(call(lengths, slots, device, dtype, has), every)
    assert len(x["checkpoints"]) == sum(n // every for n in lengths)
    assert wrong(x) == []


@devices
def test_the_rest_of_the_call_is_as_without_them(device):
    x, plain = (call([130, 64], [2, 1], device) for _ in range(2))
    out, pool = serving.chunk_prefill(**kept(x, 64))
    expected, right = serving.chunk_prefill(**plain)
    limit = 2 * LIMIT[device]
    assert error(out, expected.cpu().double()) < limit
    for slot in (1, 2):
        assert error(pool[slot], right[slot].cpu().double()) < limit
    assert pool[[0, 3]].isnan().all()


@devices
def test_a_checkpoint_at_the_end_is_the_state_in_the_slot(device):
    x = kept(call([128], [1], device), 128)
    serving.chunk_prefill(**x)
    assert same(x["checkpoints"][0], x["initial_state"][1])


@devices
def test_a_prompt_goes_on_from_a_checkpoint(device):
    """What a prefix cache does: the rest of the prompt, from the state that was kept."""
    x = kept(call([150], [1], device), 64)
    out, pool = serving.chunk_prefill(**x)
    rest = {name: x[name][128:] for name in "qkvab"}
    ends = torch.tensor([0, 22], dtype=torch.int32, device=device)
    cached = x["checkpoints"].clone()
    later = call([22], [1], device) | rest | {"cu_seqlens": ends, "first_slot": 0}
    later |= {name: x[name] for name in ("A_log", "dt_bias")}
    later |= {"initial_state": cached}
    again, state = serving.chunk_prefill(**later)
    assert error(again, out[128:].cpu().double()) < 2 * LIMIT[device]
    assert error(state[1], pool[1].cpu().double()) < 2 * LIMIT[device]


@devices
@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
def test_starts_in_any_order_and_rows_that_there_are_not(device, wide):
    """One number for each prompt; the last one's second state has no row."""
    starts = torch.tensor([3, 0, 5], dtype=wide, device=device)
    x = kept(call([130, 70, 128], [3, 1, 2], device), 64, starts, rows=6)
    assert wrong(x) == []
    assert x["checkpoints"][[1, 2]].isnan().all()


@devices
def test_gates_that_are_given(device):
    x = kept(call([70, 129], [2, 1], device), 64)
    log_g = -torch.rand(199, HV, generator=torch.Generator().manual_seed(1)) / 20
    x |= {"a": log_g.to(device), "b": x["b"].float().sigmoid()}
    assert wrong(x | {"A_log": None, "dt_bias": None}) == []


@devices
def test_more_tokens_between_them_than_any_prompt_has(device):
    x = kept(call([70, 90], [2, 1], device), 640)
    x["checkpoints"] = x["initial_state"].new_full((1, HV, D, D), torch.nan)
    assert wrong(x) == []


@devices
def test_it_compiles_in_one_graph_and_counts_what_it_writes(device):
    x, again = (kept(call([70, 129], [2, 1], device), 64) for _ in range(2))
    out, _ = serving.chunk_prefill(**x)
    torch._dynamo.reset()
    run = torch.compile(serving.chunk_prefill, fullgraph=True, backend="aot_eager")
    before = again["checkpoints"]._version
    found, _ = run(**again)
    assert same(found, out) and same(again["checkpoints"], x["checkpoints"])
    assert again["checkpoints"]._version > before


@on_a_cpu
@pytest.mark.parametrize("every", [100, 0, -64, 63])
def test_what_is_no_multiple_of_64_is_refused(every):
    x = kept(call([70], [1], "cpu"), 64) | {"checkpoints_every": every}
    before = x["initial_state"].clone()
    says = f"^checkpoints_every: expected a multiple of 64, got {every}$"
    with pytest.raises(ValueError, match=says):
        serving.chunk_prefill(**x)
    assert same(x["initial_state"], before) and x["checkpoints"].isnan().all()


@on_a_cpu
@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoint_starts", "checkpoints_every"]
)
def test_two_of_the_three_arguments_are_refused(name):
    x = kept(call([70], [1], "cpu"), 64) | {name: None}
    says = "^checkpoints_every, checkpoints and checkpoint_starts: expected all three"
    with pytest.raises(ValueError, match=says):
        serving.chunk_prefill(**x)


REFUSED = {
    "of another dtype": (
        lambda x: {"checkpoints": x["checkpoints"].bfloat16()},
        "^checkpoints: expected float32",
    ),
    "of other heads": (
        lambda x: {"checkpoints": x["checkpoints"][:, :1].contiguous()},
        "^checkpoints: expected shape",
    ),
    "with gaps": (
        lambda x: {"checkpoints": steps.apart(x["checkpoints"], 64)},
        "^checkpoints: expected contiguous",
    ),
    "of two axes": (
        lambda x: {"checkpoints": x["checkpoints"].flatten(1)},
        "^checkpoints: expected 4 dimensions",
    ),
    "in the pool": (
        lambda x: {"checkpoints": x["initial_state"][1:3]},
        "^(checkpoints: overlaps initial_state|initial_state: overlaps checkpoints)",
    ),
    "starts of too many": (
        lambda x: {"checkpoint_starts": x["checkpoint_starts"].repeat(2)},
        "^checkpoint_starts: expected",
    ),
    "starts in float32": (
        lambda x: {"checkpoint_starts": x["checkpoint_starts"].float()},
        "^checkpoint_starts: expected int32 or int64",
    ),
}


@on_a_cpu
@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_places_that_do_not_fit_are_refused(change, says):
    x = kept(call([130], [1], "cpu"), 64)
    x["initial_state"].nan_to_num_(0.0)
    x |= change(x)
    before = x["initial_state"].clone()
    with pytest.raises((ValueError, TypeError), match=says):
        serving.chunk_prefill(**x)
    assert same(x["initial_state"], before)
