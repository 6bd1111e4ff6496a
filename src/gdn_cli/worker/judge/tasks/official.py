"""`official`: the contest's own harness judges one solution, workload after workload.
Its verdicts and times are taken as they are; nothing here times or checks anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from .... import bounded
from ....catalog import official as harnesses
from ....catalog import trace_set
from ....catalog.workloads import Workload
from ....errors import FAILED
from ....parsing import Json
from ....schema.record_types import Record, Status, Timing
from ... import trace_set_writer
from ...executor import client
from ...messages import Reply
from ...request import Serving
from ...timing import floor
from .. import contest_harness
from .common import begun

_STATUS = {
    "PASSED": Status.PASSED,
    "INCORRECT_SHAPE": Status.WRONG,
    "INCORRECT_DTYPE": Status.WRONG,
    "INCORRECT_NUMERICAL": Status.WRONG,
    "RUNTIME_ERROR": Status.ERROR,
    "COMPILE_ERROR": Status.BUILD_FAILED,
    "TIMEOUT": Status.TIMED_OUT,
}
_LOG = 4000  # characters of a trace's log that are kept


def official(request: Serving, reply: Reply) -> Iterator[Record]:
    """A record for each workload, with the harness's own evaluation in it."""
    root = Path(tempfile.mkdtemp(prefix="gdn-official-"))
    _write(request, root)
    with _started(request, root) as process:
        for workload in request.workloads:
            yield _judged(request, workload, root, process)
        process.stdin.close()
        process.wait()


def _write(request: Serving, root: Path) -> None:
    """A FlashInfer-Trace folder with one solution. Twins' tensors are not in it: each
    is written for its own turn.
    """
    op, definition, solution = request.op, request.definition, request.solution
    if request.dataset:
        definition = trace_set.definition(op, Path(request.dataset))
        (root / "blob").symlink_to(Path(request.dataset) / "blob")
    files = {
        f"definitions/{op.op_type}/{op.definition}.json": json.dumps(definition),
        f"solutions/{solution['author']}/{op.op_type}/{op.definition}/{solution['name']}.json": (
            json.dumps(solution)
        ),
        f"workloads/{op.op_type}/{op.definition}.jsonl": "".join(
            json.dumps(_row(request, w)) + "\n" for w in request.workloads
        ),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _row(request: Serving, workload: Workload) -> Json:
    if workload.origin == "twin":
        return trace_set_writer.row(request.op, workload)
    about = {"uuid": workload.uuid, "axes": workload.axes, "inputs": workload.inputs}
    return {
        "definition": request.op.definition,
        "workload": about,
        "solution": None,
        "evaluation": None,
    }


def _started(request: Serving, root: Path) -> subprocess.Popen:
    """The harness's process. It compiles anew, in a folder of its own: another
    version's builds are not its.
    """
    harness, plan = request.official, request.timing.plan
    config = {"use_isolated_runner": harness.isolated, "timeout_seconds": _LIMIT_S}
    config |= {
        "warmup_runs": plan["warmup"],
        "iterations": plan["iterations"],
        "num_trials": plan["trials"],
    }
    env = os.environ | {"FIB_CACHE_PATH": str(root / "cache")}
    if harness.folder:
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [harness.folder, env.get("PYTHONPATH")])
        )
    command = [sys.executable, contest_harness.__file__, str(root), json.dumps(config)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    )


_LIMIT_S = 300  # for a solution on a workload: the contest's


def _judged(
    request: Serving, workload: Workload, root: Path, process: subprocess.Popen
) -> Record:
    blob = root / trace_set_writer.blob(request.op, workload)
    if workload.origin == "twin":
        blob.parent.mkdir(parents=True, exist_ok=True)
        trace_set_writer.write_blob(request.op, workload, blob, root)
        torch.cuda.empty_cache()
    try:
        process.stdin.write(workload.uuid + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        if workload.origin == "twin":
            blob.unlink(missing_ok=True)
    if not line:
        raise client.DiedError(
            Status.EXITED,
            f"{request.official.words} ended before it was done",
            process.wait(),
        )
    return _record(request, workload, json.loads(line))


def _record(request: Serving, workload: Workload, answer: Json) -> Record:
    """What the harness says of one workload. One without a trace is dropped from its
    score without a word: here it is a record, and not the algo's fault.
    """
    words = request.official.words
    record = replace(begun(request, workload, request.name), tier=harnesses.TIER)
    if answer["trace"] is None:
        why = (
            bounded.clip(answer["said"][-1])
            if answer["said"]
            else "it does not say why"
        )
        return replace(
            record, status=Status.REFUSED, reason=f"{words} left no trace: {why}"
        )
    found = answer["trace"]["evaluation"]
    found["log"] = (found.get("log") or "")[-_LOG:]
    record = replace(
        record, official=found, status=_STATUS.get(found["status"], Status.ERROR)
    )
    if record.status is not Status.PASSED:
        log = found["log"].strip().splitlines()
        reason = f"{words}: {found['status']}" + (f", {log[-1][:300]}" if log else "")
        return replace(record, reason=reason, code=FAILED)
    us = found["performance"]["latency_ms"] * 1e3
    timing = Timing(
        tier=harnesses.TIER,
        median_us=us,
        low_us=us,
        high_us=us,
        samples=1,
        how=f"{words}: {request.official.how}",
    )
    return replace(
        record, timing=timing, bytes_moved=floor.bytes_moved(request.op, workload.axes)
    )
