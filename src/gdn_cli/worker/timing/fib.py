"""Tier `fib`: the installed flashinfer-bench's own evaluator, with the timing method of
its version.

0.1.2 records CUDA events around each call, synchronises before it in the loop, and
takes the mean: for a kernel of 2 us that measures mostly the host's launch. The
record's `how` says so for the versions in METHODS, and "unknown" for others.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_FELL_BACK = "without cupti-python 13 or newer it fell back to CUDA events"


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
    version = _version()
    name = f"flashinfer-bench {version}"
    method = METHODS.get(version, "how it times is unknown").format(plan.iterations)
    began = perf_counter()
    try:
        evaluate = _evaluation(subject, plan)
    except (ImportError, AttributeError, TypeError) as e:
        raise TierUnavailableError(
            f"{name} is not supported by this gdn: {errors.one_line(e)}"
        ) from None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # for each workload, not just the first one
        samples = [_trial(evaluate) for _ in range(plan.trials)]
    # its times are neither cold nor warm in 0.1.2, and unknown in others
    timing = summarise("fib", samples, how=f"{name}: {method}")
    timing.busy_s = perf_counter() - began
    if any("cupti" in str(warning.message).lower() for warning in warned):
        timing.note = _FELL_BACK
    return timing


def _version() -> str:
    try:
        return metadata.version("flashinfer-bench")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _evaluation(subject: Subject, plan: Plan) -> Callable[[], Any]:
    """The evaluator's function, with arguments for one trial."""
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators import resolve_evaluator
    from flashinfer_bench.data import Definition

    definition = Definition.model_validate(subject.definition)
    config = BenchmarkConfig(
        warmup_runs=plan.warmup, iterations=plan.iterations, num_trials=1
    )
    # newer ones merge layers of settings first
    if hasattr(config, "resolve_eval_config"):
        config = config.resolve_eval_config(definition)
    evaluate = resolve_evaluator(definition).eval_performance
    tensors = [x for x in [*subject.inputs, *subject.outputs] if hasattr(x, "device")]
    asked = inspect.signature(evaluate).bind(  # a TypeError if its parameters differ
        definition=definition,
        sol_runnable=subject.kernel.runnable,
        # one list for each trial; the evaluator allocates the outputs
        inputs=[list(subject.inputs)],
        ref_mean_latency_ms=1.0,  # for a speed-up that is not used here
        cfg=config,
        log_path=os.devnull,
        device=str(tensors[0].device),
    )
    return lambda: evaluate(*asked.args, **asked.kwargs)


def _trial(evaluate: Callable[[], Any]) -> float:
    """Microseconds. An algo's error comes back as itself."""
    with _swallowed() as caught:
        try:
            performance, evaluation = evaluate()
        except Exception:  # even its report of an error needs a healthy device
            if not caught:
                raise
    if caught:
        raise caught[0]
    if performance is None:
        raise RuntimeError(
            f"flashinfer-bench's evaluator gives no time: {evaluation.status}"
        )
    return performance.latency_ms * 1e3


@contextmanager
def _swallowed() -> Iterator[list[BaseException]]:
    """Collect exceptions that the evaluator catches, prints and turns into a status."""
    caught: list[BaseException] = []

    def collect(*_: Any, **__: Any) -> None:
        if error := sys.exc_info()[1]:
            caught.append(error)

    print_exc = traceback.print_exc
    traceback.print_exc = collect
    try:
        yield caught
    finally:
        traceback.print_exc = print_exc
