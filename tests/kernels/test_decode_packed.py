"""gdn_decode_packed: the algos against a step in float64 of tests/oracle.py; padding,
slots, rows that lie apart.
"""

from __future__ import annotations

import itertools
import math

import helpers
import oracle
import pytest
import torch
from oracle import error
from serving_steps import apart, between, bits, same

from gdn import load

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode_packed"]
HEADS = ((4, 8), (2, 6), (4, 4))
D = 128


def inputs(
    slots: list[int], P: int, H: int, HV: int, device: str = "cpu", scale=None
) -> list:
    """mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale; q and k of any
    length, as a convolution leaves them. Slot 0 and all that no row names hold NaN:
    whoever reads them is found out.
    """
    g, B = torch.Generator().manual_seed(len(slots) * 100 + HV), len(slots)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    pool = randn(P, HV, D, D)
    pool[[i for i in range(P) if i == 0 or i not in slots]] = math.nan
    q, k = randn(B, H * D) * 3, randn(B, H * D) * 0.2
    k[1:2] *= 0.005  # what is added below the root shows
    row = torch.cat([q, k, randn(B, HV * D)], dim=1).bfloat16()
    a, b = (randn(B, HV).bfloat16() for _ in range(2))
    A_log = randn(HV) - 1
    dt_bias = randn(HV) * 0.25
    indices = torch.tensor(slots, dtype=torch.int32)
    made = row, a, b, A_log, dt_bias, pool, indices
    return [*(x.to(device) for x in made), scale]


def exact(*args) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, new_pool) in float64."""
    output, pool = oracle.gdn_decode_packed(*args)
    return torch.from_numpy(output), torch.from_numpy(pool)


def step(kernel, args: list) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, new_pool) of one call. An output that nothing wrote is NaN."""
    if not kernel.destination_passing:
        return tuple(kernel.returns(args))
    HV = args[5].shape[1]
    output = args[0].new_full((len(args[0]), HV, D), math.nan)
    kernel(args, [output, args[5]])
    return output, args[5]


def faults(kernel, args: list) -> list[str]:
    """What is wrong with a call."""
    right_output, right = exact(*args)
    old = args[5].cpu().clone()
    slots = args[6].tolist()
    output, pool = (x.cpu() for x in step(kernel, args))
    used = [s for s in slots if s > 0]
    others = [i for i in range(len(pool)) if i not in used]
    found = []
    if not same(pool[others], old[others]):
        found.append("a slot that no row names has changed")
    if any(bits(output[n]).any() for n, slot in enumerate(slots) if slot <= 0):
        found.append("padding has an output")
    off = error(output, right_output), error(pool[used], right[used])
    for (name, limit), e in zip(OP.tolerance.items(), off, strict=True):
        if not e <= limit:
            found.append(f"{name}: {e:.2g}")
    return found


# rows' slots -> slots of the pool: one row; padding first, last, in between and
# everywhere; the last slot
SLOTS = {
    "one row": ([1], 2),
    "the last slot": ([4, 2], 5),
    "padding around": ([0, 3, -1, 1, -7, 0], 5),
    "padding alone": ([0, -1], 3),
    "all slots": ([3, 1, 2], 4),
    "padding first": ([0, 2], 4),
    "no row": ([], 2),
}


def every_case(kernel, names, heads=HEADS, device: str = "cpu") -> dict[str, list[str]]:
    found = {}
    for (H, HV), name in itertools.product(heads, names):
        for scale in (None, 0.3) if name == "one row" else (0.0,):
            args = inputs(*SLOTS[name], H, HV, device, scale)
            if wrong := faults(kernel, args):
                found[f"{H}/{HV}, {name}, {scale}"] = wrong
    return found


APART = {"mixed_qkv": [0], "a": [1], "b": [2], "pool": [5], "all": [0, 1, 2, 5]}


def strided_differences(kernel, device: str = "cpu", heads=(2, 6)) -> list[str]:
    """Which of the tensors give other bits where they lie apart, as views of a server's
    projections and pages do.
    """

    def made():
        return inputs([2, 0, 4], 6, *heads, device)

    right = step(kernel, made())
    # rows at multiples of 16 bytes: else Triton adds in another order
    gaps = {0: (64, 16) if device == "cuda" else (5, 3), 5: (64, 0)}
    found = []
    for name, places in APART.items():
        args = made()
        for i in places:
            args[i] = apart(args[i], *gaps.get(i, (5, 3)))
        if not all(map(same, step(kernel, args), right)):
            found.append(name)
        if 5 in places and not between(args[5]).isnan().all():
            found.append(f"{name}: written between slots")
    return found


def built(name: str):
    return helpers.built(f"{OP.name}/{name}", "cpu")[1]


ON_CPU = pytest.mark.parametrize("name", ["pt-reference", "cpp-v1"])


@ON_CPU
def test_on_a_cpu(name):
    assert every_case(built(name), SLOTS) == {}


@ON_CPU
def test_rows_and_slots_that_lie_apart_give_the_same_bits_on_a_cpu(name):
    assert strided_differences(built(name)) == []


def interpreted(names: list[str], heads) -> tuple[dict, list[str]]:
    """For the process of the fixture `interpreter`, which takes a second for 100 programs."""
    kernel = helpers.built(f"{OP.name}/triton-v1", "interpreter")[1]
    return every_case(kernel, names, heads), strided_differences(kernel, heads=(1, 2))


def interpreted_apart() -> list[str]:
    """As few programs as show something: a row and padding whose tensors lie apart,
    against float64; and no row.
    """
    kernel = helpers.built(f"{OP.name}/triton-v1", "interpreter")[1]
    args = inputs(*SLOTS["padding first"], 1, 2)
    for i in APART["all"]:
        # no two rows have one stride
        args[i] = apart(args[i], *((64, 0) if i == 5 else (5 + i, 3)))
    found = faults(kernel, args) + faults(kernel, inputs(*SLOTS["no row"], 1, 3))
    return found + ["written between slots"] * (not between(args[5]).isnan().all())


def test_below_the_interpreter(interpreter):
    assert interpreter(interpreted_apart) == []


@pytest.mark.slow
def test_at_other_heads_below_the_interpreter(interpreter):
    names = ["padding around", "the last slot", "padding first"]
    assert interpreter(interpreted, names, [(2, 2), (1, 3)]) == ({}, [])


def test_what_cannot_be_is_refused_before_anything_is_written():
    kernel = built("cpp-v1")

    row, a, b, _, _, pool, _, _ = inputs([1, 2], 3, 2, 6)
    output = torch.zeros(2, 6, D, dtype=torch.bfloat16)

    def refused(says: str, i: int, x: torch.Tensor, new_pool=None) -> None:
        args = inputs([1, 2], 3, 2, 6)
        args[i] = x
        before = args[5].clone()
        with pytest.raises(ValueError, match=says):
            kernel(args, [output, args[5] if new_pool is None else new_pool])
        assert same(before, args[5])

    refused("new_pool: expected the pool itself", 0, row, new_pool=pool)
    few = torch.zeros(2, 1400, dtype=torch.bfloat16)
    refused("1400 columns are no rows of q, k and v", 0, few)
    dense = "mixed_qkv: expected dense but for its first axis"
    refused(dense, 0, row.T.contiguous().T)
    refused(r"a: expected bfloat16 \[2, 6\], got bfloat16 \[2, 5\]", 1, a[:, :5])
    refused("b: expected bfloat16", 2, b.float())
    refused("pool: expected dense but for its first two axes", 5, pool.mT, pool.mT)
    kind = "state_indices: expected int32 or int64, got float32"
    refused(kind, 6, torch.tensor([1.0, 2.0]))


def test_load_works_on_a_copy_or_in_place():
    built("cpp-v1")  # skips where it cannot be compiled
    call, args = load("cpp-v1", op=OP.name), inputs([1, 0], 3, 4, 8)
    before = args[5].clone()
    output, new_pool = call(*args)
    assert same(args[5], before)
    assert not same(new_pool[1], before[1])
    assert same(new_pool[2], before[2])
    again = torch.empty_like(output)
    call(*args, out=(again, args[5]))
    assert same(again, output)
    assert same(args[5], new_pool)
    assert "without out= it works on a copy of all of pool" in call.__doc__


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton-v1", "cuda-v5-packed"])
def test_on_a_gpu(name):
    kernel = helpers.built(f"{OP.name}/{name}", "cuda")[1]
    assert every_case(kernel, SLOTS, (*HEADS, (16, 48)), "cuda") == {}
    assert strided_differences(kernel, "cuda") == []
