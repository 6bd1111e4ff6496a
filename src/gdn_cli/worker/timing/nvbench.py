"""Tier `nvbench`: NVIDIA's nvbench (package cuda-bench), its cold ("isolated") measurement.

Before each call nvbench overwrites L2, waits for that, and blocks the stream with its
own kernel until the host has queued the call between two CUDA events. A sample has no
launch latency, but includes the cost of the events.

nvbench runs once per process and accepts no further benchmark after that. A worker
times many subjects, so the run stays open: one benchmark, in its own thread, whose body
times whatever it is given and does not return (`_Session`). nvbench writes each call's
time to a file after every measurement (`--jsonbin`).
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar

import torch

from ... import errors, paths
from .subject import Call, Subject
from .tier import About, Sample, TierUnavailableError, Warmed

T = TypeVar("T")

_GET = "pip install " + ("-e '.[timing]'" if paths.IN_CHECKOUT else "'gdn[timing]'")
# nvbench's own limit on a measurement, which would cut a slow reference short
_NEVER_S = 86_400.0
# nvbench releases a stream that is held for longer, and reports a deadlock
_HELD_S = 10.0
# how long the stream is held to see whether a call comes back meanwhile
_PROBES_S = (0.01, 0.1)
# a call that keeps the host for longer could fill the launch queue of a held stream
_HOST_S = 0.2
# of a GPU; with a slower clock the stream is just held for longer
_CYCLES_PER_S = 2_000_000_000
_FILE = "samples.json"  # the samples are next to it, in samples.json-bin/


class Sampler(Warmed):
    """Times calls of one subject in batches: a batch is one measurement of nvbench."""

    waits = True  # assumed for a slow call, which is not probed

    def _open(self) -> None:
        self.session = _session()

    def _do(self, job: Callable[..., T], *more: Any) -> T:
        [subject] = self.subjects
        return self.session.do(partial(job, subject, *more))

    def _round(self) -> None:
        self._do(_call)

    def _prepare(self) -> None:
        if self.plan.warmup == 0:
            self._round()  # the compiler would keep the host, and look like a wait
        self.waits = self._do(_waits)

    def take(self, order: Sequence[int]) -> list[Sample]:
        began = perf_counter()
        try:
            seconds = self._do(_cold, len(order), self.waits)
        except RuntimeError as e:
            if self.waits or self.busy_s or "Deadlock detected" not in str(e):
                raise
            self.waits = True  # it did not while it was probed
            seconds = self._do(_cold, len(order), self.waits)
        self.busy_s += perf_counter() - began
        return [Sample(s * 1e6) for s in seconds]

    def about(self, i: int, samples: list[Sample]) -> About:
        how = f"cuda-bench {self.session.bench.__version__}: CUDA events on a stream "
        if self.slow:
            return how + "that runs freely, host time included", None
        if self.waits:
            note = "the call waits for the GPU, so host time is in it"
            return how + "that runs freely", note
        return how + "that is held until the call is queued", None

    def close(self) -> None:
        self.subjects = []


# --- in nvbench's thread


def _call(subject: Subject, state: Any, folder: Path) -> None:
    subject.call()
    torch.cuda.synchronize()


def _waits(subject: Subject, state: Any, folder: Path) -> bool:
    """Whether a call waits for the GPU: on a held stream it would never return."""
    began = perf_counter()
    subject.call()
    host_s = perf_counter() - began
    torch.cuda.synchronize()
    # twice, as the host may have been late for another reason
    return host_s > _HOST_S or all(
        _comes_late(subject.call, max(s, 10 * host_s)) for s in _PROBES_S
    )


def _comes_late(call: Call, hold_s: float) -> bool:
    """Whether a call on a held stream returns only after the stream is released."""
    torch.cuda._sleep(int(hold_s * _CYCLES_PER_S))
    held = torch.cuda.Event()
    held.record()
    call()
    late = held.query()
    torch.cuda.synchronize()
    return late


def _cold(
    subject: Subject, count: int, waits: bool, state: Any, folder: Path
) -> list[float]:
    """Seconds of `count` calls."""

    def plain(launch: Any) -> None:
        subject.call()

    if subject.refresh:
        subject.refresh()  # nothing can be done between the calls of a measurement
    state.set_min_samples(count)
    state.set_timeout(_NEVER_S)
    state.set_blocking_kernel_timeout(_HELD_S)
    # by default it discards samples at a low clock, all of them on a GPU that stays
    # slow; gdn reads and reports the clocks
    state.set_throttle_threshold(0.0)
    # an earlier measurement with sync=True has left it disabled
    state.set_disable_blocking_kernel(False)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        state.exec(plain, batched=False, sync=waits)
        return _read(folder, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path, count: int) -> list[float]:
    files = list((folder / f"{_FILE}-bin").glob("*.bin"))
    samples = array("f")  # 32 bits, little-endian as every machine with a GPU
    if len(files) == 1:
        samples.frombytes(files[0].read_bytes())
    if len(samples) < count:
        raise TierUnavailableError(
            f"cuda-bench left {len(samples)} of {count} samples in {len(files)} files"
        )
    return samples.tolist()[:count]


class _Session:
    """nvbench's one run in this process, open until the process ends."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.device = torch.cuda.current_device()
        # nvbench opens a file for its report, and creates the folder for the samples
        # again: none of it must stay
        self.folder = Path(tempfile.mkdtemp(prefix="gdn-nvbench-"))
        self.jobs: SimpleQueue[tuple[Callable[[Any, Path], Any], Future] | None] = (
            SimpleQueue()
        )
        self.opened: Future[None] = Future()
        self.thread = Thread(target=self._run, name="nvbench", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def do(self, job: Callable[[Any, Path], T]) -> T:
        """Run `job(state, folder)` in nvbench's thread, on its stream; returns or
        raises what it does.
        """
        try:
            self.opened.result()
        except Exception as e:
            raise TierUnavailableError(
                f"nvbench does not start: {errors.one_line(e)}"
            ) from None
        answer: Future[T] = Future()
        self.jobs.put((job, answer))
        return answer.result()

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join(timeout=10)

    def _run(self) -> None:
        def gdn(state: Any) -> None:
            try:
                self._serve(state)
            # nvbench would swallow it as a skipped benchmark
            except BaseException as e:
                self._fail(e)

        try:
            benchmark = self.bench.register(gdn)
            # ends after one sample, so that each measurement's minimum is its exact count
            benchmark.set_stopping_criterion("sample-count")
            benchmark.set_criterion_param_int64("target-samples", 1)
            report = str(self.folder / _FILE)
            self.bench.run_all_benchmarks(
                ["--quiet", "--devices", str(self.device), "--jsonbin", report]
            )
            self._fail(RuntimeError("it ran no benchmark"))
        except BaseException as e:
            self._fail(e)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _fail(self, e: BaseException) -> None:
        if not self.opened.done():
            self.opened.set_exception(e)

    def _serve(self, state: Any) -> None:
        """The benchmark's body. Device, stream and no_grad are set per thread."""
        torch.cuda.set_device(self.device)
        stream = torch.cuda.ExternalStream(
            state.get_stream().addressof(), device=self.device
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        with torch.no_grad(), torch.cuda.stream(stream):
            self.opened.set_result(None)
            while (pair := self.jobs.get()) is not None:
                job, answer = pair
                try:
                    answer.set_result(job(state, self.folder))
                except BaseException as e:
                    answer.set_exception(e)
                # so that a subject's buffers are freed with its caller's reference
                del pair, job, answer


@cache
def _session() -> _Session:
    return _Session(_package())


def _package() -> Any:
    try:
        bench = importlib.import_module("cuda.bench")
        bench.run_all_benchmarks  # noqa: B018 - loads the extension for this CUDA
    except (ImportError, AttributeError) as e:
        raise TierUnavailableError(
            f"cuda-bench does not load: {errors.one_line(e)}: {_GET}"
        ) from None
    return bench
