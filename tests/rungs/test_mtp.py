"""gdn_mtp, gdn_mtp_packed, gdn_layer_post_conv and gdn_decode_packed: every algo against tests/oracle.py;
accepted counts, padding, slots, rows that lie apart. The functions of a compiled rung
that gdn.serving calls are in tests/library/serving.

Algos are the registry's, by the devices that they name: a new rung joins by its folder.
"""

import itertools
import math

import helpers
import oracle
import pytest
import torch
from oracle import error
from serving_steps import apart, between, bits, same

REGISTRY = helpers.REGISTRY
HEADS = ((4, 8), (2, 6), (4, 4))
D = 128
# op -> arguments of its entry point
NAMES = {
    name: tuple(op.inputs)
    for name, op in REGISTRY.ops.items()
    if name.startswith(("gdn_mtp", "gdn_layer_post_conv", "gdn_decode_packed"))
}
STATES = {
    op: "pool" if "pool" in names else "initial_state" for op, names in NAMES.items()
}


def algos(device):
    """Those written here that run on a device; peers have packages of their own."""
    return [
        a.full_name
        for a in REGISTRY.algos
        if a.op in NAMES and device in a.modes and not a.packages
    ]


# rows: for each the slot of each token and the accepted count; slots of the pool
CASES = {
    "two tokens": ([([1, 2], 1)], 3),
    "each start": (
        [
            ([3, 1, 7, 2], 1),
            ([4, 9, 5, 6], 2),
            ([8, 10, 11, 12], 3),
            ([13, 15, 14, 16], 4),
        ],
        18,
    ),
    "counts": (
        [
            ([3, 4], 2),
            ([1, 2], 0),
            ([5, 6], 3),
            ([7, 8], -1),
            ([9, 10], 1),
            ([11, 12], 99),
        ],
        13,
    ),
    "padding": (
        [
            ([0, 0, 0], 1),
            ([1, 2, 3], 3),
            ([-1] * 3, 2),
            ([4, 0, 9], 2),
            ([7, 8, 9], 1),
            ([0, 5, 6], 1),
        ],
        12,
    ),
    # a start, and tokens whose state is not kept
    "holes": ([([1, 0, 2], 1), ([0, 3, -1], 2), ([4, 5, -7], 2)], 6),
    # after padding: rows are found by their strides
    "one hole": ([([3, 4, 5], 0), ([2, 0, 1], 3)], 6),
    "eight tokens": ([([*range(8, 0, -1)], 8), ([*range(9, 17)], 5)], 17),
    "padding alone": ([([0, 0], 1), ([1, 2], 0)], 3),
    "no row": ([], 3),
}
DECODES = {
    "one token": ([1], 2),
    "the last slot": ([4, 2], 5),
    "padding": ([0, 3, -1, 1, -7, 0], 5),
    "padding alone": ([0, -1], 3),
    "all slots": ([3, 1, 2], 4),
    "one hole": ([0, 2], 4),
    "holes": ([2, 0, 4], 6),
    "no row": ([], 2),
}
DECODES = {
    case: ([([slot], 1) for slot in slots], P) for case, (slots, P) in DECODES.items()
}


def is_decode(op):
    return op.startswith("gdn_decode")


def cases_of(op):
    if op.startswith("gdn_layer_post_conv"):
        one = ("one token", "all slots")
        return CASES | {case: DECODES[case] for case in one}
    return DECODES if is_decode(op) else CASES


def inputs(op, case, H, HV, device="cpu", scale=None):
    """Arguments by name. q and k have any length where they are normalised. Slots hold
    NaN unless a row starts there: whoever reads another one is found out. gdn_mtp
    starts one slot lower: there 0 is a slot like any other.
    """
    rows, P = cases_of(op)[case]
    T = 1 if is_decode(op) else len(rows[0][0]) if rows else 2
    g, B = torch.Generator().manual_seed(len(rows) * 100 + HV), len(rows)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    starts = [start(slots, accepted) for slots, accepted in rows]
    if STATES[op] == "initial_state":
        starts = [slot - 1 if slot > 0 else -1 for slot in starts]
    q, k, v = randn(B, T, H, D) * 3, randn(B, T, H, D) * 0.2, randn(B, T, HV, D)
    k[-1:, 1:] *= 0.005  # what is added below the root shows
    a, b = (randn(B, T, HV).bfloat16() for _ in range(2))
    A_log = randn(HV) - 1
    dt_bias = randn(HV) * 0.25
    states = randn(P, HV, D, D)
    states[[i for i in range(P) if i not in starts]] = math.nan
    states = states.bfloat16() if op.endswith("_bf16") else states
    if STATES[op] == "initial_state":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        first = torch.tensor(starts, dtype=torch.int32)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        made = [q, k, v, states, first, A_log, a, dt_bias, b]
    else:
        row = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2).bfloat16()
        indices = torch.tensor([slots for slots, _ in rows]).view(B, T).int()
        counts = torch.tensor([accepted for _, accepted in rows]).int()
        made = [row, a, b, A_log, dt_bias, states, indices, counts]
        if is_decode(op):
            made = [row[:, 0], a[:, 0], b[:, 0], *made[3:6], indices[:, 0]]
    given = [*(x.to(device) for x in made), scale]
    if op.startswith("gdn_layer_post_conv"):
        z, weight = randn(B, T, HV, D).bfloat16(), randn(D).bfloat16()
        given += [z.to(device), weight.to(device)]
    return dict(zip(NAMES[op], given, strict=True))


def start(slots, accepted):
    """The slot that a row starts from, -1 for padding."""
    slot = slots[accepted - 1] if 1 <= accepted <= len(slots) else 0
    return slot if slot > 0 else -1


def right(op, x):
    """(output, slot -> the state that is to be there)."""
    output, pool = map(torch.from_numpy, getattr(oracle, op)(*x.values()))
    if STATES[op] == "initial_state":
        return output, {}
    indices, counts = x["state_indices"], x.get("num_accepted_tokens")
    if is_decode(op):
        indices, counts = indices[:, None], torch.ones_like(indices)
    states = {}
    for slots, accepted in zip(indices.tolist(), counts.tolist(), strict=True):
        if start(slots, accepted) > 0:
            states |= {slot: pool[slot] for slot in slots if slot > 0}
    return output, states


def step(kernel, op, x):
    """(output, the pool after it) of one call. An output that nothing wrote is NaN."""
    if not kernel.destination_passing:
        return tuple(kernel.returns(list(x.values())))
    pool = x[STATES[op]]
    output = x["a"].new_full((*x["a"].shape, D), math.nan)
    kernel(list(x.values()), [output, pool])
    return output, pool


def faults(kernel, op, x):
    """What is wrong with a call."""
    output, states = right(op, x)
    old = x[STATES[op]].clone()
    got, pool = step(kernel, op, x)
    of_output, of_state = REGISTRY.ops[op].tolerance.values()
    others = [i for i in range(len(old)) if i not in states]
    found = []
    if not same(pool[others], old[others]):
        found.append("a slot that is not to be written has changed")
    if any(bits(got[n]).any() for n in range(len(got)) if not output[n].any()):
        found.append("padding has an output")
    if not (off := error(got, output)) <= of_output:
        found.append(f"output: {off:.2g}")
    for slot, state in states.items():
        if not (off := error(pool[slot], state)) <= of_state:
            found.append(f"slot {slot}: {off:.2g}")
    return found


def every_case(kernel, op, names, heads=HEADS, device="cpu"):
    found = {}
    for (H, HV), name in itertools.product(heads, names):
        scales = (None, 0.3) if name in ("one token", "two tokens") else (0.0,)
        for scale in scales:
            if wrong := faults(kernel, op, inputs(op, name, H, HV, device, scale)):
                found[f"{H}/{HV}, {name}, {scale}"] = wrong
    return found


# elements: rows of q, k and v begin at multiples of 32 bytes, or Triton would add in
# another order; gates anywhere
GAPS = {
    "mixed_qkv": 16,
    "q": 16,
    "k": 48,
    "v": 32,
    "a": 5,
    "b": 3,
    "z": 16,
    "pool": 64,
    "initial_state": 64,
}


def tokens_apart(x, gap):
    """The same values in rows and tokens that lie apart, by different gaps; NaN between."""
    token = x[0, 0].numel() + gap
    row = x.shape[1] * token + 2 * gap
    wide = x.new_full((len(x) * row + gap,), math.nan)
    strides = row, token, *x.stride()[2:]
    return wide.as_strided(x.shape, strides, gap).copy_(x)


def lying_apart(x, names):
    """The same values, those of these names in slots or tokens that lie apart."""
    found = dict(x)
    for name in names:
        if name in STATES.values():
            found[name] = apart(x[name], GAPS[name])
        elif "num_accepted_tokens" in x or "initial_state" in x:
            found[name] = tokens_apart(x[name], GAPS[name])
        else:
            found[name] = tokens_apart(x[name][:, None], GAPS[name])[:, 0]
    return found


def written_between(states):
    """Whether something other than NaN lies between slots that lie apart."""
    return not states.is_contiguous() and not bool(between(states).isnan().all())


def strided_differences(
    kernel,
    op,
    device="cpu",
    heads=(2, 6),
    case="padding",
    one_by_one=True,
):
    """Which tensors give other bits where they lie apart, as views of a server's
    projections and pages do.
    """
    expected = step(kernel, op, inputs(op, case, *heads, device))
    names = [name for name in NAMES[op] if name in GAPS]
    found = []
    for chosen in [*([[name] for name in names] if one_by_one else []), names]:
        x = lying_apart(inputs(op, case, *heads, device), chosen)
        if not all(map(same, step(kernel, op, x), expected)):
            found.append(" ".join(chosen))
        if written_between(x[STATES[op]]):
            found.append(f"{' '.join(chosen)}: written between slots")
    return found


ON_CPU = pytest.mark.parametrize("name", algos("cpu"))
FIRST = {"padding", "each start"}


@ON_CPU
@pytest.mark.sampled(2)
def test_on_a_cpu(name):
    kernel, op = helpers.kernel(name, "cpu"), name.split("/")[0]
    assert every_case(kernel, op, FIRST & cases_of(op).keys()) == {}
    others = [case for case in cases_of(op) if case not in FIRST]
    assert every_case(kernel, op, others, [(2, 6)]) == {}


@ON_CPU
def test_rows_and_slots_that_lie_apart_give_the_same_bits_on_a_cpu(name):
    assert strided_differences(helpers.kernel(name, "cpu"), name.split("/")[0]) == []


def interpreted(names, cases):
    """For the process of the fixture `interpreter`, which takes a second for 100 programs."""
    found = {}
    for name in names:
        kernel, op = helpers.kernel(name, "interpreter"), name.split("/")[0]
        known = [case for case in cases if case in cases_of(op)]
        for case, what in every_case(kernel, op, known, [(1, 1), (1, 3)]).items():
            found[f"{name}: {case}"] = what
        if what := strided_differences(kernel, op, "cpu", (1, 1), "holes", False):
            found[name] = what
    return found


def interpreted_apart(names):
    """As few programs as show something: two rows whose tensors lie apart, against
    float64; and no row.
    """
    found = {}
    for name in names:
        kernel, op = helpers.kernel(name, "interpreter"), name.split("/")[0]
        x = inputs(op, "one hole", 1, 1)
        x = lying_apart(x, [key for key in GAPS if key in x])
        wrong = faults(kernel, op, x)
        wrong += faults(kernel, op, inputs(op, "no row", 1, 1))
        if wrong or written_between(x[STATES[op]]):
            found[name] = wrong
    return found


# bfloat16 is truncated there
BELOW = [name for name in algos("interpreter") if "_bf16/" not in name]


@pytest.mark.slow
def test_below_the_interpreter(interpreter):
    assert interpreter(interpreted_apart, BELOW) == {}


def errors_on_bfloat16():
    op = "gdn_mtp_packed_bf16"
    kernel = helpers.kernel(f"{op}/triton-v1", "interpreter")
    x = inputs(op, "two tokens", 1, 1)
    output, states = right(op, x)
    got, pool = step(kernel, op, x)
    return [error(got, output), *(error(pool[slot], states[slot]) for slot in states)]


@pytest.mark.slow
def test_a_pool_of_bfloat16_below_the_interpreter(interpreter):
    """It truncates: 3.3e-3, twice the error of rounding, and no more for the second token."""
    found = interpreter(errors_on_bfloat16)
    assert len(found) == 3
    assert max(found) < 4e-3


@pytest.mark.slow
def test_more_below_the_interpreter(interpreter):
    cases = ["padding alone", "counts", "padding", "each start"]
    assert interpreter(interpreted, BELOW, cases) == {}


def test_a_separate_final_state_gets_a_copy_of_the_pool():
    """What flashinfer-bench's call needs, in which an output is never an input."""
    x = inputs("gdn_mtp", "padding", 1, 3)
    output, final = x["q"].new_empty(6, 3, 3, D), torch.zeros_like(x["initial_state"])
    before = x["initial_state"].clone()
    helpers.kernel("gdn_mtp/cpp-v1", "cpu")(list(x.values()), [output, final])
    assert same(final, before)
    assert same(x["initial_state"], before)


def test_what_cannot_be_is_refused_before_anything_is_written():
    op = "gdn_mtp_packed"
    kernel = helpers.kernel(f"{op}/cpp-v1", "cpu")

    def refused(says, new_pool=None, **changed):
        x = inputs(op, "each start", 2, 6) | changed
        before = x["pool"].clone()
        output = x["a"].new_zeros(4, 4, 6, D)
        results = [output, x["pool"] if new_pool is None else new_pool]
        with pytest.raises(ValueError, match=says):
            kernel(list(x.values()), results)
        assert same(before, x["pool"])
        assert not output.any()

    good = inputs(op, "each start", 2, 6)
    row, a, b, _, _, pool, slots, counts, _ = good.values()
    refused("new_pool: expected the pool itself", new_pool=pool)
    few = torch.zeros(4, 4, 1400, dtype=torch.bfloat16)
    refused("1400 columns are no rows of q, k and v", mixed_qkv=few)
    gaps = row.mT.contiguous().mT
    refused("mixed_qkv: expected rows without gaps", mixed_qkv=gaps)
    shape = r"a: expected bfloat16 \[4, 4, 6\], got bfloat16 \[4, 4, 5\]"
    refused(shape, a=a[..., :5])
    refused("b: expected bfloat16", b=b.float())
    dense = "pool: expected dense but for its first two axes"
    apart = torch.stack([pool, pool], -1)[..., 0]
    refused(dense, pool=apart, new_pool=apart)
    few = slots[:, :3].contiguous()
    refused(r"state_indices: expected int32 \[4, 4\]", state_indices=few)
    counted = r"num_accepted_tokens: expected int32 \[4\], got"
    refused(counted, num_accepted_tokens=counts[:3])


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", algos("cuda"))
def test_on_a_gpu(name):
    kernel, op = helpers.kernel(name), name.split("/")[0]
    heads = *HEADS, (16, 48)
    assert every_case(kernel, op, cases_of(op), heads, "cuda") == {}
    assert strided_differences(kernel, op, "cuda") == []
