"""Where the kernels' times come from: libcupti's own buffers.

Without a GPU, libcupti is a stand-in behind real C function pointers: it asks for
buffers, fills them as cupti_activity.h of CUDA 13.0 lays records out, and hands them
over when it is flushed.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

import pytest
import torch

from gdn_cli.worker.timing import (
    Plan,
    Sample,
    Subject,
    TierUnavailableError,
    cupti,
    kernels,
    trace,
)
from gdn_cli.worker.timing.trace import Trace

KERNEL, MEMCPY, MEMSET = 10, 1, 2
SIZE = {KERNEL: 216, MEMCPY: 96, MEMSET: 88}  # CUpti_ActivityKernel10, Memcpy6, Memset4
ERRORS = {12: b"CUPTI_ERROR_MAX_LIMIT_REACHED", 35: b"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
          39: b"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"}  # fmt: skip


class Cupti:
    """A fake libcupti and GPU, on which every kernel takes a given number of ns."""

    def __init__(self):
        self.version, self.fails, self.lose, self.size = 130001, {}, 0, dict(SIZE)
        self.now, self.dropped, self.log, self.names = 1000, 0, [], {}
        self.enabled, self.pending, self.callbacks, self.lent = set(), [], None, None
        self.deaf = False  # records nothing, and says nothing
        # whose time its records have, and how fast that runs here
        self.clock, self.rate = None, 1

        def c(function, *types):
            def call(*arguments):
                name = function.__name__
                self.log.append(
                    (name, *arguments[:1]) if name in ("Enable", "Disable") else (name,)
                )
                return self.fails.get(name) or function(*arguments) or 0

            return CFUNCTYPE(c_int, *types)(call)

        def Version(out):
            out[0] = self.version

        def ResultString(status, out):
            out[0] = ERRORS.get(status, b"CUPTI_ERROR_UNKNOWN")

        def Register(requested, completed):
            self.callbacks = requested, completed

        def Clock(address):
            self.clock = CFUNCTYPE(c_uint64)(address)

        def Timestamp(out):
            out[0] = int(self.clock() * self.rate)

        def Enable(kind):
            self.enabled.add(kind)

        def Disable(kind):
            self.enabled.discard(kind)

        def FlushAll(flag):
            assert flag == 1
            if self.callbacks is None:
                return 4  # CUPTI_ERROR_INVALID_OPERATION
            self.hand_over()

        def Dropped(context, stream, out):
            assert context is None and stream == 0
            out[0], self.dropped = self.dropped, 0

        def Next(buffer, valid, record):
            at = record[0] - buffer
            (kind,) = struct.unpack("<I", ctypes.string_at(buffer + at, 4))
            if at + self.size[kind] >= valid:
                return 12
            record[0] += self.size[kind]

        callbacks = [trace._REQUESTED, trace._COMPLETED]
        dropped = [c_void_p, c_uint32, POINTER(c_size_t)]
        following = [c_void_p, c_size_t, POINTER(c_void_p)]
        for name, function, types in (
            ("cuptiGetVersion", Version, [POINTER(c_uint32)]),
            ("cuptiGetResultString", ResultString, [c_int, POINTER(c_char_p)]),
            ("cuptiActivityRegisterCallbacks", Register, callbacks),
            ("cuptiActivityRegisterTimestampCallback", Clock, [c_void_p]),
            ("cuptiGetTimestamp", Timestamp, [POINTER(c_uint64)]),
            ("cuptiActivityEnable", Enable, [c_int]),
            ("cuptiActivityDisable", Disable, [c_int]),
            ("cuptiActivityFlushAll", FlushAll, [c_uint32]),
            ("cuptiActivityGetNumDroppedRecords", Dropped, dropped),
            ("cuptiActivityGetNextRecord", Next, following),
        ):
            setattr(self, name, c(function, *types))

    def run(self, name, duration, kind=KERNEL, start=None):
        """Something on the GPU. A buffer that is full is handed over at once, as CUPTI does."""
        start = self.now if start is None else start
        self.now += duration + 10
        if kind not in self.enabled or self.deaf:
            return
        if self.lose:
            self.lose -= 1
            self.dropped += 1
            return
        record = bytearray(self.size[kind])
        struct.pack_into("<I", record, 0, kind)
        struct.pack_into("<QQ", record, 16, start, start + duration if start else 0)
        if kind == KERNEL:
            text = self.names.setdefault(
                name, ctypes.create_string_buffer(name.encode())
            )
            struct.pack_into("<Q", record, 104, ctypes.addressof(text))
        self.pending.append(bytes(record))

    def hand_over(self):
        while self.pending:
            address, room, most = c_void_p(), c_size_t(), c_size_t(7)
            self.callbacks[0](
                ctypes.pointer(address), ctypes.pointer(room), ctypes.pointer(most)
            )
            assert most.value == 0
            if not address.value:
                self.dropped += len(self.pending)
                self.pending.clear()
                return
            assert address.value % 8 == 0
            ctypes.memset(address, 0, room.value)
            filled = b""
            while self.pending and len(filled) + len(self.pending[0]) <= room.value:
                filled += self.pending.pop(0)
            ctypes.memmove(address, filled, len(filled))
            self.callbacks[1](None, 0, address, room.value, len(filled))


@pytest.fixture
def lib(monkeypatch):
    fake = Cupti()
    monkeypatch.setattr(trace, "_load", lambda: fake)
    monkeypatch.setattr(Trace, "_open", False)
    monkeypatch.setattr(trace, "begin", lambda: fake.run("gdn_begin", 1))
    monkeypatch.setattr(trace.atexit, "register", lambda function: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    trace._cupti.cache_clear()
    yield fake
    trace._cupti.cache_clear()


def test_kernels_come_with_start_duration_and_name_in_their_order(lib):
    opened = Trace()
    lib.run("between", 5)  # no part of any trace

    def work():
        lib.run("late", 70, start=9000)
        lib.run("gdn_l2_flush", 50, start=2000)
        lib.run("_Z3addPf", 7, start=3000)

    expected = [(2000, 50, "gdn_l2_flush"), (3000, 7, "_Z3addPf"), (9000, 70, "late")]
    assert opened.kernels(work) == expected
    assert opened.kernels(work) == expected  # no record of the first trace is left
    assert opened.kernels(lambda: None) == []
    assert opened.how == "CUPTI's activity records (libcupti, API version 130001)"
    opened.close()


@pytest.mark.parametrize("kernel_size", [208, 216, 232])
def test_copies_and_fills_of_other_sizes_stand_between_kernels(lib, kernel_size):
    """The size of a record is CUPTI's to know: it grew with every version."""
    lib.size[KERNEL] = kernel_size
    opened = Trace()

    def work():
        lib.run("", 3, MEMSET)
        for _ in range(2):
            lib.run("a", 11)
            lib.run("", 5, MEMCPY)
            lib.run("", 4, MEMCPY)
        lib.run("a", 12)

    seen = [(duration, name) for _, duration, name in opened.kernels(work)]
    assert seen == [
        (3, "Memset"),
        *[(11, "a"), (5, "Memcpy"), (4, "Memcpy")] * 2,
        (12, "a"),
    ]
    opened.close()


def test_more_than_a_buffer_holds_is_kept_and_buffers_are_used_again(lib):
    opened = Trace()
    for _ in range(3):
        ran = opened.kernels(
            lambda: [lib.run(f"k{i % 3}", i + 1) for i in range(12_000)]
        )
        assert [duration for _, duration, _ in ran] == list(range(1, 12_001))
    # handed over one by one here
    assert len(trace._cupti()._free) == 1 and not trace._cupti()._lent
    opened.close()


def test_nothing_is_recorded_outside_and_opening_again_works(lib):
    for n in range(60):
        opened = Trace()
        assert lib.enabled == {KERNEL, MEMCPY, MEMSET}
        lib.callbacks = (
            lib.callbacks if n % 2 else None
        )  # as if somebody had detached CUPTI, or had put their own there
        opened.close()
        opened.close()
        assert lib.enabled == set()
        lib.fails.clear()
    opened = Trace()
    assert opened.kernels(lambda: lib.run("a", 4))[0][1:] == (4, "a")
    opened.close()


def test_other_peoples_callbacks_are_replaced_at_each_opening(lib):
    Trace().close()
    ours = lib.callbacks
    lib.callbacks = None
    opened = Trace()
    # the same two for the life of the process: CUPTI may still hold them
    for old, new in zip(ours, lib.callbacks, strict=True):
        assert ctypes.cast(old, c_void_p).value == ctypes.cast(new, c_void_p).value
    opened.close()


def test_two_at_once_would_steal_each_others_records(lib):
    opened = Trace()
    with pytest.raises(RuntimeError, match="already open in this process"):
        Trace()
    assert opened.kernels(lambda: lib.run("a", 4))[0][1:] == (4, "a")
    opened.close()


def test_a_trace_with_a_dropped_record_is_refused(lib):
    opened = Trace()

    def work():
        lib.run("a", 1)
        lib.lose = 2
        lib.run("a", 1), lib.run("a", 1)

    with pytest.raises(TierUnavailableError, match="CUPTI dropped 2 records"):
        opened.kernels(work)
    assert len(opened.kernels(lambda: lib.run("a", 1))) == 1
    opened.close()


def test_buffers_have_an_end_and_what_finds_no_room_is_counted(lib, monkeypatch):
    monkeypatch.setattr(trace, "_BUFFERS", 0)
    with pytest.raises(TierUnavailableError, match="CUPTI dropped 1 records"):
        Trace().kernels(lambda: lib.run("a", 1))


def test_a_trace_with_a_record_without_times_is_refused(lib):
    opened = Trace()
    with pytest.raises(TierUnavailableError, match="without its times"):
        opened.kernels(lambda: lib.run("a", 1, start=0))
    opened.close()


@pytest.mark.parametrize("where", ["_request", "_complete"])
def test_an_exception_in_a_callback_does_not_vanish(lib, monkeypatch, where):
    opened = Trace()

    def broken(*_):
        raise MemoryError("no more")

    name = "addressof" if where == "_request" else "string_at"
    real = getattr(ctypes, name)
    called = lambda *a: broken() if where in _callers() else real(*a)  # noqa: E731
    monkeypatch.setattr(ctypes, name, called)
    with pytest.raises(TierUnavailableError, match="be read: MemoryError: no more"):
        opened.kernels(lambda: lib.run("a", 1))
    monkeypatch.undo()


def _callers():
    frame, names = sys._getframe(1), set()
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_exceptions_of_the_work_come_back_unchanged(lib):
    opened = Trace()

    def work():
        lib.run("a", 1)
        raise torch.cuda.OutOfMemoryError("no room")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        opened.kernels(work)
    assert len(opened.kernels(lambda: lib.run("b", 1))) == 1
    opened.close()


# --- refusals


def refused(lib, match: str) -> None:
    with pytest.raises(TierUnavailableError, match=match):
        Trace()
    assert lib.enabled == set()


def test_without_libcupti_there_is_no_trace(lib, monkeypatch):
    def missing():
        raise OSError("libcupti.so.13: cannot open shared object file")

    monkeypatch.setattr(trace, "_load", missing)
    refused(lib, "libcupti cannot be loaded .libcupti.so.13: cannot open")


@pytest.mark.parametrize("version", [17, 140_000])
def test_unknown_records_are_not_read(lib, version):
    lib.version = version
    refused(lib, f"version {version} is not one whose records are known")
    assert ("FlushAll",) not in lib.log


@pytest.mark.parametrize("rate", [2.1, 0.1])
def test_a_clock_that_is_not_in_nanoseconds_is_not_read(lib, rate):
    """As torch's profiler leaves it: the processor's cycles."""
    lib.rate = rate
    refused(lib, r"libcupti's clock runs at [\d.]+ times the host's")
    lib.rate = 1
    Trace().close()


def test_a_trace_that_sees_nothing_is_refused(lib):
    lib.deaf = True
    refused(lib, "libcupti saw nothing of the one kernel that was launched")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (35, "Enable says .*_INSUFFICIENT_PRIVILEGES: .*--cap-add SYS_ADMIN"),
        (39, "Enable says .*_SUBSCRIBERS_NOT_SUPPORTED: another profiler .*nsys"),
    ],
)
def test_a_refusal_says_what_helps(lib, status, words):
    lib.fails["Enable"] = status
    refused(lib, words)
    lib.fails.clear()
    Trace().close()  # the refusal left nothing open


# --- the tier


@pytest.fixture
def sampler(lib, monkeypatch):
    monkeypatch.setattr(cupti, "begin", lambda: lib.run("gdn_begin", 1))
    monkeypatch.setattr(kernels, "Flush", lambda: lambda: lib.run("gdn_l2_flush", 60))

    def make(*durations):
        def subject(each):
            return Subject(lambda: [*map(lib.run, "kl", each)], [], [])

        return cupti.Sampler([*map(subject, durations)], Plan(warmup=1))

    return make


def test_the_tier_times_by_the_trace_and_says_whose(sampler, lib):
    one = sampler([1000, 500], [2000])
    assert one.alone == [2, 1]
    first, second = Sample(1.5, 1.51, 2), Sample(2.0, 2.0, 1)
    assert one.take([0, 1, 0]) == [first, second, first]
    how = "CUPTI's activity records (libcupti, API version 130001)"
    assert one.about(0, one.take([0])) == (how, None)
    assert lib.log.count(("Enable", KERNEL)) == 1  # one trace for all of it
    one.close()
    assert lib.enabled == set()


def test_a_sampler_that_cannot_be_made_leaves_nothing_open(sampler, lib):
    with pytest.raises(TierUnavailableError, match="0 of 1 calls left kernels"):
        sampler([])
    assert lib.enabled == set()
    Trace().close()


# --- on a GPU


@pytest.mark.gpu
def test_every_kernel_copy_and_graph_node_is_seen():
    flush = kernels.Flush()
    x, y = torch.randn(2**20, device="cuda"), torch.empty(2**20, device="cuda")

    def copy():
        kernels.gdn_copy_floor[(2**20 // 1024,)](x, y, 1024, False)

    copy(), flush()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy()
        copy()
    graph.replay()
    torch.cuda.synchronize()

    def work():
        for _ in range(20):
            flush()
            copy()
        kernels.begin()
        graph.replay()
        kernels.rest()
        y.copy_(x)  # one of the driver's copies, or a kernel
        torch.cuda.synchronize()

    for _ in range(2):  # opened again it sees the same
        opened = Trace()
        try:
            for _ in range(2):
                ran = opened.kernels(work)
                names = [name for _, _, name in ran]
                due = ["gdn_l2_flush", "gdn_copy_floor"] * 20
                due += ["gdn_begin", "gdn_copy_floor", "gdn_copy_floor", "gdn_rest"]
                for name, start in zip(names, due, strict=False):
                    assert name.startswith(start)
                assert len(names) == 45
                assert all(duration > 0 for _, duration, _ in ran)
                for (start, duration, _), (later, *_) in itertools.pairwise(ran[:40]):
                    assert start + duration <= later
        finally:
            opened.close()


@pytest.mark.gpu
def test_times_are_nanoseconds_whoever_traced_before():
    """torch's profiler sets CUPTI's clock to the processor's cycle counter: twice as
    fast on many.
    """

    def by_torch():
        with torch.autograd.profiler.profile(use_device="cuda", use_kineto=True):
            work()

    def work():
        for _ in range(20):
            flush()
        torch.cuda.synchronize()

    flush = kernels.Flush()
    work()
    seen = []
    for _ in range(2):
        opened = Trace()
        seen.append(sorted(duration for _, duration, _ in opened.kernels(work))[10])
        opened.close()
        by_torch()
    assert max(seen) < 1.3 * min(seen), seen
