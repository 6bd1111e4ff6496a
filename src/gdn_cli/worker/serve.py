"""Request (JSON) -> reply (JSON): the process that judges kernels. It does not run
them: a runner does (executor/).

    gdn worker < request.json > reply.json [--events FILE]

A request holds one algo with all that it needs: the packed solution, the definition,
the op, the workloads, and what to do (`check`, `bench`, `prove`, `profile`, `floor`, or
`compare`, which has several algos). The reply holds a record for each workload and
tier. With `--events`, the environment and then each record are appended to FILE, one
JSON line each, as soon as they are known, so that a later crash loses nothing. If this
process crashes, whoever started it (run/worker_process.py, Modal, a cluster's queue)
reports that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import structs

from ..errors import USAGE, GdnError
from ..machine import linux
from ..parsing import decode, json_of
from ..schema.record_types import SCHEMA, Record, Status
from .executor import process
from .messages import Event, Reply
from .request import Request, Serving


def main(
    events: Path | None = None,
    mode: str | None = None,
    runner: str | None = None,
    go: int | None = None,
) -> int:
    """Serve the request on stdin and write the reply, and nothing else, to stdout.
    Returns the exit code.

    mode    the request's, if torch is to be imported before the request is read
    runner  the same, if a runner is to be forked before
    go      a pipe: the request is there once its other end is closed

    Code that runs here may print. File descriptor 1 points at stderr for the rest of
    the process, because CUDA's printf and C's buffered stdout bypass Python's
    sys.stdout and may flush as late as at exit.
    """
    sys.stdout.flush()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = None
    if early := mode or runner:
        _imports(early)
        import torch  # noqa: F401
    if runner:
        started = process.fork(runner)
    if go is not None:
        os.read(go, 1)
        os.close(go)
    request = _request(sys.stdin.read())
    # root could read it again, seal and all, in /proc
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer = (
        serve(request, _emitter(events, request.seal), started)
        if isinstance(request, Request)
        else request
    )
    answer.schema = SCHEMA
    answer.seal = request.seal or None
    with reply:
        reply.write(_json(answer) + "\n")
    return answer.code or 0


def end(code: int) -> NoReturn:
    """Exit at once: threads that an algo left running must not keep alive a worker that
    has replied.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _request(text: str) -> Request | Reply:
    """The request, or the reply that refuses it."""
    seal = ""
    try:
        fields = decode(json_of(text, "stdin"), dict[str, Any], "stdin")
        # without it the sender would not accept the refusal
        seal = str(fields.get("seal", ""))
        schema = fields.get("schema")
        if schema == SCHEMA:
            return decode(fields, Request, "stdin")
        reason = f"schema {schema!r:.80}, this gdn speaks {SCHEMA}"
    except GdnError as e:
        reason = f"not a request of schema {SCHEMA}: {e}"
    return Reply(status=Status.REFUSED, reason=reason, code=USAGE, seal=seal)


def serve(
    request: Request,
    emit: Callable[[Event | Record], None],
    started: process.Started | None = None,
) -> Reply:
    """Do what a request asks for; `emit` gets each record as it is made. `started` is a
    runner that already runs.
    """
    _imports(request.mode)
    reply = Reply(status=Status.DONE)
    # the worker's own FIB_CACHE_PATH is changed below
    serving = Serving(
        **structs.asdict(request),
        builds=os.environ.get("FIB_CACHE_PATH"),
        started=started,
    )
    try:
        if request.judges:
            linux.hide_memory()
            if not serving.started:
                # first, so that it imports torch while this process does
                serving.started = process.runner(serving)
            # the reference is built in a folder that no algo's code has written to
            os.environ["FIB_CACHE_PATH"] = tempfile.mkdtemp(prefix="gdn-reference-")
        from ..machine import environment
        from .executor import build, client
        from .judge import faults, tasks

        reply.environment = environment.describe(request.mode)
        # first: records always have their origin
        emit(Event(environment=reply.environment))
        others = {
            "floor": tasks.floors,
            "compare": tasks.compare,
            "profile": tasks.profile,
            "official": tasks.official,
        }
        work = others.get(request.command, tasks.algo)
        serving.at = lambda name: emit(Event(at=name))
        try:
            for record in work(serving, reply):
                emit(record)
                reply.records.append(record)
        except client.DiedError as e:
            reply.status = e.status
            lines = faults.collect() if faults.watched(request) else []
            reply.reason = "\n".join([e.reason, *lines])
            reply.exit_code = e.exit_code
        except build.BuildFailedError as e:
            reply.status = Status.BUILD_FAILED
            reply.reason = str(e)
            reply.code = e.code
    except GdnError as e:  # earlier measurements stay in the reply
        reply.status = Status.REFUSED
        reply.reason = str(e)
        reply.code = e.code
    return reply


def _imports(mode: str) -> None:
    if mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if mode != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CPU run must not see a GPU


# --- plumbing


def _json(what: Event | Record | Reply) -> str:
    # not msgspec's own: an algo's text may not be valid UTF-8
    return json.dumps(msgspec.to_builtins(what))


def _emitter(events: Path | None, seal: str) -> Callable[[Event | Record], None]:
    if events is None:
        return lambda event: None

    # once: the runner may learn a pipe's path, but must not be able to open it
    file = events.open("a")

    def emit(event: Event | Record) -> None:
        file.write(f"{seal}{_json(event)}\n")
        file.flush()

    return emit


if __name__ == "__main__":  # started by run/worker_process.py
    linux.end_with_parent()
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    end(
        main(
            Path(given["--events"]),
            given["--mode"],
            given.get("--runner"),
            int(given["--go"]),
        )
    )
