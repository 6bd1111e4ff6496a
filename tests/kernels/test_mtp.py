"""gdn_mtp and gdn_mtp_packed: every algo against tests/oracle.py; accepted counts,
padding, slots, rows that lie apart. `mtp_verify`, the function of a compiled rung that
gdn.serving calls, is in tests/library/serving.

Algos are the registry's, by the devices that they name: a new rung joins by its folder.
"""

from __future__ import annotations

import math

import helpers
import oracle
import pytest
import torch
from serving_steps import bits, off, same

from gdn_cli.machine import inventory

REGISTRY = helpers.REGISTRY
HEADS = ((4, 8), (2, 6), (4, 4))
D = 128
NAMES = {  # op -> arguments of its entry point
    op: tuple(REGISTRY.ops[op].inputs)
    for op in ("gdn_mtp", "gdn_mtp_bf16", "gdn_mtp_packed", "gdn_mtp_packed_bf16")
}
STATES = {
    op: "pool" if "pool" in names else "initial_state" for op, names in NAMES.items()
}


def algos(device: str) -> list[str]:
    """Those written here that run on a device; peers have packages of their own."""
    return [
        a.full_name
        for a in REGISTRY.algos
        if a.op in NAMES and device in a.modes and not a.packages
    ]


# rows: for each the slot of each token and the accepted count; slots of the pool
CASES = {
    "two tokens": ([([1, 2], 1)], 3),
    "each start": ([([3, 1, 7, 2], 1), ([4, 9, 5, 6], 2), ([8, 10, 11, 12], 3), ([13, 15, 14, 16], 4)], 18),
    "counts": ([([3, 4], 2), ([1, 2], 0), ([5, 6], 3), ([7, 8], -1), ([9, 10], 1), ([11, 12], 99)], 13),
    "padding": ([([0, 0, 0], 1), ([1, 2, 3], 3), ([-1] * 3, 2), ([4, 0, 9], 2), ([7, 8, 9], 1), ([0, 5, 6], 1)], 12),
    # a start, and tokens whose state is not kept
    "holes": ([([1, 0, 2], 1), ([0, 3, -1], 2), ([4, 5, -7], 2)], 6),
    # after padding: rows are found by their strides
    "one hole": ([([3, 4, 5], 0), ([2, 0, 1], 3)], 6),
    "eight tokens": ([([*range(8, 0, -1)], 8), ([*range(9, 17)], 5)], 17),
    "padding alone": ([([0, 0], 1), ([1, 2], 0)], 3),
    "no row": ([], 3),
}  # fmt: skip


def inputs(
    op: str, case: str, H: int, HV: int, device: str = "cpu", scale=None
) -> dict:
    """Arguments by name. q and k have any length where they are normalised. Slots hold
    NaN unless a row starts there: whoever reads another one is found out. gdn_mtp
    starts one slot lower: there 0 is a slot like any other.
    """
    rows, P = CASES[case]
    T = len(rows[0][0]) if rows else 2
    g, B = torch.Generator().manual_seed(len(rows) * 100 + HV), len(rows)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    starts = [start(slots, accepted) for slots, accepted in rows]
    if STATES[op] == "initial_state":
        starts = [slot - 1 if slot > 0 else -1 for slot in starts]
    q, k, v = randn(B, T, H, D) * 3, randn(B, T, H, D) * 0.2, randn(B, T, HV, D)
    k[-1:, 1:] *= 0.005  # what is added below the root shows
    a, b, A_log, dt_bias = (
        randn(B, T, HV).bfloat16(),
        randn(B, T, HV).bfloat16(),
        randn(HV) - 1,
        randn(HV) * 0.25,
    )
    states = randn(P, HV, D, D)
    states[[i for i in range(P) if i not in starts]] = math.nan
    states = states.bfloat16() if op.endswith("_bf16") else states
    if STATES[op] == "initial_state":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        first = torch.tensor(starts, dtype=torch.int32)
        made = [
            q.bfloat16(),
            k.bfloat16(),
            v.bfloat16(),
            states,
            first,
            A_log,
            a,
            dt_bias,
            b,
        ]
    else:
        row = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2).bfloat16()
        indices = torch.tensor([slots for slots, _ in rows], dtype=torch.int32).view(
            B, T
        )
        counts = torch.tensor([accepted for _, accepted in rows], dtype=torch.int32)
        made = [row, a, b, A_log, dt_bias, states, indices, counts]
    return dict(zip(NAMES[op], [*(x.to(device) for x in made), scale], strict=True))


def start(slots: list[int], accepted: int) -> int:
    """The slot that a row starts from, -1 for padding."""
    slot = slots[accepted - 1] if 1 <= accepted <= len(slots) else 0
    return slot if slot > 0 else -1


def right(op: str, x: dict) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(output, slot -> the state that is to be there)."""
    output, pool = getattr(oracle, op)(*x.values())
    if STATES[op] == "initial_state":
        return torch.from_numpy(output), {}
    rows = zip(
        x["state_indices"].tolist(), x["num_accepted_tokens"].tolist(), strict=True
    )
    written = [slot for row in rows if start(*row) > 0 for slot in row[0] if slot > 0]
    return torch.from_numpy(output), {s: torch.from_numpy(pool[s]) for s in written}


def step(kernel, op: str, x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, the pool after it) of one call. An output that nothing wrote is NaN."""
    if not kernel.destination_passing:
        return tuple(kernel.returns(list(x.values())))
    pool = x[STATES[op]]
    output = torch.full(
        (*x["a"].shape, D), math.nan, dtype=torch.bfloat16, device=pool.device
    )
    kernel(list(x.values()), [output, pool])
    return output, pool


def faults(kernel, op: str, x: dict) -> list[str]:
    """What is wrong with a call."""
    (output, states), old = right(op, x), x[STATES[op]].clone()
    got, pool = step(kernel, op, x)
    limits, found = list(REGISTRY.ops[op].tolerance.values()), []
    others = [i for i in range(len(old)) if i not in states]
    if not same(pool[others], old[others]):
        found.append("a slot that is not to be written has changed")
    if any(bits(got[n]).any() for n in range(len(got)) if not output[n].any()):
        found.append("padding has an output")
    if got.numel() and not (error := off(got, output)) <= limits[0]:
        found.append(f"output: {error:.2g}")
    wrong = {slot: off(pool[slot], state) for slot, state in states.items()}
    return found + [
        f"slot {slot}: {error:.2g}"
        for slot, error in wrong.items()
        if not error <= limits[1]
    ]


def every_case(
    kernel, op: str, names, heads=HEADS, device: str = "cpu"
) -> dict[str, list[str]]:
    found = {}
    for H, HV in heads:
        for name in names:
            for scale in (None, 0.3) if name == "two tokens" else (0.0,):
                found[f"{H}/{HV}, {name}, {scale}"] = faults(
                    kernel, op, inputs(op, name, H, HV, device, scale)
                )
    return {name: what for name, what in found.items() if what}


def apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values in rows that lie apart: on a pool's first axis, else on the first
    two axes by different gaps.
    """
    inner = x[0].numel() if gap < 0 else x[0, :1].numel()
    if gap < 0:
        strides = (inner - gap, *x.stride()[1:])
    else:
        strides = (x.shape[1] * (inner + gap) + 2 * gap, inner + gap, *x.stride()[2:])
    wide = x.new_full((len(x) * strides[0] + abs(gap),), math.nan)
    return wide.as_strided(x.shape, strides, max(gap, 0)).copy_(x)


# elements: rows of q, k and v begin at multiples of 32 bytes, or Triton would add in
# another order; gates anywhere
GAPS = {
    "mixed_qkv": 16,
    "q": 16,
    "k": 48,
    "v": 32,
    "a": 5,
    "b": 3,
    "pool": -64,
    "initial_state": -64,
}


def strided_differences(
    kernel,
    op: str,
    device: str = "cpu",
    heads=(2, 6),
    case: str = "padding",
    one_by_one=True,
):
    """Which tensors give other bits where they lie apart, as views of a server's
    projections and pages do.
    """

    def made():
        return inputs(op, case, *heads, device)

    (output, pool), found = step(kernel, op, made()), []
    names = [name for name in NAMES[op] if name in GAPS]
    for chosen in [*([[name] for name in names] if one_by_one else []), names]:
        x = made()
        x |= {name: apart(x[name], GAPS[name]) for name in chosen}
        got = step(kernel, op, x)
        if not (same(got[0], output) and same(got[1], pool)):
            found.append(" ".join(chosen))
        if written_between(x[STATES[op]]):
            found.append(f"{' '.join(chosen)}: written between slots")
    return found


def written_between(states: torch.Tensor) -> bool:
    """Whether something other than NaN lies between slots that `apart` moved."""
    hole = states.as_strided(
        (len(states) - 1, 64), (states.stride(0), 1), states[0].numel()
    )
    return not states.is_contiguous() and not bool(hole.isnan().all())


def kernel_of(full_name: str, device: str):
    algo = REGISTRY.find(full_name)
    if device == "cpu" and algo.language == "cpp" and not inventory.cxx():
        pytest.skip("no C++ compiler here")
    if device == "cuda" and (place := inventory.HERE.place(algo, "cuda")).mode is None:
        pytest.skip(f"{full_name}: {place.reason}")
    return helpers.built(full_name, device)[1]


@pytest.mark.parametrize("name", algos("cpu"))
def test_on_a_cpu(name):
    kernel, op = kernel_of(name, "cpu"), name.split("/")[0]
    assert every_case(kernel, op, ["padding", "each start"]) == {}
    assert (
        every_case(
            kernel,
            op,
            [case for case in CASES if case not in ("padding", "each start")],
            [(2, 6)],
        )
        == {}
    )


@pytest.mark.parametrize("name", algos("cpu"))
def test_rows_and_slots_that_lie_apart_give_the_same_bits_on_a_cpu(name):
    assert strided_differences(kernel_of(name, "cpu"), name.split("/")[0]) == []


def interpreted(names: list[str], cases: list[str]) -> dict:
    """For the process of the fixture `interpreter`, which takes a second for 100 programs."""
    found = {}
    for name in names:
        kernel, op = helpers.built(name, "interpreter")[1], name.split("/")[0]
        found |= {
            f"{name}: {case}": what
            for case, what in every_case(kernel, op, cases, [(1, 1)]).items()
        }
        found |= {
            f"{name}: {what}": ""
            for what in strided_differences(kernel, op, "cpu", (1, 1), "holes", False)
        }
    return found


def interpreted_apart(names: list[str]) -> dict[str, list[str]]:
    """As few programs as show something: two rows whose tensors lie apart, against
    float64; and no row.
    """
    found = {}
    for name in names:
        kernel, op = helpers.built(name, "interpreter")[1], name.split("/")[0]
        x = inputs(op, "one hole", 1, 1)
        x |= {key: apart(x[key], gap) for key, gap in GAPS.items() if key in x}
        found[name] = faults(kernel, op, x) + faults(
            kernel, op, inputs(op, "no row", 1, 1)
        )
        found[name] += ["written between slots"] * written_between(x[STATES[op]])
    return {name: what for name, what in found.items() if what}


def test_below_the_interpreter(interpreter):
    assert (
        interpreter(
            interpreted_apart,
            [name for name in algos("interpreter") if "_bf16/" not in name],
        )
        == {}
    )


def errors_on_bfloat16() -> list[float]:
    kernel, op = (
        helpers.built("gdn_mtp_packed_bf16/triton-v1", "interpreter")[1],
        "gdn_mtp_packed_bf16",
    )
    x = inputs(op, "two tokens", 1, 1)
    output, states = right(op, x)
    got, pool = step(kernel, op, x)
    return [
        off(got, output),
        *(off(pool[slot], state) for slot, state in states.items()),
    ]


def test_a_pool_of_bfloat16_below_the_interpreter(interpreter):
    """It truncates: 3.3e-3, twice the error of rounding, and no more for the second token."""
    found = interpreter(errors_on_bfloat16)
    assert len(found) == 3 and max(found) < 4e-3


@pytest.mark.slow
def test_more_below_the_interpreter(interpreter):
    cases = ["padding alone", "counts", "padding", "each start"]
    # bfloat16 is truncated there
    names = [name for name in algos("interpreter") if "_bf16/" not in name]
    assert interpreter(interpreted, names, cases) == {}


def test_a_separate_final_state_gets_a_copy_of_the_pool():
    """What flashinfer-bench's call needs, in which an output is never an input."""
    x = inputs("gdn_mtp", "padding", 1, 3)
    output, final = x["q"].new_empty(6, 3, 3, D), torch.zeros_like(x["initial_state"])
    before = x["initial_state"].clone()
    kernel_of("gdn_mtp/cpp-v1", "cpu")(list(x.values()), [output, final])
    assert same(final, before) and same(x["initial_state"], before)


def test_what_cannot_be_is_refused_before_anything_is_written():
    kernel, op = kernel_of("gdn_mtp_packed/cpp-v1", "cpu"), "gdn_mtp_packed"

    def refused(says: str, new_pool=None, **changed) -> None:
        x = inputs(op, "each start", 2, 6) | changed
        before = x["pool"].clone()
        output = x["a"].new_zeros(4, 4, 6, D)
        with pytest.raises(ValueError, match=says):
            kernel(
                list(x.values()), [output, x["pool"] if new_pool is None else new_pool]
            )
        assert same(before, x["pool"]) and not output.any()

    good = inputs(op, "each start", 2, 6)
    refused("new_pool: expected the pool itself", new_pool=good["pool"])
    refused(
        "1400 columns are no rows of q, k and v",
        mixed_qkv=torch.zeros(4, 4, 1400, dtype=torch.bfloat16),
    )
    refused(
        "mixed_qkv: expected rows without gaps",
        mixed_qkv=good["mixed_qkv"].mT.contiguous().mT,
    )
    refused(
        r"a: expected bfloat16 \[4, 4, 6\], got bfloat16 \[4, 4, 5\]",
        a=good["a"][..., :5],
    )
    refused("b: expected bfloat16", b=good["b"].float())
    refused(
        "pool: expected dense but for its first two axes",
        pool=good["pool"].mT,
        new_pool=good["pool"].mT,
    )
    refused(
        r"state_indices: expected int32 \[4, 4\]",
        state_indices=good["state_indices"][:, :3].contiguous(),
    )
    refused(
        r"num_accepted_tokens: expected int32 \[4\], got",
        num_accepted_tokens=good["num_accepted_tokens"][:3],
    )


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", algos("cuda"))
def test_on_a_gpu(name):
    kernel, op = kernel_of(name, "cuda"), name.split("/")[0]
    assert every_case(kernel, op, CASES, (*HEADS, (16, 48)), "cuda") == {}
    assert strided_differences(kernel, op, "cuda") == []
