"""Request (JSON) -> reply (JSON): the only place where kernels run.

    gdn worker < request.json > reply.json [--events FILE]

A request holds one algo with all that it needs: the packed solution, the definition, the op, the workloads, and what to
do (`check`, `bench`, `prove` or `floor`). The reply holds a record for each workload. With `--events`, the environment
and then each record are appended to FILE, one JSON line each, as soon as they are there: a later crash loses nothing.
The process may die of what it runs; whoever started it (jobs.py, Modal, a cluster's queue) reports that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from . import errors
from .errors import GdnError, MissingError
from .registry import Op, TensorSpec
from .workloads import Workload

SCHEMA = 1


def main(events: Path | None = None) -> int:
    """Serve the request on stdin; the reply goes to stdout, and nothing else does. Returns the exit code.

    Whatever runs here may print: file descriptor 1 points at stderr for the rest of the process, because CUDA's printf
    and C's buffered stdout know nothing of Python's sys.stdout and may flush as late as at exit.
    """
    sys.stdout.flush()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = _parse(sys.stdin.read())
    if answer.get("status") != "refused":
        answer = serve(answer, _emitter(events))
    with reply:
        json.dump({"schema": SCHEMA} | answer, reply)
        reply.write("\n")
    return answer.get("code") or 0


def end(code: int) -> NoReturn:
    """Leave at once: threads that an algo left running must not keep a worker that has replied."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parse(text: str) -> dict[str, Any]:
    """The request with its op and workloads read, or the reply that refuses it."""
    try:
        request = json.loads(text)
        if request.get("schema") != SCHEMA:
            reason = f"schema {request.get('schema')!r}, this gdn speaks {SCHEMA}"
            return {"status": "refused", "reason": reason, "code": 2}
        found = {key: request[key] for key in ("command", "definition", "solution", "mode")}
        found["op"] = op_from_json(request["op"])
        found["workloads"] = [Workload.from_json(w) for w in request["workloads"]]
        return request | found
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        return {"status": "refused", "reason": f"not a request of schema {SCHEMA}: {_one_line(e)}", "code": 2}


def serve(request: dict[str, Any], emit: Callable[[dict], None]) -> dict[str, Any]:
    """Do what a parsed request asks for; `emit` gets each record as it is made."""
    _imports(request["mode"])
    from . import environment

    reply: dict[str, Any] = {"status": "done", "records": []}
    try:
        reply["environment"] = environment.describe(request["mode"])
        emit({"environment": reply["environment"]})  # first: records never lack their origin
        work = _floors if request["command"] == "floor" else _algo
        for record in work(request, reply):
            emit(record)
            reply["records"].append(record)
    except _BuildFailed as e:
        reply |= {"status": "build_failed", "reason": str(e), "code": e.code}
    except GdnError as e:  # what was measured before stays in the reply
        reply |= {"status": "refused", "reason": str(e), "code": e.code}
    return reply


class _BuildFailed(GdnError):
    pass


def _imports(mode: str) -> None:
    if mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if mode != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CPU run must not find a GPU half-way


def _algo(request: dict, reply: dict) -> Iterator[dict]:
    from . import build, signature

    started = time.perf_counter()
    try:
        kernel = build.build(request["definition"], request["solution"])
    except build.BuildFailed as e:
        raise _BuildFailed(str(e), code=errors.MISSING if e.missing else errors.FAILED) from None
    reply["build_s"] = time.perf_counter() - started
    if request["command"] == "prove":
        reply["proof"] = signature.match(kernel.entry_point, request["definition"], request["solution"])
    reference = build.reference(request["definition"])
    for workload in request["workloads"]:
        yield {"workload": workload.to_json()} | _guarded(_measured, request, workload, kernel, reference)


def _guarded(work: Callable[..., dict], request: dict, *args: Any) -> dict[str, Any]:
    """One workload's record, whatever happens; its tensors are gone by then: never two workloads in memory."""
    import torch

    from . import timing

    try:
        with torch.no_grad():
            return work(request, *args)
    except GdnError as e:  # the workload's data, not the algo
        return {"status": "refused", "reason": str(e), "code": e.code}
    except timing.TierUnavailable as e:
        return {"status": "tier_unavailable", "reason": f"{request['timing']['tier']}: {e}"}
    except (torch.cuda.OutOfMemoryError, MemoryError) as e:
        torch.cuda.empty_cache()
        return {"status": "out_of_memory", "reason": str(e).splitlines()[0] if str(e) else "out of memory"}
    except Exception as e:
        if "can't allocate memory" in str(e):  # torch's CPU allocator raises a plain RuntimeError
            return {"status": "out_of_memory", "reason": str(e).splitlines()[0]}
        return {"status": "error", "reason": _one_line(e), "trace": _trace(e)}


def _measured(request: dict, workload: Workload, kernel: Any, reference: Any) -> dict[str, Any]:
    """Check and, where it is right and a time is asked for, time it and check again.

    The second check is on new values in the same buffers, so that a kernel that remembers what it returned, or that
    is right only once, loses its time. It needs no second oracle: negating the inputs in which the op is linear
    negates every output.
    """
    from . import check, dataset, environment, timing
    from .timing import floor

    op, wanted = request["op"], request["timing"]
    root = Path(request["dataset"]) if request.get("dataset") else None
    inputs = dataset.load_inputs(op, workload, "cuda" if request["mode"] == "cuda" else "cpu", root)
    expected = check.oracle(reference, inputs)
    if not check.finite(expected):
        raise MissingError(f"workload {workload.uuid}: the reference gives NaN or Inf on it, so its inputs are no use")
    verdict = check.check(kernel, op, workload.axes, inputs, expected)
    record: dict[str, Any] = {"status": "passed" if verdict.passed else "wrong", "reason": verdict.reason}
    record["check"] = verdict.to_json()
    if callable(backend := getattr(kernel.module, "backend", None)):
        record["backend"] = str(backend(*inputs))
    if request["command"] != "bench" or not verdict.passed:
        return record
    outputs = check.allocate(op, workload.axes, str(inputs[0].device))
    record["bytes_moved"] = floor.bytes_moved(op, workload.axes)
    timed = timing.measure(
        wanted["tier"], lambda: kernel(inputs, outputs), timing.Plan(**wanted["plan"]), strict=wanted["strict"]
    )
    if request["mode"] == "cuda":
        record["clocks"] = environment.clocks()
    for name, x in zip(op.inputs, inputs, strict=True):
        if name in op.linear_in:
            x.neg_()
    again = check.check(kernel, op, workload.axes, inputs, [-x for x in expected])
    if not again.passed:
        reason = f"right at first, wrong on new values in the same buffers after it was timed: {again.reason}"
        return record | {"status": "wrong", "reason": reason, "check": again.to_json()}
    return record | {"timing": timed.to_json()}


def _floors(request: dict, reply: dict) -> Iterator[dict]:
    from .timing.floor import bytes_moved

    seen: dict[int, dict] = {}
    for workload in request["workloads"]:
        moved = bytes_moved(request["op"], workload.axes)
        if moved not in seen:  # the floor depends on nothing else
            seen[moved] = _guarded(_floor, request, moved)
        yield {"workload": workload.to_json(), "bytes_moved": moved} | seen[moved]


def _floor(request: dict, moved: int) -> dict[str, Any]:
    from .timing import Plan
    from .timing.floor import copy_floor

    wanted = request["timing"]
    timed, how = copy_floor(moved, request["mode"], wanted["tier"], Plan(**wanted["plan"]), strict=wanted["strict"])
    return {"status": "passed", "reason": None, "timing": timed.to_json(), "how": how}


# --- plumbing ---------------------------------------------------------------------------------------------------


def op_to_json(op: Op) -> dict[str, Any]:
    return dataclasses.asdict(op)


def op_from_json(d: dict[str, Any]) -> Op:
    def specs(table: dict) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(None if s["shape"] is None else tuple(s["shape"]), s["dtype"]) for name, s in table.items()
        }

    fields = d | {key: specs(d[key]) for key in ("inputs", "outputs")}
    return Op(**(fields | {key: tuple(d[key]) for key in ("constraints", "tags", "linear_in")}))


def _emitter(events: Path | None) -> Callable[[dict], None]:
    if events is None:
        return lambda record: None

    def emit(record: dict) -> None:
        with events.open("a") as f:
            f.write(json.dumps(record) + "\n")

    return emit


def _one_line(e: BaseException) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0][:300]}" if lines else type(e).__name__


def _trace(e: BaseException) -> list[str]:
    import traceback

    return "".join(traceback.format_exception(e)).splitlines()[-12:]


def _die_with_parent() -> None:
    """Have Linux end this process when the command that started it dies in a way that lets it clean up nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


if __name__ == "__main__":  # started by jobs.py
    _die_with_parent()
    end(main(Path(sys.argv[sys.argv.index("--events") + 1]) if "--events" in sys.argv else None))
