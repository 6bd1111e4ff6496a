"""Request (JSON) -> reply (JSON): the process that judges kernels. It runs none: a runner does (isolation/).

    gdn worker < request.json > reply.json [--events FILE]

A request holds one algo with all that it needs: the packed solution, the definition, the op, the workloads, and what to
do (`check`, `bench`, `prove`, `profile`, `floor`, or `compare`, which has several algos). The reply holds a record for
each workload and tier. With `--events`, the environment and then each record are appended to FILE, one JSON line each,
as soon as they are there: a later crash loses nothing.
The process may die of what it runs; whoever started it (jobs.py, Modal, a cluster's queue) reports that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from .errors import GdnError, one_line
from .isolation import process
from .registry import Op, TensorSpec
from .stress import Family
from .workloads import Workload

SCHEMA = 2


def main(events: Path | None = None) -> int:
    """Serve the request on stdin; the reply goes to stdout, and nothing else does. Returns the exit code.

    Whatever runs here may print: file descriptor 1 points at stderr for the rest of the process, because CUDA's printf
    and C's buffered stdout know nothing of Python's sys.stdout and may flush as late as at exit.
    """
    sys.stdout.flush()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = _parse(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # root could read it again, seal and all, in /proc
    seal = answer.pop("seal", "")
    if answer.get("status") != "refused":
        answer = serve(answer, _emitter(events, seal))
    with reply:
        json.dump({"schema": SCHEMA} | ({"seal": seal} if seal else {}) | answer, reply)
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
        return {"status": "refused", "reason": f"not a request of schema {SCHEMA}: {one_line(e)}", "code": 2}


def serve(request: dict[str, Any], emit: Callable[[dict], None]) -> dict[str, Any]:
    """Do what a parsed request asks for; `emit` gets each record as it is made."""
    _imports(request["mode"])
    reply: dict[str, Any] = {"status": "done", "records": []}
    try:
        if _judges(request):
            _prctl(_PR_SET_DUMPABLE, 0)
            request["started"] = process.of(request)  # first, so that it imports torch while this process does
            # the reference is built where no algo's code has ever written
            os.environ["FIB_CACHE_PATH"] = tempfile.mkdtemp(prefix="gdn-reference-")
        from . import environment, tasks
        from .isolation import client

        reply["environment"] = environment.describe(request["mode"])
        emit({"environment": reply["environment"]})  # first: records never lack their origin
        others = {"floor": tasks.floors, "compare": tasks.compare, "profile": tasks.profile}
        work = others.get(request["command"], tasks.algo)
        request["at"] = lambda name: emit({"at": name})
        try:
            for record in work(request, reply):
                emit(record)
                reply["records"].append(record)
        except client.Died as e:
            reply |= {"status": e.status, "reason": e.reason, "exit_code": e.exit_code}
        except tasks.BuildFailed as e:
            reply |= {"status": "build_failed", "reason": str(e), "code": e.code}
    except GdnError as e:  # what was measured before stays in the reply
        reply |= {"status": "refused", "reason": str(e), "code": e.code}
    return reply


def _judges(request: dict[str, Any]) -> bool:
    """Whether there is an algo whose code needs a process of its own. Not for a profiler's target: the tool looks at
    this one, and nothing here gives a verdict then."""
    command = request["command"]
    return command != "floor" and (command != "profile" or request["profile"]["task"] == "survey")


def _imports(mode: str) -> None:
    if mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if mode != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CPU run must not find a GPU half-way


# --- plumbing ---------------------------------------------------------------------------------------------------


def op_to_json(op: Op) -> dict[str, Any]:
    return msgspec.to_builtins(op)


def op_from_json(d: dict[str, Any]) -> Op:
    def specs(table: dict) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(None if s["shape"] is None else tuple(s["shape"]), s["dtype"]) for name, s in table.items()
        }

    fields = d | {key: specs(d[key]) for key in ("inputs", "outputs")}
    fields["stress"] = msgspec.convert(d.get("stress", {}), dict[str, Family])
    return Op(**(fields | {key: tuple(d[key]) for key in ("constraints", "tags", "linear_in")}))


def _emitter(events: Path | None, seal: str) -> Callable[[dict], None]:
    if events is None:
        return lambda record: None

    file = events.open("a")  # once: the runner can learn the name of a pipe's descriptor, and has no right to it

    def emit(record: dict) -> None:
        file.write(f"{seal}{json.dumps(record)}\n")
        file.flush()

    return emit


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def _prctl(option: int, value: int) -> None:
    """Ask Linux for something about this process; elsewhere it is left out.

    PR_SET_PDEATHSIG ends it when its keeper dies in a way that lets it clean up nothing. PR_SET_DUMPABLE, 0, keeps this
    user's other processes, such as the runner, out of its memory and its descriptors (root's get in all the same).
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":  # started by jobs.py
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end(main(Path(sys.argv[sys.argv.index("--events") + 1]) if "--events" in sys.argv else None))
