"""The contest's harness in a process of its own, with the flashinfer-bench that is on
its path; nothing of gdn.

    python contest_harness.py FOLDER CONFIG

FOLDER is a FlashInfer-Trace set, CONFIG the JSON of a BenchmarkConfig.

Each line on stdin is a workload's uuid, and each line on stdout what has come of it:
its trace, or null if the harness left none, and the errors that it logged. Its own
workers are spawned, and import this file again.
"""

import json
import logging
import os
import sys


def main(folder: str, config: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it prints is no answer

    from flashinfer_bench.bench import Benchmark, BenchmarkConfig
    from flashinfer_bench.data import TraceSet

    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger().addHandler(Keep(logging.ERROR))
    data = TraceSet.from_path(folder)
    rows = {row.workload.uuid: row for many in data.workloads.values() for row in many}
    benchmark = Benchmark(data, BenchmarkConfig(**json.loads(config)))
    try:
        for line in sys.stdin:
            row = rows[line.strip()]
            # one at a time: its tensors are there only now
            data.workloads = {row.definition: [row]}
            said.clear()
            results = benchmark.run_all(dump_traces=False)
            traces = [
                trace.model_dump(mode="json")
                for many in results.traces.values()
                for trace in many
            ]
            print(
                json.dumps({"trace": traces[0] if traces else None, "said": said}),
                file=out,
                flush=True,
            )
    finally:
        benchmark.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
