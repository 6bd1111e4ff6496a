"""`official`: the contest's own harness judges one solution, workload after workload.
Its verdicts and times are taken as they are; nothing here times or checks anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from .... import bounded
from ....catalog import official as harnesses
from ....catalog import trace_set
from ....catalog.official import Harness
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
    harness = request.official
    assert harness is not None
    root = Path(tempfile.mkdtemp(prefix="gdn-official-"))
    _write(request, root)
    with _started(request, harness, root) as process:
        assert process.stdin is not None and process.stdout is not None
        for workload in request.workloads:
            line = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(workload.uuid + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:
                reason = f"{harness.words} ended before it was done"
                raise client.DiedError(Status.EXITED, reason, process.wait())
            yield _record(request, harness, workload, json.loads(line))
        process.stdin.close()


def _write(request: Serving, root: Path) -> None:
    """A FlashInfer-Trace folder with one solution."""
    op = request.op
    solution = request.solution
    assert solution is not None
    definition: Mapping = request.definition
    if request.dataset:
        definition = trace_set.definition(op, Path(request.dataset))
        (root / "blob").symlink_to(Path(request.dataset) / "blob")
    kind = f"{op.op_type}/{op.definition}"
    author = solution["author"]
    name = solution["name"]
    rows = [json.dumps(_row(request, workload)) for workload in request.workloads]
    files = {
        f"definitions/{kind}.json": json.dumps(definition),
        f"solutions/{author}/{kind}/{name}.json": json.dumps(solution),
        f"workloads/{kind}.jsonl": "".join(f"{row}\n" for row in rows),
    }
    for workload in request.workloads:
        if workload.origin == "twin":
            blob = root / trace_set_writer.blob(op, workload)
            trace_set_writer.write_blob(op, workload, blob, root)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _row(request: Serving, workload: Workload) -> Json:
    row = trace_set_writer.row(request.op, workload)
    if workload.origin != "twin":
        row["workload"]["inputs"] = workload.inputs
    return row


def _started(request: Serving, harness: Harness, root: Path) -> subprocess.Popen:
    """Start the contest's harness with an empty build cache, so that it cannot pick up
    builds of another version.
    """
    plan = request.timing.plan
    config = {
        "use_isolated_runner": harness.isolated,
        "timeout_seconds": _LIMIT_S,
        "warmup_runs": plan["warmup"],
        "iterations": plan["iterations"],
        "num_trials": plan["trials"],
    }
    env = os.environ | {"FIB_CACHE_PATH": str(root / "cache")}
    folders = filter(None, [harness.folder, env.get("PYTHONPATH")])
    env["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, contest_harness.__file__, str(root), json.dumps(config)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True)


_LIMIT_S = 300  # for a solution on a workload: the contest's


def _record(
    request: Serving, harness: Harness, workload: Workload, answer: Json
) -> Record:
    """What the harness says of one workload. One without a trace is dropped from its
    score without a word: here it is a record, and not the algo's fault.
    """
    assert request.name is not None
    words = harness.words
    begin = partial(begun, request, workload, request.name, tier=harnesses.TIER)
    if answer["trace"] is None:
        *_, last = answer["said"] or ["it does not say why"]
        reason = f"{words} left no trace: {bounded.clip(last)}"
        return begin(status=Status.REFUSED, reason=reason)
    evaluation = answer["trace"]["evaluation"]
    log = (evaluation.get("log") or "")[-_LOG:]
    evaluation["log"] = log
    status = _STATUS.get(evaluation["status"], Status.ERROR)
    record = begin(official=evaluation, status=status)
    if not record.passed:
        *_, last = log.strip().splitlines() or ["no log"]
        record.reason = f"{words}: {evaluation['status']}, {last[:300]}"
        record.code = FAILED
        return record
    us = evaluation["performance"]["latency_ms"] * 1e3
    record.timing = Timing(
        tier=harnesses.TIER,
        median_us=us,
        low_us=us,
        high_us=us,
        samples=1,
        how=f"{words}: {harness.how}",
    )
    record.bytes_moved = floor.bytes_moved(request.op, workload.axes)
    return record
