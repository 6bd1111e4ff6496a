"""What no schema says of tensors: bits, storages, overlap, gradients; for `load`, at
its first call and from then on.

What serving's functions refuse: serving/test_operators.py.
"""

from __future__ import annotations

import functools

import oracle
import pytest
import torch
from library.test_loading import agree, needs_cxx  # noqa: F401  a fixture

from gdn import load, straight_call, tensor_checks
from gdn.tensor_checks import NoBackwardError
from gdn_cli.errors import UsageError

pytestmark = pytest.mark.usefixtures("needs_cxx")
FLOATS = {"q": 0, "k": 1, "v": 2, "state": 3, "A_log": 4, "a": 5, "dt_bias": 6, "b": 7}


def call() -> tuple[list, tuple]:
    inputs = oracle.inputs("gdn_decode", batch_size=2)
    return inputs, (torch.empty_like(inputs[2]), torch.empty_like(inputs[3]))


@functools.cache
def called(name: str):
    """The algo after two right calls: the second one goes straight to the library."""
    decode = load(name)
    fine, into = call()
    for _ in range(2):
        decode(*fine, out=into)
    return decode


def refused(
    inputs: list, out: tuple | None, error: type[Exception], match: str
) -> None:
    """By a function that knows such a call, and by one that does not."""
    for name in ("cpp-v1", "pt-reference"):
        decode = called(name)
        versions = [x._version for x in out or ()]
        with pytest.raises(error, match=match):
            decode(*inputs, out=out)
        assert [x._version for x in out or ()] == versions


# --- bits, storages, gradients


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("given", [True, False], ids=["out", "no out"])
def test_a_negative_bit(name, given):
    inputs, out = call()
    inputs[FLOATS[name]] = torch._neg_view(-inputs[FLOATS[name]])
    refused(
        inputs,
        out if given else None,
        ValueError,
        f"^{name}: has the negative bit; call .resol",
    )


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("left", [0, 2], ids=["freed", "shrunk"])
def test_a_storage_that_was_freed_or_shrunk(name, left):
    inputs, out = call()
    inputs[FLOATS[name]].untyped_storage().resize_(left)
    refused(
        inputs, out, ValueError, f"^{name}: expected a storage of .* bytes, got {left}"
    )
    inputs, out = call()
    out[1].untyped_storage().resize_(left)
    refused(
        inputs, out, ValueError, f"^out: new_state: expected a storage of .* got {left}"
    )


def test_derivatives():
    inputs, _ = call()

    def total(v):
        return load("cpp-v1")(*inputs[:2], v, *inputs[3:])[0].float().sum()

    with pytest.raises(
        NoBackwardError, match="^v: requires grad, and cpp-v1 has no backward"
    ):
        torch.func.grad(total)(inputs[2])
    with pytest.raises(
        NoBackwardError, match="^v: has a tangent, and cpp-v1 has no derivative"
    ):
        torch.func.jvp(total, (inputs[2],), (inputs[2],))


# --- overlap


def test_an_output_in_an_inputs_memory():
    inputs, (output, state) = call()
    refused(
        inputs,
        (inputs[2], state),
        ValueError,
        "^out: output: overlaps v; pass a tensor",
    )
    one = torch.zeros(3, *state.shape[1:])
    shifted = [*inputs[:3], one[:2].copy_(inputs[3]), *inputs[4:]]
    refused(shifted, (output, one[1:]), ValueError, "^out: new_state: overlaps state")
    refused(
        inputs,
        (output, state.view(-1)[:1].expand_as(state)),
        ValueError,
        "several elements|cont",
    )


def test_outputs_in_each_others_memory():
    inputs, (output, state) = call()
    within = state.view(torch.bfloat16).view(-1)[: output.numel()].view_as(output)
    refused(
        inputs, (within, state), ValueError, "^out: new_state: overlaps out: output"
    )


@pytest.mark.parametrize("name", ["cpp-v1", "pt-reference"])
def test_the_state_itself_stays_allowed(name):
    for _ in range(3):
        inputs, (output, _) = call()
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        load(name)(*inputs, out=(output, inputs[3].view_as(inputs[3])))
        agree((output, inputs[3]), before)


def test_overlap_in_words():
    page = torch.zeros(4, 6)
    overlap = tensor_checks.overlap
    assert not overlap(page[:2], page[2:]) and overlap(page[:3], page[2:])
    assert not overlap(page[:, :2], page[:, 2:]) and not overlap(
        page[:, 4:], page[:, :4]
    )
    assert overlap(page[:, :3], page[:, 2:]) and overlap(
        page[:, 3:], page.view(-1)[1:23].view(2, 11)
    )
    assert overlap(page[:, 0], page[0, 0]) and not overlap(page[:0], page)
    assert not overlap(page, page.to("meta"))
    apart = tensor_checks._own_addresses
    assert (
        apart(page.T)
        and apart(page[:, ::2])
        and apart(page[:0].expand(0, 6))
        and apart(page[0, 0])
    )
    assert not apart(page[:1].expand(4, 6)) and not apart(
        page.as_strided((4, 6), (3, 1))
    )


# --- the quick look


def native():
    if straight_call.native() is None:
        pytest.skip("straight_call.cpp does not build here")
    return straight_call.module


def test_kinds_differ_where_a_check_could():
    x = torch.zeros(8, 8)
    other = [
        torch.zeros(8, 8, dtype=torch.int32),
        torch.zeros(64),
        torch.zeros(8, 9),
        torch.zeros(8, 8).T,
        torch.zeros(8, 16)[:, :8],
        torch.zeros(65)[1:].view(8, 8),  # at a multiple of 4 bytes
        torch.zeros(72)[4:68].view(8, 8),  # of 16
    ]
    kinds = [native().kind(b"rF", (y, None)) for y in (x, torch.ones(8, 8), *other)]
    assert (
        kinds[0] == kinds[1] and len(set(kinds)) == len(other) + 1 and None not in kinds
    )
    assert native().kind(b"rF", (x, 1.0)) == kinds[0]


def test_roles():
    x, y, z = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    fits = native().fits
    for roles, arguments in (
        (b"rw", (x, y)), (b"rw-", (x, y, y)), (b"RW", (None, None)), (b"ifF", (1, 1.0, None)), (b"f", (1,)),
        (b"a0", (x, x)), (b"a0", (x, y)), (b"ab10", (x, y, y, x)), (b"rr", (x, x)), (b"rw", (x[:2], x[2:])),
        (b"rw", (x[:0], x)),
    ):  # fmt: skip
        assert fits(roles, arguments), (roles, arguments)
    for roles, arguments in (
        (b"rw", (x, x)), (b"ww", (x, x)), (b"rw", (None, y)), (b"rw", (x, None)), (b"r", (1.0,)), (b"F", (x,)),
        (b"i", (1.0,)), (b"i", (None,)), (b"i", (True,)), (b"a0", (x[:3], x[1:])), (b"ab01", (x, y, y, x)),
        (b"a0", (x[:2], x)), (b"rw", (x[:3], x[2:])), (b"w", (x[:1].expand(4),)), (b"ab0", (x, x[1:], x)),
        (b"r", (torch._neg_view(x),)), (b"r", (x.to_sparse(),)), (b"r", (x.to("meta"),)), (b"r", ([],)),
        (b"r", (torch.zeros(4, dtype=torch.cfloat),)),
        (b"r", (torch.zeros(1, requires_grad=True),)), (b"r", (torch.zeros(4, dtype=torch.cfloat).conj(),)),
    ):  # fmt: skip
        assert not fits(roles, arguments), (roles, arguments)
    for wrong in ((b"rr", (x,)), ("r", (x,)), (b"r", [x])):
        with pytest.raises(TypeError, match="expected roles"):
            fits(*wrong)
    native().wrote(b"rwW", (x, y, None))
    with torch.inference_mode():
        native().wrote(b"w", (torch.zeros(4),))
    assert (x._version, y._version, z._version) == (0, 1, 0)


def test_whoever_watches_is_seen():
    x = torch.zeros(4)
    fits = native().fits
    assert fits(b"r", (x,))
    seen = []
    torch.func.vmap(lambda y: seen.append(fits(b"r", (x,))) or y)(x)
    torch.jit.trace(
        lambda y: seen.append(fits(b"r", (x,))) or y + 1, (x,), check_trace=False
    )
    torch.func.functionalize(lambda y: seen.append(fits(b"r", (x,))) or y)(x)
    with torch.device("cpu"):
        seen.append(fits(b"r", (x,)))
    with torch._subclasses.FakeTensorMode():
        seen.append(fits(b"r", (x,)))
    with torch.autograd.forward_ad.dual_level():
        seen.append(fits(b"r", (x,)))
    assert len(seen) == 6 and not any(seen)
    with torch.autocast("cpu"), torch.inference_mode():
        assert fits(b"r", (x,)) and fits(b"r", (torch.nn.Parameter(x),))


@pytest.mark.parametrize("fails", ["compiler", "setup"])
def test_without_it_calls_go_through_the_operator(fails, monkeypatch):
    if fails == "compiler":
        monkeypatch.setattr(straight_call, "_loaded", lambda machine: 1 / 0)
    else:
        monkeypatch.setattr(
            straight_call,
            "_loaded",
            lambda machine: type("Other", (), {"setup": lambda *_: False}),
        )
    monkeypatch.setattr(straight_call, "module", None)
    straight_call.native.cache_clear()
    try:
        assert straight_call.native() is None and straight_call.module is None
    finally:
        straight_call.native.cache_clear()


# --- names


@pytest.mark.parametrize(
    ("args", "named", "says"),
    [
        ((None,), {}, "load: name: expected a text such as 'cuda-v5', got NoneType"),
        (("cpp-v1", 3), {}, "load: op: expected a text such as 'gdn_decode', got int"),
        (("cpp-v1",), {"algos": 3}, "load: algos: expected a folder's path, got int"),
    ],
)
def test_names_that_are_none(args, named, says):
    with pytest.raises(UsageError, match=f"^{says}$"):
        load(*args, **named)
