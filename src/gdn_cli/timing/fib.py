"""Tier `fib`: the installed flashinfer-bench's own evaluator, whatever its version times with.

0.1.2 records CUDA events around each call, synchronises before it in the loop, and takes the mean: what a kernel of
2 us costs there is the host's launch. Its development version takes the median of CUPTI's kernel times, or of CUDA
events where cupti-python is not there. Which of them it was is read from the installed code (the record's `how`).
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from time import perf_counter
from typing import Any

from .. import errors
from . import Plan, Subject, TierUnavailable, Timing, summarise

_CONTEST = Plan(warmup=10, iterations=50, trials=3)  # the evaluator's defaults, and the contest's for decode


def measure(subject: Subject, plan: Plan) -> Timing:
    """One sample per trial: the number that the evaluator makes of its iterations."""
    if subject.kernel is None or subject.definition is None:
        raise TierUnavailable("flashinfer-bench times solutions only, not floors")
    if hasattr(subject.kernel, "bind"):
        raise TierUnavailable("flashinfer-bench's evaluator calls a solution with the op's inputs, not with a setup's")
    if plan.l2 != "cold":
        raise TierUnavailable("flashinfer-bench's evaluator has no mode for a warm L2; use --l2 cold")
    plan = plan if plan.iterations else _CONTEST
    name = f"flashinfer-bench {_version()}"
    began = perf_counter()
    try:
        trial, method, l2 = _trial(subject, plan)
    except (ImportError, AttributeError, TypeError) as e:
        raise TierUnavailable(f"{name} is not one that this gdn can ask: {errors.one_line(e)}") from None
    samples = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # each workload is to say it, not the first one only
        for _ in range(plan.trials):
            if subject.refresh:
                subject.refresh()
            samples.append(trial())
    fell_back = any("cupti" in str(w.message).lower() for w in warned)
    note = "without cupti-python 13 or newer it fell back to CUDA events" if fell_back else None
    return summarise("fib", samples, l2=l2, how=f"{name}: {method}", note=note, busy_s=perf_counter() - began)


def _version() -> str:
    try:
        return metadata.version("flashinfer-bench")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _trial(subject: Subject, plan: Plan) -> tuple[Callable[[], float], str, str | None]:
    """A call that makes one trial and returns its microseconds; how it times; the state of L2 (None: neither)."""
    from flashinfer_bench.bench import timing
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators import resolve_evaluator
    from flashinfer_bench.data import Definition

    definition = Definition.model_validate(subject.definition)
    config = BenchmarkConfig(warmup_runs=plan.warmup, iterations=plan.iterations, num_trials=1)
    if hasattr(config, "resolve_eval_config"):  # newer ones merge layers of settings first
        config = config.resolve_eval_config(definition)
    evaluator = resolve_evaluator(definition)
    asked = {
        "definition": definition,
        "sol_runnable": subject.kernel.runnable,
        "inputs": [list(subject.inputs)],  # one list for each trial; the outputs it allocates by itself
        "ref_mean_latency_ms": 1.0,  # for a speed-up that nobody asks for here
        "cfg": config,
        "log_path": os.devnull,
        "device": str(next(x.device for x in [*subject.inputs, *subject.outputs] if hasattr(x, "device"))),
    }
    inspect.signature(evaluator.eval_performance).bind(**asked)  # a TypeError where it takes something else

    def trial() -> float:
        with _swallowed() as caught:
            try:
                performance, evaluation = evaluator.eval_performance(**asked)
            except Exception:  # even its report of an error needs a healthy device
                if not caught:
                    raise
        if caught:
            raise caught[0]
        if performance is None:
            raise RuntimeError(f"flashinfer-bench's evaluator gives no time: {evaluation.status}")
        return performance.latency_ms * 1e3

    return trial, *_method(timing, plan.iterations)


@contextmanager
def _swallowed() -> Iterator[list[BaseException]]:
    """What the evaluator catches, prints and turns into a status: an algo's error must come back as itself."""
    caught: list[BaseException] = []
    print_exc = traceback.print_exc
    traceback.print_exc = lambda *_, **__: caught.append(sys.exc_info()[1])
    try:
        yield caught
    finally:
        traceback.print_exc = print_exc


# --- how does it time? --------------------------------------------------------------------------------------------


def _method(timing: Any, iterations: int) -> tuple[str, str | None]:
    """What the code of the evaluator's timing does, in words, and the state in which a call finds L2."""
    outer, loop = _code(timing, "time_runnable"), _code(timing, "do_bench")
    names = _names(outer) | _names(loop)
    if any("cupti" in name for name in _names(outer)):
        clock = "CUPTI's kernel times"
    elif "elapsed_time" in names:
        clock = "CUDA events"
        if any({"synchronize", "record"} <= _names(node) for node in ast.walk(loop) if isinstance(node, ast.For)):
            clock += " with a synchronise before each call"
    else:
        clock = "a timer that gdn does not know"
    if "median" in _names(outer):
        statistic = "median"
    else:
        parameters = inspect.signature(timing.do_bench).parameters if hasattr(timing, "do_bench") else {}
        statistic = parameters["return_mode"].default if "return_mode" in parameters else "one number"
    flushed = bool(names & {"_clear_cache", "cold_l2_cache"})
    l2 = "cold" if flushed else "warm"
    state = "L2 flushed before each call" if flushed else "L2 as the last call left it"
    if any("clone" in name for name in _names(outer)):
        state += ", and the arguments cloned after that, so that a call finds of them what L2 holds" if flushed else ""
        l2 = None if flushed else l2
    return f"{clock}, {statistic} of {iterations}; {state}", l2


def _code(module: Any, function: str) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(getattr(module, function))))
    except (AttributeError, OSError):  # it has none of that name, or no source here
        return ast.Module([], [])


def _names(code: ast.AST) -> set[str]:
    """Every name, attribute and keyword in it, none of the words in its comments and docstrings."""
    found = {n.id for n in ast.walk(code) if isinstance(n, ast.Name)}
    found |= {n.attr for n in ast.walk(code) if isinstance(n, ast.Attribute)}
    return found | {n.arg for n in ast.walk(code) if isinstance(n, ast.keyword) and n.arg}
