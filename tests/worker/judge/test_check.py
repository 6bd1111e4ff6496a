"""check.check's verdicts on hand-made kernels for a hand-made op: passes, failures, and
their reasons.
"""

from __future__ import annotations

import math

import helpers
import pytest
import torch
from msgspec import UNSET, structs

from gdn_cli.catalog.ops import Op, TensorSpec
from gdn_cli.schema.record_types import Check, FirstWrong
from gdn_cli.worker.executor import calls
from gdn_cli.worker.judge import check
from gdn_cli.worker.timing.flips import part

N = 1000
TOY = Op(
    name="toy",
    definition="toy_n",
    op_type="toy",
    summary="y = 1 + 0 x, z the same in bfloat16",
    axes={"n": None, "two": 2},
    inputs={
        "x": TensorSpec("float32", ("n",)),
        "i": TensorSpec("int64", ("two",)),
        "scale": TensorSpec("float32", None),
    },
    outputs={
        "y": TensorSpec("float32", ("n",)),
        "z": TensorSpec("bfloat16", ("n", "two")),
    },
    constraints=(),
    tags=(),
    tolerance={"y": 1e-3, "z": 5e-3},
    reference="none",
    baseline=None,
    linear_in=(),
    label="n={n}",
)


class Fake:
    """As build.Kernel: either fills the outputs that it is given, or returns its own."""

    def __init__(self, function, destination_passing: bool = True) -> None:
        self.function, self.destination_passing = function, destination_passing

    def __call__(self, inputs, outputs) -> None:
        self.function(*inputs, *outputs)

    def returns(self, inputs) -> list:
        return list(self.function(*inputs))


def judge(
    function, expected=1.0, n: int = N, destination_passing: bool = True, op: Op = TOY
) -> Check:
    """Check a fake kernel; `expected` is y's exact value everywhere (or a tensor), z's is 1."""
    inputs = [torch.zeros(n), torch.tensor([3, 4]), None]
    y = expected if isinstance(expected, torch.Tensor) else torch.full((n,), expected)
    kernel = helpers.local(Fake(function, destination_passing))
    exact = [y.double(), torch.ones(n, 2).double()]
    return check.check(kernel, check.Problem(op, {"n": n}, inputs, exact))


Y, Z = torch.ones(N), torch.ones(N, 2).bfloat16()


def returned(*results, n: int = N) -> Check:
    return judge(lambda x, i, scale: results, n=n, destination_passing=False)


def fill(y_value, z_value=1.0):
    """A kernel that writes these values (numbers or tensors) everywhere."""

    def run(x, i, scale, y, z):
        y.copy_(y_value) if isinstance(y_value, torch.Tensor) else y.fill_(y_value)
        z.fill_(z_value)

    return run


def test_exact_results_pass():
    v = judge(fill(1.0))
    assert (v.passed, v.official, v.reason) == (True, True, None)
    assert v.errors == {"y": 0.0, "z": 0.0}
    assert v.max_abs_error == v.max_rel_error == 0.0
    assert v.inputs_changed == [] and v.unwritten == {}


def test_value_returning_kernels_are_judged_by_what_they_return():
    v = returned(Y, Z)
    assert v.passed and v.errors == {"y": 0.0, "z": 0.0}
    v = returned(Y * 2, Z)
    assert not v.passed and v.errors["y"] == 1.0


def test_an_op_may_allow_an_element_more():
    y = Y.clone()
    y[7] = 1.015
    assert (
        judge(fill(y)).reason
        == "y: 1 of 1000 elements beyond 1e-2, largest error 0.015"
    )
    wide = structs.replace(TOY, element_tolerance=2e-2)
    v = judge(fill(y), op=wide)
    assert v.passed and not v.official
    y[7] = 1.025
    reason = "y: 1 of 1000 elements beyond 2e-2, largest error 0.025"
    assert judge(fill(y), op=wide).reason == reason


def test_zeros_fail_by_both_rules():
    v = judge(fill(0.0))
    assert (v.passed, v.official) == (False, False)
    assert v.errors["y"] == v.max_abs_error == 1.0
    assert v.reason == "y: 1000 of 1000 elements beyond 1e-2, largest error 1"


def test_only_the_elements_that_are_wrong_are_counted():
    off = torch.ones(N)
    off[[3, 500, 999]] = 1.5
    v = judge(fill(off))
    assert not v.official and v.reason.startswith("y: 3 of 1000 elements beyond")
    assert v.errors["y"] == pytest.approx(0.5 * math.sqrt(3 / N))


# --- the two rules at their edges


@pytest.mark.parametrize(("relative", "passes"), [(0.99e-3, True), (1.01e-3, False)])
def test_the_frobenius_rule_at_its_tolerance(relative, passes):
    v = judge(fill(1.0 + relative))
    assert v.passed is passes and v.official is True
    assert v.errors["y"] == pytest.approx(relative, rel=1e-3)
    assert passes or v.reason == "y: relative error 0.001, at most 0.001 allowed"


def test_each_output_has_its_own_tolerance():
    # above 1: 0.8 % off, over z's 0.5 %, and the official rule is content
    bf16_step = 2.0**-7
    v = judge(fill(1.0, 1.0 + bf16_step))
    assert not v.passed and v.official and v.errors == {"y": 0.0, "z": bf16_step}
    assert v.reason == "z: relative error 0.0078, at most 0.005 allowed"


@pytest.mark.parametrize(
    ("exact", "got", "official"),
    [
        (1.0, 1.02, False),  # both errors beyond 1e-2
        (1.0, 1.0099, True),  # neither
        (100.0, 100.5, True),  # 0.5 off, 0.5 %: the relative error is within
        (100.0, 101.5, False),
        # eight times too large, 0.008 off: the absolute error is within
        (1e-3, 9e-3, True),
        (0.0, 0.0099, True),
        (0.0, 0.0101, False),
    ],
)
def test_the_official_rule_needs_both_errors_beyond_one_percent(exact, got, official):
    assert judge(fill(got), expected=exact).official is official


def test_small_outputs_pass_the_official_rule_and_not_the_scale_aware_one():
    """Outputs below 1e-2 could be anything, zeros too, for all that the official rule sees."""
    for got in (0.0, -5e-3, 9e-3):
        v = judge(fill(got), expected=5e-3)
        assert v.official and not v.passed
        assert v.errors["y"] == pytest.approx(abs(got - 5e-3) / 5e-3)
    assert judge(fill(5e-3), expected=5e-3).passed


def test_an_output_that_is_zero_must_be_zero():
    assert judge(fill(0.0), expected=0.0).errors["y"] == 0.0
    v = judge(fill(1e-6), expected=0.0)
    assert v.official and not v.passed and v.errors["y"] is None  # no number in JSON


# --- shapes, dtypes, counts

F32 = "float32 on cpu"


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ((Y[1:], Z), f"y: returned (999,) {F32}, expected (1000,) {F32}"),
        ((Y[None], Z), f"y: returned (1, 1000) {F32}, expected (1000,) {F32}"),
        (
            (Y.double(), Z),
            f"y: returned (1000,) float64 on cpu, expected (1000,) {F32}",
        ),
        ((1.0, Z), f"y: returned float, expected (1000,) {F32}"),
        ((Y,), "returned 1 outputs, expected 2"),
        ((Y, Z, Y), "returned 3 outputs, expected 2"),
        ((), "returned 0 outputs, expected 2"),
    ],
)
def test_results_of_the_wrong_form(results, reason):
    v = returned(*results)
    assert (v.passed, v.official, v.reason) == (False, False, reason)


# --- NaN


def test_computed_nan_and_inf_are_told_from_unwritten_elements():
    for bad in (math.nan, math.inf, -math.inf):
        off = torch.ones(N)
        off[[0, 7]] = bad
        v = judge(fill(off))
        assert not v.passed and not v.official and v.unwritten == {}
        assert v.reason == "y: 2 of 1000 elements are NaN or Inf"
        assert v.errors["y"] is None and v.errors["z"] == 0.0

    def skips(x, i, scale, y, z):
        y[: N - 3] = 1.0
        z[:] = math.nan  # computed as NaN, all of it

    v = judge(skips)
    assert not v.passed and not v.official and v.unwritten == {"y": 3}
    assert v.reason == "y: 3 of 1000 elements were not written"
    assert v.errors["z"] is None


def first(found: FirstWrong) -> tuple:
    return found.index, found.expected, found.got, found.instead


def test_the_first_wrong_element_of_each_output():
    off = torch.ones(N)
    off[[3, 500]] = 1.5
    wrong = judge(fill(off, 1.0 + 2.0**-7)).first_wrong
    assert first(wrong["y"]) == ([3], 1.0, 1.5, None)
    assert first(wrong["z"]) == ([0, 0], 1.0, 1.0078125, None)
    assert wrong["y"].words == "at [3]: expected 1, got 1.5"
    # a check that passed is written as before
    assert judge(fill(1.0)).first_wrong is UNSET

    def skips(x, i, scale, y, z):
        y[: N - 3] = 1.0
        z[:] = 1.0
        z[7, 1] = -math.inf

    wrong = judge(skips).first_wrong
    assert first(wrong["y"]) == ([N - 3], 1.0, None, "never written")
    assert first(wrong["z"]) == ([7, 1], 1.0, None, "-Inf")
    assert wrong["z"].words == "at [7, 1]: expected 1, got -Inf"
    # no element is beyond 1e-2, all of them are too far off
    small = judge(fill(torch.linspace(1.0, 1.004, N)))
    assert small.official and first(small.first_wrong["y"])[0] == [500]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_mark_is_a_nan_that_arithmetic_does_not_make(dtype):
    outputs = {"y": TensorSpec(dtype, ("n", "two"))}
    op = structs.replace(TOY, outputs=outputs, tolerance={"y": 1.0})
    (marked,) = check.allocate(op, {"n": 5}, "cpu")
    assert (marked.shape, str(marked.dtype)) == ((5, 2), f"torch.{dtype}")
    assert bool(marked.isnan().all())
    zero = torch.zeros(5, 2, dtype=marked.dtype)
    for made in (zero / zero, zero + math.nan, (zero - 1).sqrt(), zero * math.inf):
        assert bool(made.isnan().all())
        assert check.unwritten(made) == 0 and check.unwritten(marked) == 10


def test_empty_outputs_pass():
    v = judge(fill(1.0), n=0)
    assert v.passed and v.errors == {"y": 0.0, "z": 0.0}
    assert returned(Y[:0], Z[:0], n=0).passed
    v = returned(Y[:0], Z[:0].float(), n=0)
    assert not v.passed and v.reason.endswith("expected (0, 2) bfloat16 on cpu")


# --- inputs


def test_changed_inputs_are_named():
    def spoils(x, i, scale, y, z):
        fill(1.0)(x, i, scale, y, z)
        x[0] = -0.0  # equal in value, not in bits
        i += 1

    v = judge(spoils)
    assert (v.passed, v.official, v.inputs_changed) == (False, True, ["x", "i"])
    assert v.reason == "changed its inputs: x, i"


def test_nan_in_the_inputs_is_not_a_change():
    inputs = [torch.full((4,), math.nan), torch.tensor([3, 4]), 0.5]
    exact = [torch.ones(4).double(), torch.ones(4, 2).double()]
    problem = check.Problem(TOY, {"n": 4}, inputs, exact)
    v = check.check(helpers.local(Fake(fill(1.0))), problem)
    assert v.passed and v.inputs_changed == []


# --- the oracle


def test_the_oracle_calls_the_reference_in_float64():
    seen = []

    def reference(x, i, scale):
        seen.extend((x.dtype, i.dtype, scale))
        return [x + 1]

    inputs = [torch.ones(3).bfloat16(), torch.tensor([1]), 0.5]
    (y,) = check.oracle(Fake(reference, False), inputs)
    assert seen == [torch.float64, torch.int64, 0.5]
    assert (y.dtype, y.tolist()) == (torch.float64, [2.0] * 3)


def test_new_values_are_no_stricter_than_the_first_ones():
    """At twice the values an error of 0.006 would be 0.012, beyond the absolute 1e-2."""
    x, row = torch.ones(4), torch.ones(2, 4)
    scaling = calls.Scaling([x, part(row, 2, 4)])
    scales = []
    for _ in range(5):
        scaling()
        scales.append(float(x[0]))
        assert row[0].tolist() == [1, 1, scaling.scale, scaling.scale]
    assert scales == [-1, 0.5, -0.5, 1, -1]


def test_an_op_that_is_linear_in_nothing_keeps_its_results():
    scaling = calls.Scaling([])
    scaling()
    assert scaling.scale == 1
