"""The tiers of other people's harnesses: nvbench (cuda-bench) and flashinfer-bench's own evaluator.

Without a GPU they run against stand-ins of what they call: torch.cuda with a clock that
only calls move, and the packages with the signatures that were read in them (each
stand-in says in which version). Calls take exact times of that clock, so every number
is known beforehand.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import weakref
from array import array
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gdn_cli.catalog import pack, registry
from gdn_cli.worker import timing
from gdn_cli.worker.timing import Plan, Subject, TierUnavailableError, fib, nvbench


class Gpu:
    """A GPU of which only the clock and one stream exist; `held` is what keeps the
    stream from running.
    """

    def __init__(self):
        self.now = 0.0  # seconds, moved by what runs
        # None, "sleep" (torch's spin kernel) or "block" (nvbench's blocking kernel)
        self.held = None
        self.deadlock = False
        self.slept = []

    def wait(self):
        """Like a call that synchronises."""
        self.deadlock = self.deadlock or self.held == "block"
        self.held = None


class Event:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.at = self.gpu.now

    def query(self):
        return self.gpu.held is None

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    gpu, here = Gpu(), threading.local()

    @contextmanager
    def stream(chosen):
        here.stream = chosen
        yield
        here.stream = None

    def sleep(cycles):
        gpu.slept.append(cycles)
        gpu.held = "sleep"

    gpu.stream = lambda: getattr(here, "stream", None)
    fakes = {
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu.wait(),
        "ExternalStream": lambda stream_ptr, device=None: (
            f"stream {stream_ptr:#x} of device {device}"
        ),
        "stream": stream,
        "_sleep": sleep,
        "Event": lambda enable_timing=False: Event(gpu),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    return gpu


def subject_of(call, **more):
    return Subject(call, [], [], **more)


def nv(call, **plan):
    return timing.measure("nvbench", subject_of(call), Plan(**plan))


def evaluated(subject, **plan):
    return timing.measure("fib", subject, Plan(**plan))


# --- nvbench


class Bench(ModuleType):
    """cuda.bench as in cuda-bench 0.3.0: __init__.pyi, and the C++ headers of nvbench in its wheel.

    One run in a process, nothing registered after it, an error in a benchmark's body
    swallowed as a skipped one, the samples of each measurement in
    `<report>-bin/<n>.bin` as 32-bit floats, its own report only at the end.
    """

    __version__ = "0.3.0"

    class NVBenchRuntimeError(RuntimeError):
        pass

    def __init__(self, gpu):
        super().__init__("cuda.bench")
        self.gpu, self.benches, self.log = gpu, [], []
        self.finalized, self.argv, self.refuse = False, None, None

    def register(self, fn, /):
        if self.finalized:
            raise RuntimeError("Can not register more benchmarks")
        self.benches.append(SimpleNamespace(fn=fn, criterion="stdrel", params={}))
        made = self.benches[-1]
        return SimpleNamespace(
            set_stopping_criterion=lambda name: setattr(made, "criterion", name),
            set_criterion_param_int64=made.params.__setitem__,
        )

    def run_all_benchmarks(self, argv):
        if not isinstance(argv, list):
            raise TypeError("a list of command-line arguments")
        if not self.benches:
            raise RuntimeError("No benchmarks had been registered yet")
        if self.finalized:
            raise RuntimeError("Benchmarks were already executed")
        self.finalized, self.argv = True, argv
        if self.refuse:
            raise self.NVBenchRuntimeError(self.refuse)
        report = argv[argv.index("--jsonbin") + 1]
        with open(report, "w") as f:
            for bench in self.benches:
                try:
                    bench.fn(State(self, bench, report))
                except Exception as e:  # nvbench's runner
                    self.log.append(f"skipped: {e}")
            f.write("{}")


class State:
    """cuda.bench.State of 0.3.0; `exec` with sync=True keeps its settings afterwards,
    as state_exec.cuh does.
    """

    def __init__(self, bench, made, report):
        self.bench, self.gpu, self.made, self.report = bench, bench.gpu, made, report
        self.min_samples, self.timeout = 10, 15.0
        self.unblocked, self.throttle = False, 0.75

    def get_stream(self):
        return SimpleNamespace(addressof=lambda: 0xABC)

    def set_min_samples(self, min_samples_count):
        self.min_samples = min_samples_count

    def set_timeout(self, duration):
        self.timeout = duration

    def set_blocking_kernel_timeout(self, duration):
        pass

    def set_throttle_threshold(self, threshold_fraction):
        self.throttle = threshold_fraction

    def set_disable_blocking_kernel(self, flag):
        self.unblocked = flag

    def exec(self, fn, /, *, batched=None, sync=False):
        # a batched measurement gives one mean, with L2 warm
        assert callable(fn) and batched is False
        if sync:
            self.unblocked, self.throttle = True, 0.0
        self.bench.log.append("sync" if self.unblocked else "held")
        gpu, launch, times = self.gpu, SimpleNamespace(get_stream=self.get_stream), []

        def start():
            gpu.held, gpu.deadlock = None if self.unblocked else "block", False
            times.append(-gpu.now)

        def stop():
            times[-1] += gpu.now
            gpu.held = None
            if gpu.deadlock:
                raise RuntimeError(
                    "blocking_kernel.cu: Deadlock detected -- missing nvbench::exec_tag::sync?"
                )

        unblocked, self.unblocked = self.unblocked, True  # the warm-up is not held
        for _ in range(1 + max(self.min_samples, self.made.params["target-samples"])):
            start()
            fn(launch)
            stop()
            self.unblocked = unblocked
        assert self.made.criterion == "sample-count"
        assert self.throttle == 0 and self.timeout > 3600
        folder = Path(f"{self.report}-bin")
        folder.mkdir(parents=True, exist_ok=True)
        log = self.bench.log
        file = folder / f"{log.count('sync') + log.count('held') - 1}.bin"
        file.write_bytes(array("f", times[1:]).tobytes())


@pytest.fixture
def session(monkeypatch):
    """nvbench's session of this test alone, closed after it."""
    monkeypatch.setattr(nvbench, "_session", cache(nvbench._session.__wrapped__))
    opened = []
    start = nvbench._Session.__init__
    monkeypatch.setattr(
        nvbench._Session,
        "__init__",
        lambda self, *args: (opened.append(self), start(self, *args))[1],
    )
    yield opened
    for one in opened:
        one.close()
        assert not one.thread.is_alive() and not one.folder.exists()


@pytest.fixture
def bench(gpu, session, monkeypatch):
    fake = Bench(gpu)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bench", fake)
    return fake


def taking(gpu, *microseconds, then=lambda: None):
    """A call that takes these times, one after the other."""
    counter = iter(range(10**9))

    def call(*args):
        gpu.now += microseconds[next(counter) % len(microseconds)] * 1e-6
        then()

    return call


def test_nvbench_gives_microseconds_of_each_call(gpu, bench):
    timed = nv(taking(gpu, 2.5), seconds=60)
    assert (timed.tier, timed.samples, timed.l2) == ("nvbench", 20, "cold")
    assert timed.stopped == "target" and timed.busy_s > 0
    assert timed.median_us == pytest.approx(2.5, rel=1e-5)
    assert timed.how.startswith("cuda-bench 0.3.0: CUDA events on a stream")
    assert timed.how.endswith("is held until the call is queued")
    assert timed.note is None and "--quiet" in bench.argv
    assert bench.argv[bench.argv.index("--devices") + 1] == "0"


def test_nvbench_takes_exact_counts(gpu, bench):
    calls = []
    timed = nv(
        taking(gpu, 1, then=lambda: calls.append(1)), warmup=5, iterations=4, trials=3
    )
    assert (timed.samples, timed.stopped) == (12, "count")
    # five to warm up, one for the host's time, one on a held stream; then 4 and
    # nvbench's own warm-up, three times
    assert len(calls) == 5 + 1 + 1 + 3 * (4 + 1)


def test_nvbench_times_many_subjects_in_one_process(gpu, bench, session):
    """It runs once, and refuses a second run: the run stays open."""
    plan = Plan(iterations=3)
    found = [
        timing.measure("nvbench", subject_of(taking(gpu, us)), plan).median_us
        for us in (2, 3, 5)
    ]
    assert found == pytest.approx([2, 3, 5], rel=1e-5)
    assert len(bench.benches) == 1 and len(session) == 1


def test_nvbench_keeps_the_order_of_the_samples(gpu, bench):
    sampler = nvbench.Sampler([subject_of(taking(gpu, *range(1, 8)))], Plan(warmup=4))
    # 4 + 2 calls to get ready and nvbench's own: the timed ones begin where the times begin again
    assert [s.us for s in sampler.take([0] * 7)] == pytest.approx(
        [1, 2, 3, 4, 5, 6, 7], rel=1e-5
    )
    sampler.close()


def test_nvbench_calls_on_its_own_stream_and_without_gradients(gpu, bench):
    seen = set()
    call = taking(
        gpu, 1, then=lambda: seen.add((gpu.stream(), torch.is_grad_enabled()))
    )
    nv(call, iterations=2)
    assert seen == {("stream 0xabc of device 0", False)}


def test_an_error_in_a_call_comes_back_from_nvbench_as_itself(gpu, bench):
    class Odd(Exception):
        pass

    odd = Odd("the 9th call")
    left = iter(range(8))

    def call():
        if next(left, None) is None:
            raise odd

    with pytest.raises(Odd) as e:
        nv(call, iterations=50)
    assert e.value is odd
    # and the next one is timed
    assert nv(taking(gpu, 4), iterations=2).median_us == pytest.approx(4)


def test_a_call_that_waits_for_the_gpu_is_not_held_by_nvbench(gpu, bench):
    timed = nv(taking(gpu, 6, then=gpu.wait), iterations=3)
    assert timed.median_us == pytest.approx(6)
    assert timed.note == "the call waits for the GPU, so host time is in it"
    assert timed.how.endswith("runs freely")
    assert len(gpu.slept) == 2 and gpu.slept[1] == 10 * gpu.slept[0]  # looked at twice
    # the next one is held again
    nv(taking(gpu, 1), iterations=3)
    assert bench.log == ["sync", "held"]


def test_a_deadlock_that_nvbench_finds_is_measured_again_without_holding(gpu, bench):
    calls = iter(range(100))

    def call():  # waits, but not in the four calls before nvbench's own
        gpu.now += 3e-6
        if next(calls) >= 5:
            gpu.wait()

    timed = nv(call, iterations=3)
    assert timed.median_us == pytest.approx(3) and bench.log == ["held", "sync"]
    assert "host time is in it" in timed.note


def test_nvbench_leaves_no_files_and_no_buffers(gpu, bench, session):
    class Buffer:
        pass

    subject = Subject(taking(gpu, 1), [Buffer()], [])
    alive = weakref.ref(subject.inputs[0])
    timing.measure("nvbench", subject, Plan(iterations=2))
    assert not session[0].folder.exists()
    del subject
    assert alive() is None


def test_nvbench_without_samples_is_said(gpu, bench, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: None)
    with pytest.raises(TierUnavailableError, match="left 0 of 3 samples in 0 files"):
        nv(taking(gpu, 1), iterations=3)


def test_nvbench_that_does_not_start_says_why_each_time(gpu, bench):
    bench.refuse = "Unsupported argument: '--devices'.\nValid values are none"
    for _ in range(2):
        with pytest.raises(
            TierUnavailableError,
            match=r"nvbench does not start: .*: Unsupported argument: '--devices'\.$",
        ):
            nv(taking(gpu, 1))


@pytest.mark.parametrize("module", [None, ModuleType("cuda.bench")])
def test_without_cuda_bench_the_tier_says_what_to_install(
    gpu, session, monkeypatch, module
):
    monkeypatch.setitem(sys.modules, "cuda.bench", module)
    with pytest.raises(TierUnavailableError, match=r"does not load: .*: pip install"):
        nv(taking(gpu, 1))
    assert not session


def test_nvbench_has_no_warm_l2(gpu, bench):
    with pytest.raises(TierUnavailableError, match="use --l2 cold"):
        nv(taking(gpu, 1), l2="warm")


# --- fib


def decode(call, destination_passing=True):
    """A stand-in for build.Kernel on gdn_decode at B = 1, with flashinfer-bench's own
    Runnable around the call.
    """
    from flashinfer_bench.compile import Runnable
    from flashinfer_bench.compile.runnable import RunnableMetadata

    found = registry.load()
    op = found.ops["gdn_decode"]
    definition = pack.definition(op, found)
    about = RunnableMetadata(
        build_type="python", definition_name=definition["name"], solution_name="a test",
        destination_passing_style=destination_passing,
    )  # fmt: skip
    axes = {"batch_size": 1}
    inputs = [
        torch.zeros(op.shape(spec, axes), dtype=getattr(torch, spec.dtype))
        if spec.shape
        else 0.1
        for spec in op.inputs.values()
    ]
    kernel = SimpleNamespace(runnable=Runnable(call, about))
    return Subject(lambda: None, inputs, [], kernel=kernel, definition=definition)


@pytest.fixture
def released(gpu, monkeypatch):
    """flashinfer-bench's timing by CUDA events, as in 0.1.2, on a GPU of which only the
    clock exists.
    """
    from flashinfer_bench.bench import timing as theirs

    if not hasattr(theirs, "do_bench"):
        pytest.skip("the installed flashinfer-bench does not time as 0.1.2 does")
    # not 256 MB
    monkeypatch.setattr(
        theirs, "_get_empty_cache_for_benchmark", lambda device: torch.zeros(1)
    )
    return gpu


@pytest.mark.parametrize("destination_passing", [True, False])
def test_fib_is_the_evaluators_own_number(released, destination_passing):
    seen = []
    times = iter([100e-6] * 2 + [4e-6, 5e-6, 9e-6] + [100e-6] * 2 + [8e-6, 8e-6, 8e-6])

    def call(*args):
        seen.append(args)
        released.now += next(times)

    subject = decode(call, destination_passing)
    timed = evaluated(subject, warmup=2, iterations=3, trials=2)
    # the mean of each trial's iterations, without its warm-up
    assert timed.histogram == ((6, 1), (8, 1))
    assert (timed.tier, timed.samples, timed.stopped) == ("fib", 2, "count")
    assert timed.median_us == pytest.approx(7)
    for args in seen:
        assert len(args) == (11 if destination_passing else 9)
        assert args[0] is not subject.inputs[0]
        assert torch.equal(args[0], subject.inputs[0])


def test_fib_says_how_the_released_version_times(released):
    timed = evaluated(decode(taking(released, 1)), warmup=0, iterations=1)
    version = importlib.metadata.version("flashinfer-bench")
    assert timed.how.startswith(f"flashinfer-bench {version}: CUDA events with a")
    assert "mean of 1; L2 flushed" in timed.how
    assert timed.l2 is None  # neither cold nor warm


def test_fib_counts_as_the_contest_does_where_nothing_is_said(released):
    calls = []
    timed = evaluated(decode(taking(released, 1, then=lambda: calls.append(1))))
    assert (
        len(calls) == 3 * (10 + 50) and timed.samples == 3 and "mean of 50" in timed.how
    )


def test_a_fault_of_the_evaluator_itself_is_not_hidden(released, monkeypatch):
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator

    def broken(**asked):
        raise OSError("no room")

    monkeypatch.setattr(DefaultEvaluator, "eval_performance", broken)
    with pytest.raises(OSError, match="no room"):
        evaluated(decode(lambda *args: None))
    monkeypatch.setattr(
        DefaultEvaluator,
        "eval_performance",
        lambda **asked: (None, SimpleNamespace(status="TIMEOUT")),
    )
    with pytest.raises(RuntimeError, match="evaluator gives no time: TIMEOUT"):
        evaluated(decode(lambda *args: None))


def test_fib_refuses_floors_and_a_warm_l2():
    with pytest.raises(
        TierUnavailableError, match="flashinfer-bench times solutions only, not floors"
    ):
        fib.measure(subject_of(lambda: None), Plan())
    with pytest.raises(TierUnavailableError, match="it times with L2 cold only"):
        evaluated(decode(lambda *args: None), l2="warm")


def test_a_flashinfer_bench_of_another_shape_is_said(released, monkeypatch):
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator

    def newer(definition, quota):
        raise AssertionError

    monkeypatch.setattr(DefaultEvaluator, "eval_performance", newer)
    with pytest.raises(TierUnavailableError, match="is not supported by this gdn: "):
        evaluated(decode(lambda *args: None))


# --- on a GPU


@pytest.fixture(scope="module")
def cuda_v4():
    """The subject of cuda-v4 at B = 1."""
    from gdn_cli.catalog.workloads import embedded, select
    from gdn_cli.machine import inventory
    from gdn_cli.worker.executor import build
    from gdn_cli.worker.judge import check, dataset

    found = registry.load()
    op = found.ops["gdn_decode"]
    [algo] = [a for a in found.algos if a.op == op.name and a.name == "cuda-v4"]
    if (place := inventory.HERE.place(algo, "cuda")).mode is None:
        pytest.skip(place.reason)
    definition = pack.definition(op, found)
    kernel = build.build(definition, pack.pack(algo, op))
    workload = select(op, embedded(op), chosen=["batch_size=1"])[0]
    inputs, outputs = (
        dataset.load_inputs(op, workload, "cuda"),
        check.allocate(op, workload.axes, "cuda"),
    )
    return Subject.from_kernel(kernel, inputs, outputs, definition=definition)


@pytest.mark.gpu
def test_tiers_of_a_small_kernel_are_in_order(cuda_v4):
    """A kernel of 2 to 3 us: CUPTI sees it alone, nvbench's events add a little,
    0.1.2's loop the host's launch.
    """
    pytest.importorskip("cuda.bench")
    with torch.no_grad():
        found = {
            tier: timing.measure(tier, cuda_v4, Plan())
            for tier in ("cupti", "nvbench", "fib", "nvbench")
        }
    us = {tier: timed.median_us for tier, timed in found.items()}
    assert 1 < us["cupti"] < 10
    assert us["cupti"] < us["nvbench"] < us["cupti"] + 15
    assert us["cupti"] < us["fib"] < 200 or "unknown" in found["fib"].how
    assert "is held" in found["nvbench"].how and found["fib"].samples == 3


@pytest.mark.gpu
def test_nvbench_on_a_gpu_sees_the_work_and_passes_errors_on(cuda_v4):
    pytest.importorskip("cuda.bench")
    small, large = (torch.ones(n << 20, device="cuda") for n in (1, 64))
    times = []
    for x in (small, large):
        y = torch.empty_like(x)
        timed = nv(lambda x=x, y=y: y.copy_(x), iterations=25, trials=2)
        assert timed.samples == 50
        times.append(timed.median_us)
    assert times[1] > 5 * times[0]  # 512 MB moved against 8

    def wrong():
        raise KeyError("wrong")

    with pytest.raises(KeyError, match="wrong"):
        nv(wrong, iterations=5)
    waiting = nv(lambda: small.sum().item(), iterations=5)
    assert waiting.samples == 5 and "waits for the GPU" in waiting.note
    assert "is held" in timing.measure("nvbench", cuda_v4, Plan(iterations=5)).how
