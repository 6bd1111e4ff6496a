"""The sdpa baselines: each runs the backend that it is named after, or says in one line why not."""

import helpers
import oracle
import pytest
import torch

REGISTRY = helpers.REGISTRY
PINNED = ("flash", "cudnn", "efficient", "math")
ON_CPU = ("flash", "math")


def name_of(op, backend):
    return f"{op}/sdpa-{backend}" + ("-causal" if op.endswith("_causal") else "")


@pytest.mark.parametrize("op", ["attention_fwd", "attention_fwd_causal"])
@pytest.mark.parametrize("backend", PINNED)
def test_each_is_there_and_named_after_its_backend(op, backend):
    algo = REGISTRY.find(name_of(op, backend))
    assert ("cpu" in algo.modes) == (backend in ON_CPU) and "cuda" in algo.modes
    given = oracle.inputs(op, seq_len=5)
    _, kernel = helpers.built(algo.full_name, "cpu")
    expected = {"math": "math"}.get(backend, f"{backend}_attention")
    assert kernel.module.backend(*given) == expected


def test_backends_differ_and_a_mask_is_a_mask():
    given = oracle.inputs("attention_fwd", seq_len=70)
    full, causal = (
        {b: helpers.built(name_of(op, b), "cpu")[1].returns(given)[0] for b in ON_CPU}
        for op in ("attention_fwd", "attention_fwd_causal")
    )
    # another order of sums: so it was another kernel
    assert not torch.equal(full["flash"], full["math"])
    assert torch.equal(causal["flash"][:, :, 0], given[2][:, :, 0])  # one key is seen
    assert oracle.error(causal["math"], oracle.attention_fwd_causal(*given)) < 3e-4


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_a_backend_that_does_not_run_here_says_so_in_one_line(backend):
    _, kernel = helpers.built(name_of("attention_fwd", backend), "cpu")
    with pytest.raises(
        RuntimeError, match=rf"^PyTorch's {backend}_attention does not run here: \S.*"
    ) as e:
        kernel.returns(oracle.inputs("attention_fwd", seq_len=5))
    assert "\n" not in str(e.value)
