"""The functions that the CPU rungs export for engines, with the arguments of the CUDA libraries'.

Every option of the calls against the float64 oracle. What is refused, before anything is written.
"""

from __future__ import annotations

import functools
import math

import helpers
import pytest
import serving_steps as steps
import torch
from serving_steps import OUTPUT, STATE, D, apart, bits, error, same

from gdn_cli.machine import inventory

pytestmark = pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here")

RUNGS = {
    "packed_decode": "gdn_decode_packed/cpp-v1",
    "mtp_verify": "gdn_mtp_packed/cpp-v1",
    "chunk_prefill": "gdn_prefill_packed/cpp-v1",
}
ALL = pytest.mark.parametrize("name", RUNGS)
H, HV, P = 2, 4, 24
OUTPUTS, LAST, SLOTS, BUFFER = range(4)  # mtp_verify's modes
LENGTHS = {
    "packed_decode": [1, 1, 1, 1],
    "mtp_verify": [3, 1, 2, 3],
    "chunk_prefill": [3, 0, 5, 2],
}
FAR = [2 - (1 << 32), 3, -(1 << 63), 1 << 40]  # the low word of the first is a slot


@functools.cache
def exported(name: str):
    return helpers.built(RUNGS[name], "cpu")[1].exported(name)


def arguments(
    name: str, starts=(4, 0, 2, -1), lengths=None, after: int = 0, **changed
) -> dict:
    """A call: sequences of these lengths that start from these slots, and `after` tokens of none.

    Slots that no sequence reads hold NaN. mtp_verify's other slots are 10 and up, three for each.
    """
    lengths = lengths or LENGTHS[name]
    x = steps.tokens(sum(lengths) + after, H, HV, "cpu")
    x["accepted"] = [2, 1, 1, 3][: len(starts)]
    x["slots"] = torch.tensor(starts)
    if name == "mtp_verify":
        x["slots"] = torch.arange(10, 10 + 3 * len(starts)).view(-1, 3)
        for n, (start, count) in enumerate(zip(starts, x["accepted"], strict=True)):
            x["slots"][n, count - 1] = start
    pool = steps.pool(P, HV, "cpu")
    unread = sorted(set(range(P)) - set(starts))
    pool[unread] = math.nan
    x |= {"pool": pool, "lengths": lengths, "starts": list(starts), "states": None}
    x |= {"first_slot": 1, "epsilon": 1e-6, "scale": 0.1}
    if FAR[0] not in starts:
        x["slots"] = x["slots"].int()
    return x | changed


def recurrence(
    x: dict, n: int, S: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs and the state after each token of sequence n, in float64."""
    first = sum(x["lengths"][:n])
    rows = slice(first, first + x["lengths"][n])
    tokens = [x[name][rows] for name in "qkvab"]
    norm = x["epsilon"] >= 0
    outputs, states = steps.walk(S, *tokens, x["A_log"], x["dt_bias"], x["scale"], norm)
    return outputs, list(states)


def called(name: str, x: dict, **places) -> torch.Tensor:
    """The output of a call, NaN where nothing wrote. `_8=y`: the library's argument 8 is y."""
    ends = torch.tensor([0, *x["lengths"]]).cumsum(0).int()
    out = torch.full((len(x["v"]), HV, D), math.nan, dtype=torch.bfloat16)
    qkv, gates = [x["q"], x["k"], x["v"]], [x["a"], x["b"], x["A_log"], x["dt_bias"]]
    if name == "packed_decode":
        mixed = x.get("mixed_qkv", torch.cat([y.flatten(1) for y in qkv], dim=1))
        args = [
            mixed,
            *gates,
            x["pool"],
            x["slots"],
            x["scale"],
            out,
            x["pool"],
            None,
            None,
        ]
    elif name == "mtp_verify":
        accepted = torch.tensor(x["accepted"]).int()
        args = [*qkv, *gates, x["pool"], x["slots"], accepted, ends, x["scale"], out]
        args += [None, None, SLOTS]
    else:
        args = [*qkv, *gates, x["pool"], x["slots"], x["states"], ends, x["scale"], out]
    args += [x["first_slot"], x["epsilon"]]
    for place, value in places.items():
        args[int(place[1:])] = value
    exported(name)(*args)
    return out


def faults(name: str, x: dict, **places) -> list[str]:
    """What is wrong with a call, which is done here."""
    before, first, sequences = x["pool"].clone(), 0, []
    out = called(name, x, **places)
    for n, (start, length) in enumerate(zip(x["starts"], x["lengths"], strict=True)):
        fresh = x["states"] is not None and not x["states"][n]
        to = x["slots"][n].tolist() if name == "mtp_verify" else None
        rows = slice(first, first + length)
        sequences.append(steps.Sequence(start, rows, to, fresh))
        first += length
    tokens = x | {"norm": x["epsilon"] >= 0}
    first_slot = x["first_slot"]
    wrong = steps.faults(sequences, tokens, before, x["pool"], out, first_slot)
    if not out[first:].isnan().all():
        wrong.append("a token of no sequence has an output")
    return wrong


# --- options


def no_norm(x: dict) -> dict:
    """Keys of length 1: a step with longer ones grows."""
    return {
        "epsilon": -1.0,
        "k": torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16(),
    }


def column(x: dict) -> dict:
    """The first axis of a wider table."""
    wide = torch.full(
        (len(x["slots"]), 7, *x["slots"].shape[1:]), 99, dtype=torch.int32
    )
    wide[:, 2] = x["slots"]
    return {"slots": wide[:, 2]}


def every_other(x: dict) -> dict:
    return {"slots": x["slots"].long().repeat_interleave(2, dim=0)[::2]}


def rows_apart(x: dict) -> dict:
    mixed = torch.cat([x[y].flatten(1) for y in "qkv"], dim=1)
    wide = apart(mixed, 5, 3)
    views = wide.split([H * D, H * D, HV * D], dim=1)
    tokens = {y: z.unflatten(1, (-1, D)) for y, z in zip("qkv", views, strict=True)}
    return tokens | {
        "mixed_qkv": wide,
        "a": apart(x["a"], 5, 3),
        "b": apart(x["b"], 1, 2),
    }


def heads_apart(x: dict) -> dict:
    wide = torch.full((P, HV, D + 1, D), math.nan)
    return {"pool": wide[:, :, :D].copy_(x["pool"])}


def heads_first(x: dict) -> dict:
    """[HV, slots, V, K] in memory."""
    return {"pool": x["pool"].transpose(0, 1).contiguous().transpose(0, 1)}


OPTIONS = {
    "as an engine calls it": lambda x: {},
    "no norm": no_norm,
    "slots in int64": lambda x: {"slots": x["slots"].long()},
    "a column of slots": column,
    "every other int64 slot": every_other,
    "rows apart": rows_apart,
    "dt_bias in bfloat16": lambda x: {"dt_bias": x["dt_bias"].bfloat16()},
    "a bfloat16 pool": lambda x: {"pool": x["pool"].bfloat16()},
    "slots apart": lambda x: {"pool": apart(x["pool"], 64, 64)},
    "heads apart": heads_apart,
    "heads first": heads_first,
    "default scale": lambda x: {"scale": D**-0.5},
}


@ALL
@pytest.mark.parametrize("option", OPTIONS)
def test_options(name, option):
    x = arguments(name)
    assert faults(name, x | OPTIONS[option](x)) == []


@ALL
@pytest.mark.parametrize("first_slot", [0, -5, 3, 1 << 40])
def test_the_first_slot(name, first_slot):
    """Below 0 it is 0: a negative slot is never a slot."""
    assert faults(name, arguments(name, first_slot=first_slot)) == []


@ALL
def test_slots_of_64_bits_and_beyond_the_pool_are_padding(name):
    assert faults(name, arguments(name, starts=FAR)) == []
    assert faults(name, arguments(name, starts=(P, 1, P - 1, 99))) == []


HALVES = [*((name, torch.bfloat16) for name in RUNGS), ("packed_decode", torch.float16)]


@pytest.mark.parametrize("name, dtype", HALVES)
def test_a_pool_of_two_bytes_is_one_of_float32_rounded_at_the_end(name, dtype):
    """As torch rounds, bit for bit: subnormal numbers, ties, infinity."""
    half = arguments(name, starts=(4, 1, 2, 3))
    pool = steps.pool(P, HV, "cpu")
    pool[:, :, ::2] *= 1e-6
    pool[:, 0, 1] = 7e4
    half["pool"] = pool.to(dtype)
    full = half | {"pool": half["pool"].float()}
    assert same(called(name, half), called(name, full))
    assert same(half["pool"], full["pool"].to(dtype))
    assert dtype == torch.bfloat16 or half["pool"].isinf().any()


@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["mtp_verify", "chunk_prefill"])
def test_lengths_may_end_before_the_tokens_do(name, wide):
    x = arguments(name, after=3)
    ends = torch.tensor([0, *x["lengths"]]).cumsum(0).to(wide)
    assert faults(name, x, _10=ends) == []


@pytest.mark.parametrize(
    "states", [(True, True, False, True), (False,) * 4, (True,) * 4], ids=str
)
def test_sequences_without_a_state(states):
    """One of no tokens among them, whose slot gets zeros, and padding."""
    x = arguments("chunk_prefill", starts=(4, 3, 2, 0), states=torch.tensor(states))
    x["pool"][torch.tensor(x["starts"])[~x["states"]]] = math.nan
    assert faults("chunk_prefill", x) == []


def test_rows_without_a_state_and_states_that_go_elsewhere():
    """packed_decode's new_pool, new_indices and has_initial_state."""
    x = arguments("packed_decode", starts=(4, 0, 2, 3))
    states = torch.tensor([True, True, False, True])
    x["pool"][2] = math.nan
    before, to = x["pool"].clone(), torch.full((6, HV, D, D), math.nan)
    targets = torch.tensor([5, 1, 2, 9])  # the last one is not of new_pool
    out = called("packed_decode", x, _9=to, _10=targets, _11=states)
    for n, S in ((0, before[4]), (2, torch.zeros(HV, D, D)), (3, before[3])):
        expected, (state,) = recurrence(x, n, S)
        assert error(out[n : n + 1], expected) <= OUTPUT
        if n != 3:
            assert error(to[targets[n]], state) <= STATE[torch.float32]
    assert same(x["pool"], before) and not bits(out[1]).any()
    assert to[[0, 1, 3, 4]].isnan().all()


@pytest.mark.parametrize("mode", [OUTPUTS, LAST, BUFFER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_the_states_after_drafts_go(mode, dtype):
    """The buffer has room for more. A row of it below 0 or beyond its end is not written."""
    x = arguments("mtp_verify", starts=(4, 1, 2, 3), accepted=[1] * 4)
    x["slots"] = torch.tensor(x["starts"], dtype=torch.int32)
    x["pool"] = x["pool"].to(dtype)
    states = torch.full((5, 9, HV, D, D), math.nan, dtype=dtype)
    before, rows = x["pool"].clone(), torch.tensor([3, 0, -1, 5])
    places = {"_9": None, "_15": mode}
    if mode == BUFFER:
        places |= {"_13": states, "_14": rows}
    out = called("mtp_verify", x, **places)
    first = 0
    for n, (start, length) in enumerate(zip(x["starts"], x["lengths"], strict=True)):
        expected, after = recurrence(x, n, before[start])
        assert error(out[first : first + length], expected) <= OUTPUT
        first += length
        if mode == LAST:
            assert error(x["pool"][start], after[-1]) <= STATE[dtype]
        if mode == BUFFER and n < 2:
            assert error(states[rows[n], :length], torch.stack(after)) <= STATE[dtype]
    kept = [s for s in range(P) if mode != LAST or s not in x["starts"]]
    assert same(x["pool"][kept], before[kept])
    assert states[[1, 2, 4]].isnan().all()
    assert states[0, 1:].isnan().all() and states[3, 3:].isnan().all()


# --- what is refused


def one_slot(x: dict) -> torch.Tensor:
    return x["pool"][:1].expand(P, -1, -1, -1)


def one_head(x: dict) -> torch.Tensor:
    return x["pool"][:, :1].expand(-1, HV, -1, -1)


def rows_apart(pool: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(pool, (0, 8))[..., :-8]


POOL = {"packed_decode": 5, "mtp_verify": 7, "chunk_prefill": 7}
REFUSED = {
    "dtype of the pool": (
        lambda x: {"pool": x["pool"].double()},
        "pool: expected float32",
    ),
    "states that overlap": (
        lambda x: {"pool": one_slot(x)},
        "pool: expected states that do not",
    ),
    "heads that overlap": (
        lambda x: {"pool": one_head(x)},
        "pool: expected states that do not",
    ),
    "rows apart": (
        lambda x: {"pool": rows_apart(x["pool"])},
        "pool: expected dense but for its first",
    ),
    "two axes": (lambda x: {"pool": x["pool"].flatten(1)}, "pool"),
    "float slots": (
        lambda x: {"slots": x["slots"].float()},
        "int32 or int64, got float32",
    ),
    "too few slots": (lambda x: {"slots": x["slots"][:2]}, "expected"),
    "gates in float32": (lambda x: {"a": x["a"].float()}, "a: expected bfloat16"),
    "a gate too few": (lambda x: {"b": x["b"][:, 1:]}, "b: expected bfloat16"),
    "A_log in bfloat16": (
        lambda x: {"A_log": x["A_log"].bfloat16()},
        "A_log: expected float32",
    ),
    "dt_bias in float16": (
        lambda x: {"dt_bias": x["dt_bias"].half()},
        "dt_bias: expected float32",
    ),
}


def refused(name: str, x: dict, says: str, kind=ValueError, **places) -> None:
    before = x["pool"].clone()
    with pytest.raises(kind, match=says):
        called(name, x, **places)
    torch.testing.assert_close(x["pool"], before, rtol=0, atol=0, equal_nan=True)


@ALL
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(name, what):
    change, says = REFUSED[what]
    x = arguments(name, starts=(4, 1, 2, 3))
    x["pool"].nan_to_num_(0.0)
    refused(name, x | change(x), says)


@pytest.mark.parametrize("name", ["mtp_verify", "chunk_prefill"])
def test_a_float16_pool_is_for_packed_decode_alone(name):
    x = arguments(name)
    refused(
        name,
        x | {"pool": x["pool"].half()},
        "pool: expected float32 or bfloat16, got float16",
    )


ENDS = {
    "fewer": [0, 3, 2, 6, 9],
    "below 0": [-1, 3, 4, 6, 9],
    "beyond the tokens": [0, 3, 4, 6, 13],
}


@pytest.mark.parametrize("what", ENDS)
@pytest.mark.parametrize("name", ["mtp_verify", "chunk_prefill"])
def test_lengths_that_cannot_be_are_refused(name, what):
    x = arguments(name, after=2)
    refused(name, x, "cu_seqlens: sequence . has", _10=torch.tensor(ENDS[what]))


def test_more_tokens_than_columns_of_slots_are_refused():
    x, ends = arguments("mtp_verify"), torch.tensor([0, 3, 4, 5, 9])
    refused(
        "mtp_verify",
        x,
        "sequence 3 has 4 tokens from 5: expected up to 3 of 9",
        _10=ends,
    )


@ALL
def test_a_tensor_that_is_none_is_a_type_error(name):
    x = arguments(name)
    refused(name, x, "argument #0 ", TypeError, _0=None)
    refused(name, x, f"argument #{POOL[name]} ", TypeError, **{f"_{POOL[name]}": None})
