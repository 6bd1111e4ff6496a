"""gdn_decode_packed: what its binding refuses, and `load`. Its algos are in test_mtp.py."""

import helpers
import pytest
import torch
from rungs import test_mtp as mtp
from serving_steps import same

from gdn import load

OP = "gdn_decode_packed"


def given(case="the last slot", H=2, HV=6):
    return list(mtp.inputs(OP, case, H, HV).values())


def test_what_cannot_be_is_refused_before_anything_is_written():
    kernel = helpers.kernel(f"{OP}/cpp-v1", "cpu")
    row, a, b, _, _, pool, _, _ = given()
    output = torch.zeros(2, 6, 128, dtype=torch.bfloat16)

    def refused(says, i, x, new_pool=None):
        args = given()
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
    apart = torch.stack([pool, pool], -1)[..., 0]
    refused("pool: expected dense but for its first two axes", 5, apart, apart)
    kind = "state_indices: expected int32 or int64, got float32"
    refused(kind, 6, torch.tensor([1.0, 2.0]))


def test_load_works_on_a_copy_or_in_place():
    helpers.kernel(f"{OP}/cpp-v1", "cpu")  # skips where it cannot be compiled
    call, args = load("cpp-v1", op=OP), given("one hole", 4, 8)
    before = args[5].clone()
    output, new_pool = call(*args)
    assert same(args[5], before)
    assert not same(new_pool[2], before[2])
    assert same(new_pool[3], before[3])
    again = torch.empty_like(output)
    call(*args, out=(again, args[5]))
    assert same(again, output)
    assert same(args[5], new_pool)
    assert "without out= it works on a copy of all of pool" in call.__doc__
