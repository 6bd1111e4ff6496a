"""The target processes of a profiler, started as `gdn profile` starts them; and scripts
in place of tools.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gdn_cli.catalog import pack, workloads
from gdn_cli.catalog.registry import Registry
from gdn_cli.run import jobs
from gdn_cli.worker import profilers
from gdn_cli.worker.profilers import Ask, Reply, Run
from gdn_cli.worker.request import Profiling


def script(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def replies(
    tool: str,
    known: Registry,
    name: str,
    folder: Path,
    mode: str = "cpu",
    timeout_s: float = 300,
    **asked,
) -> tuple[Ask, list[Reply]]:
    """The answers of a tool's target processes for a decode of batch size 1."""
    op = known.ops["gdn_decode"]
    algo = known.find(name, op.name)
    contract, solution = pack.definition(op, known), pack.pack(algo, op)
    workload = workloads.twin(op, {"batch_size": 1})
    ask = Ask(solution, **asked)

    def reply(run: Run) -> Reply:
        job = jobs.Job.of(
            "profile", op, contract, mode, [workload], [(algo, solution)],
            profile=Profiling(tool, run.params, ask.l2), wrap=run.wrap, env=run.env, timeout_s=timeout_s,
        )  # fmt: skip
        outcome = jobs.execute(job)
        record = next(iter(outcome.records), None)
        assert record is None or record.passed, record
        answer, tail = record and record.answer, tuple(outcome.tail)
        return Reply(run, outcome.status.value, outcome.reason, answer, tail)

    with ThreadPoolExecutor(4 if tool == "sanitizer" else 1) as pool:
        return ask, list(pool.map(reply, profilers.module(tool).runs(ask, folder)))
