"""Every algo that runs without a GPU against the float64 oracle, built as it ships. New
folders are picked up here.
"""

import functools

import helpers
import oracle
import pytest

from gdn_cli.catalog import pack
from gdn_cli.worker.executor import build
from gdn_cli.worker.judge import check

REGISTRY = helpers.REGISTRY

# Small and odd on purpose: one row, primes, no power of two, both sides of a chunk of
# 64 tokens, empty sequences.
PREFILL = {
    "one token, scale None": dict(lengths=(1,)),
    "empty ones between, scale 0": dict(lengths=(5, 0, 3), scale=0.0),
    "empty ones at the ends, scale 0.3": dict(lengths=(0, 2, 0), scale=0.3),
    "only an empty one": dict(lengths=(0,)),
    "around a chunk": dict(lengths=(63, 64, 65)),
    "two chunks": dict(lengths=(130, 1)),
}
DECODE = {
    "B=1, scale None": dict(batch_size=1),
    "B=3, scale 0": dict(batch_size=3, scale=0.0),
    "B=5, scale 0.3": dict(batch_size=5, scale=0.3),
}
VERIFY = {
    "B=1, scale None": dict(batch_size=1, seq_len=2),
    "B=3, T=4, scale 0": dict(batch_size=3, seq_len=4, scale=0.0),
    "B=2, T=8, scale 0.3": dict(batch_size=2, seq_len=8, scale=0.3),
}

ONE = {"B=5, T=1": dict(batch_size=5, seq_len=1)}


def extreme(**size):
    return {case: size | {"case": case} for case in ("still", "forgetful", "repeated")}


CASES = helpers.of_each_op(
    {
        "gdn_decode": DECODE | extreme(batch_size=3),
        "gdn_layer_post_conv": VERIFY | ONE | extreme(batch_size=2, seq_len=5),
        "gdn_layer": DECODE | extreme(batch_size=3),
        "gdn_mtp": VERIFY | extreme(batch_size=2, seq_len=5),
        "gdn_prefill": PREFILL | extreme(lengths=(70, 5)),
        "attention_fwd": {
            "one token": dict(batch_size=1, seq_len=1),
            "two batches": dict(batch_size=2, seq_len=5),
            "odd": dict(batch_size=1, seq_len=67),
        },
    }
)


def here(mode):
    return [a for a in REGISTRY.algos if mode in a.modes]


# Triton's interpreter takes a second or two for a sequence of all heads. The files of
# edges have its other cases, with one head or two.
INTERPRETED = {
    "B=1, scale None",
    "B=3, scale 0",
    "one token, scale None",
    "around a chunk",
}


def cases_of(algo, mode):
    """All of its op's; of one size only where torch.compile would compile again for B =
    1, which takes many seconds.
    """
    names = list(CASES[algo.op])
    if mode == "interpreter" and algo.op.startswith("gdn_"):
        return [n for n in names if n in INTERPRETED]
    if any("torch.compile(" in p.read_text() for p in algo.folder.glob("*.py")):
        return [n for n in names if CASES[algo.op][n].get("batch_size") == 3]
    return names


@pytest.fixture(scope="module")
def verdicts(interpreter):
    """(algo, mode) -> case -> verdict; each algo is built once, when its first case is
    asked for.
    """

    @functools.cache
    def ask(name, mode):
        algo = REGISTRY.find(name)
        names = cases_of(algo, mode)
        cases = [CASES[algo.op][case] for case in names]
        if mode == "cpu":
            found = helpers.judge(name, cases)
        else:
            found = interpreter(helpers.judge, name, cases)
        return dict(zip(names, found, strict=True))

    return ask


def marks(algo, mode):
    """A case takes seconds below Triton's interpreter and by torch.compile; tests of
    the edges run there, too.
    """
    slow = mode == "interpreter" or algo.name == "pt-compiled"
    return [pytest.mark.slow] if slow else []


@pytest.mark.parametrize(
    ("algo", "mode", "case"),
    [
        pytest.param(
            a, mode, case, id=f"{a.full_name}-{mode}-{case}", marks=marks(a, mode)
        )
        for mode in ("cpu", "interpreter")
        for a in here(mode)
        for case in cases_of(a, mode)
    ],
)
def test_an_algo_agrees_with_the_oracle(algo, mode, case, verdicts):
    agrees(algo, verdicts(algo.full_name, mode)[case])


def agrees(algo, verdict):
    assert verdict.passed, verdict.reason
    tolerance = REGISTRY.ops[algo.op].tolerance
    assert set(verdict.errors) == set(tolerance)
    for name, error in verdict.errors.items():
        # NaN is not: it has one, or elements that nothing wrote
        assert error <= tolerance[name], name


def test_every_algo_has_cases():
    assert all(cases_of(a, mode) for a in REGISTRY.algos for mode in a.modes)


# --- the definitions' references


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=REGISTRY.ops)
@pytest.mark.sampled(5)
def test_the_reference_in_float64_is_the_oracle(op):
    """check.py judges by the reference fed with float64: it must itself be right to
    float64's last digits.
    """
    reference = build.reference(pack.definition(op, REGISTRY))
    for name, case in CASES[op.name].items():
        inputs = oracle.inputs(op.name, **case)
        exact = getattr(oracle, op.name)(*inputs)
        exact = exact if isinstance(exact, tuple) else (exact,)
        found = check.oracle(reference, inputs)
        assert len(found) == len(op.outputs)
        for out, x in zip(found, exact, strict=True):
            assert str(out.dtype) == "torch.float64"
            assert oracle.error(out, x) < 1e-12, name
