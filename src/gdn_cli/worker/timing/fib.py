"""Tier `fib`: the installed flashinfer-bench's own evaluator, with the timing method of
its version.

0.1.2 records CUDA events around each call, synchronises before it in the loop, and
takes the mean: for a kernel of 2 us that measures mostly the host's launch. The
record's `how` says so for the versions in METHODS, and "unknown" for others.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib import metadata
from time import perf_counter
from typing import Any

from ... import errors
from ...schema.record_types import Timing
from .measurement import summarise
from .subject import Subject
from .tier import Plan, TierUnavailableError

# the evaluator's defaults, and the contest's for decode
_CONTEST = Plan(warmup=10, iterations=50, trials=3)
# how a version times; {} is its number of iterations
METHODS = {
    "0.1.2": (
        "CUDA events with a synchronise before each call, mean of {}; L2 flushed before each"
        " call, and the arguments cloned after that, so that a call finds of them what L2 holds"
    ),
}


def measure(subject: Subject, plan: Plan) -> Timing:
    """One sample per trial: the evaluator's result from its iterations."""
    if subject.kernel is None or subject.definition is None:
        raise TierUnavailableError("flashinfer-bench times solutions only, not floors")
    if hasattr(subject.kernel, "bind"):
        raise TierUnavailableError(
            "flashinfer-bench's evaluator calls a solution with the op's inputs, not with a"
            " setup's"
        )
    plan = plan if plan.iterations else _CONTEST
    version = metadata.version("flashinfer-bench")
    name = f"flashinfer-bench {version}"
    method = METHODS.get(version, "how it times is unknown").format(plan.iterations)
    began = perf_counter()
    try:
        evaluate = _evaluation(subject, plan)
    except (ImportError, AttributeError, TypeError) as e:
        raise TierUnavailableError(
            f"{name} is not supported by this gdn: {errors.one_line(e)}"
        ) from None
    samples = [_trial(evaluate) for _ in range(plan.trials)]
    # its times are neither cold nor warm in 0.1.2, and unknown in others
    timing = summarise("fib", samples, how=f"{name}: {method}")
    timing.busy_s = perf_counter() - began
    return timing


def _evaluation(subject: Subject, plan: Plan) -> Callable[[], Any]:
    """The evaluator's function, with arguments for one trial."""
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators import resolve_evaluator
    from flashinfer_bench.data import Definition

    definition = Definition.model_validate(subject.definition)
    config = BenchmarkConfig(
        warmup_runs=plan.warmup, iterations=plan.iterations, num_trials=1
    )
    evaluate = resolve_evaluator(definition).eval_performance
    tensors = [x for x in [*subject.inputs, *subject.outputs] if hasattr(x, "device")]
    bound = inspect.signature(evaluate).bind(  # a TypeError if its parameters differ
        definition=definition,
        sol_runnable=subject.kernel.runnable,
        # one list for each trial; the evaluator allocates the outputs
        inputs=[list(subject.inputs)],
        ref_mean_latency_ms=1.0,  # for a speed-up that is not used here
        cfg=config,
        log_path=os.devnull,
        device=str(tensors[0].device),
    )
    return lambda: evaluate(*bound.args, **bound.kwargs)


def _trial(evaluate: Callable[[], Any]) -> float:
    """Microseconds."""
    performance, evaluation = evaluate()
    if performance is None:
        raise RuntimeError(
            f"flashinfer-bench's evaluator gives no time: {evaluation.status}"
        )
    return performance.latency_ms * 1e3
