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
from typing import Any

from .errors import GdnError
from .registry import Op, TensorSpec
from .workloads import Workload

SCHEMA = 1


def main(events: Path | None = None) -> None:
    """Serve the request on stdin; the reply goes to stdout, and nothing else does.

    Whatever runs here may print: file descriptor 1 points at stderr for the rest of the process, because CUDA's printf
    and C's buffered stdout know nothing of Python's sys.stdout and may flush as late as at exit.
    """
    sys.stdout.flush()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = serve(json.loads(sys.stdin.read()), _emitter(events))
    except GdnError as e:
        answer = {"status": "refused", "reason": str(e), "code": e.code}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        answer = {"status": "refused", "reason": f"not a request of schema {SCHEMA}: {_one_line(e)}", "code": 2}
    with reply:
        json.dump({"schema": SCHEMA} | answer, reply)
        reply.write("\n")


def serve(request: dict[str, Any], emit: Callable[[dict], None]) -> dict[str, Any]:
    """Do what the request asks for; `emit` gets each record as it is made."""
    if request.get("schema") != SCHEMA:
        return {"status": "refused", "reason": f"schema {request.get('schema')!r}, this gdn speaks {SCHEMA}", "code": 2}
    mode = request["mode"]
    _imports(mode)
    from . import environment

    op = op_from_json(request["op"])
    workloads = [Workload.from_json(w) for w in request["workloads"]]
    reply: dict[str, Any] = {"status": "done", "records": []}
    try:
        reply["environment"] = environment.describe(mode)
        emit({"environment": reply["environment"]})  # first: records never lack their origin
        work = _floors if request["command"] == "floor" else _algo
        for record in work(request, op, workloads, mode, reply):
            emit(record)
            reply["records"].append(record)
    except _BuildFailed as e:
        reply |= {"status": "build_failed", "reason": str(e)}
    return reply


class _BuildFailed(Exception):
    pass


def _imports(mode: str) -> None:
    if mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if mode != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CPU run must not find a GPU half-way


def _algo(request: dict, op: Op, workloads: list[Workload], mode: str, reply: dict) -> Iterator[dict]:
    from . import build, dataset, signature

    started = time.perf_counter()
    try:
        kernel = build.build(request["definition"], request["solution"])
    except build.BuildFailed as e:
        raise _BuildFailed(str(e)) from None
    reply["build_s"] = time.perf_counter() - started
    if request["command"] == "prove":
        reply["proof"] = signature.match(kernel.entry_point, request["definition"], request["solution"])
    reference = build.reference(request["definition"])
    device = "cuda" if mode == "cuda" else "cpu"
    root = Path(request["dataset"]) if request.get("dataset") else None
    for workload in workloads:
        inputs = dataset.load_inputs(op, workload, device, root)
        yield {"workload": workload.to_json()} | _one(request, op, workload, kernel, reference, inputs)
        del inputs  # before the next one is drawn: never two workloads in memory


def _one(request: dict, op: Op, workload: Workload, kernel: Any, reference: Any, inputs: list) -> dict[str, Any]:
    """Check one workload and, where it is right and a time is asked for, time it."""
    import torch

    from . import check, environment, timing
    from .timing import floor

    try:
        with torch.no_grad():
            expected = check.oracle(reference, inputs)
            verdict = check.check(kernel, op, workload.axes, inputs, expected)
            record: dict[str, Any] = {"status": "passed" if verdict.passed else "wrong", "reason": verdict.reason}
            record["check"] = verdict.to_json()
            if backend := getattr(kernel.module, "backend", None):
                record["backend"] = backend(*inputs)
            if request["command"] == "bench" and verdict.passed:
                del expected
                plan = timing.Plan(**request["timing"]["plan"])
                outputs = check.allocate(op, workload.axes, str(inputs[0].device))
                record["bytes_moved"] = floor.bytes_moved(op, workload.axes)
                record["timing"] = timing.measure(
                    request["timing"]["tier"], lambda: kernel(inputs, outputs), plan, strict=request["timing"]["strict"]
                ).to_json()
                if request["mode"] == "cuda":
                    record["clocks"] = environment.clocks()
            return record
    except timing.TierUnavailable as e:
        return {"status": "tier_unavailable", "reason": f"{request['timing']['tier']}: {e}"}
    except (torch.cuda.OutOfMemoryError, MemoryError) as e:
        torch.cuda.empty_cache()
        return {"status": "out_of_memory", "reason": str(e).splitlines()[0] if str(e) else "out of memory"}
    except Exception as e:
        if "can't allocate memory" in str(e):  # torch's CPU allocator raises a plain RuntimeError
            return {"status": "out_of_memory", "reason": str(e).splitlines()[0]}
        return {"status": "error", "reason": _one_line(e), "trace": _trace(e)}


def _floors(request: dict, op: Op, workloads: list[Workload], mode: str, reply: dict) -> Iterator[dict]:
    from .timing import Plan
    from .timing.floor import bytes_moved, copy_floor

    plan = Plan(**request["timing"]["plan"])
    seen: dict[int, dict] = {}
    for workload in workloads:
        moved = bytes_moved(op, workload.axes)
        if moved not in seen:  # the floor depends on nothing else
            timing, how = copy_floor(moved, mode, request["timing"]["tier"], plan)
            seen[moved] = {"timing": timing.to_json(), "how": how}
        yield {"workload": workload.to_json(), "status": "passed", "reason": None, "bytes_moved": moved} | seen[moved]


# --- plumbing ---------------------------------------------------------------------------------------------------


def op_to_json(op: Op) -> dict[str, Any]:
    return dataclasses.asdict(op)


def op_from_json(d: dict[str, Any]) -> Op:
    def specs(table: dict) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(None if s["shape"] is None else tuple(s["shape"]), s["dtype"]) for name, s in table.items()
        }

    fields = d | {key: specs(d[key]) for key in ("inputs", "outputs")}
    return Op(**(fields | {key: tuple(d[key]) for key in ("constraints", "tags")}))


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


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--events") + 1]) if "--events" in sys.argv else None)
