"""What ran on the GPU during some work: each kernel, copy and fill with its start and
its duration in ns, from CUPTI's activity records.

libcupti is called through ctypes: the copy that torch has loaded, so no package is
needed. Records are parsed directly from CUPTI's buffers, under a microsecond each (with
cupti-python 13.0 tens of microseconds).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import re
import struct
import time
from collections.abc import Callable, Iterator
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .kernels import begin
from .tier import TierUnavailableError

# start in ns, duration in ns, name (of a C++ kernel: mangled)
Ran = tuple[int, int, str]

# CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, which holds kernels of graphs too; copies
_KERNEL = 10
_MEMCPY = 1
_MEMSET = 2
# what is traced, and the names of what has none in its record
_NAMES = {_KERNEL: "", _MEMCPY: "Memcpy", _MEMSET: "Memset"}
# Every record of these kinds begins with its kind (u32 at 0), its start and end (u64 at
# 16 and 24), a kernel's with its name (a pointer at 104): CUpti_ActivityKernel3 to 13
# (cupti_activity.h of CUDA 7 to 13.5), new fields at the end only.
_RECORD = struct.Struct("<I12xQQ72xQ")
_VERSIONS = range(18, 140_000)  # cuptiGetVersion of CUDA 12.0 to 13.x
# bytes: over 4000 kernels; CUPTI fills each with zeros before use, in the thread that
# launches
_BUFFER = 2**20
_BUFFERS = 64
# how long the clock is compared at each opening: long compared with a task switch of
# some us
_RATE_NS = 300_000
# well above noise in that time, well below the rate of a processor's cycle counter
_RATE_OFF = 0.1
_FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
_NO_MORE = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED

_REQUESTED = CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
_COMPLETED = CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)

# what helps, by a part of the error's name
_HELP = {
    "PRIVILEGES": (
        "this container or virtual GPU does not let a process trace its own kernels; run it with"
        " --cap-add SYS_ADMIN, or as root (NVreg_RestrictProfilingToAdminUsers is about counters,"
        " not this)"
    ),
    "MULTIPLE_SUBSCRIBERS": (
        "another profiler (nsys, ncu, compute-sanitizer) has the process; run without it"
    ),
}


class Trace:
    """An open trace: `kernels` as often as wanted, `close` once. At most one is open in
    a process. TierUnavailableError if it does not see a kernel here.
    """

    _open = False

    def __init__(self) -> None:
        self._cupti = _cupti()
        if Trace._open:
            raise RuntimeError("a trace is already open in this process")
        version = self._cupti.version
        if version not in _VERSIONS:
            raise TierUnavailableError(
                f"libcupti's API version {version} is not one whose records are known"
            )
        # where its times come from, in words
        self.how = f"CUPTI's activity records (libcupti, API version {version})"
        Trace._open = True
        try:
            self._cupti.start()
            rate = self._cupti.rate()
            if abs(rate - 1) > _RATE_OFF:
                raise TierUnavailableError(
                    f"libcupti's clock runs at {rate:.3g} times the host's"
                )
            names = [name for _, _, name in self.kernels(_one_kernel)]
            if sum(name.startswith("gdn_begin") for name in names) != 1:
                listed = ", ".join(names) or "nothing"
                raise TierUnavailableError(
                    f"libcupti saw {listed} of the one kernel that was launched"
                )
        except BaseException:
            self.close()
            raise

    def kernels(self, work: Callable[[], Any]) -> list[Ran]:
        """What ran on the GPU in `work`, which synchronises at its end, in the order of the starts.

        Raises what `work` raises, and TierUnavailableError if a record is missing or incomplete.
        """
        self._cupti.flush()  # what ran since the last trace
        self._cupti.forget()
        self._cupti.dropped()
        work()
        self._cupti.flush()
        if error := self._cupti.error:
            raise TierUnavailableError(
                f"CUPTI's buffers could not be read: {type(error).__name__}: {error}"
            )
        if dropped := self._cupti.dropped():
            raise TierUnavailableError(f"CUPTI dropped {dropped} records")
        ran = []
        names = {0: ""}  # by address
        for kind, start, end, address in self._cupti.records():
            if not 0 < start <= end:
                raise TierUnavailableError(
                    f"CUPTI left a record without its times (start {start}, end {end})"
                )
            if kind == _KERNEL and address not in names:
                names[address] = ctypes.string_at(address).decode(errors="replace")
            name = _NAMES.get(kind, f"activity {kind}") or names[address]
            ran.append((start, end - start, name))
        return sorted(ran)

    def close(self) -> None:
        """Stop recording. Calling it again does nothing."""
        if Trace._open:
            Trace._open = False
            self._cupti.stop()


def _one_kernel() -> None:
    begin()
    torch.cuda.synchronize()


class _Cupti:
    """The library, the buffers that it fills, and the two callbacks that it calls for them.

    One per process, never freed: CUPTI may call at any time, from its own thread.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._requested = _REQUESTED(self._request)
        self._completed = _COMPLETED(self._complete)
        self._clock = _steady_clock()
        self._free: list = []
        self._lent: dict[int, Any] = {}  # by address
        self._sizes: dict[int, int] = {}  # of a record, by its kind
        self._filled: list[bytes] = []
        self.error: BaseException | None = None
        version = c_uint32()
        self.call("cuptiGetVersion", byref(version))
        self.version = version.value

    def call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            text = c_char_p()
            self._library.cuptiGetResultString(status, byref(text))
            name = text.value.decode() if text.value else f"error {status}"
            advice = [f": {words}" for part, words in _HELP.items() if part in name]
            raise TierUnavailableError(f"{function} says {name}{''.join(advice)}")

    def start(self) -> None:
        # set again each time: torch's profiler and cupti-python replace the callbacks,
        # and torch's profiler leaves CUPTI on the processor's cycle counter, where a
        # GPU's microsecond is 2100 "nanoseconds"
        self.call("cuptiActivityRegisterCallbacks", self._requested, self._completed)
        self.call("cuptiActivityRegisterTimestampCallback", self._clock)
        for kind in _NAMES:
            self.call("cuptiActivityEnable", kind)

    def rate(self) -> float:
        """How many of CUPTI's nanoseconds pass in one of the host's."""
        first, t0 = self._stamp()
        while time.perf_counter_ns() - t0 < _RATE_NS:
            pass
        second, t1 = self._stamp()
        return (second - first) / (t1 - t0)

    def _stamp(self) -> tuple[int, int]:
        """CUPTI's time and the host's: the quickest of five readings, so that nothing
        came between.
        """
        readings = []
        for _ in range(5):
            stamp, before = c_uint64(), time.perf_counter_ns()
            self.call("cuptiGetTimestamp", byref(stamp))
            readings.append((time.perf_counter_ns() - before, stamp.value, before))
        _, ours, host = min(readings)
        return ours, host

    def stop(self) -> None:
        """Stop recording and give back the buffers. Also called at the interpreter's
        end, after which CUPTI must not call.
        """
        disable = [("cuptiActivityDisable", kind) for kind in _NAMES]
        for function, argument in [*disable, ("cuptiActivityFlushAll", _FORCED)]:
            # on the way out an error changes nothing
            with contextlib.suppress(TierUnavailableError):
                self.call(function, argument)
        self.forget()

    def flush(self) -> None:
        """Bring all records of finished work into `_filled`; does not wait for kernels."""
        self.call("cuptiActivityFlushAll", _FORCED)

    def forget(self) -> None:
        self._filled.clear()
        self.error = None

    def dropped(self) -> int:
        """The number of records dropped for lack of room since the last call."""
        count = c_size_t()
        self.call("cuptiActivityGetNumDroppedRecords", None, 0, byref(count))
        return count.value

    def _request(self, buffer: Any, size: Any, most: Any) -> None:
        most[0] = 0  # 0: as many records as fit
        try:
            if not self._free and len(self._lent) < _BUFFERS:
                # room for reading the last record
                self._free.append((ctypes.c_char * (_BUFFER + _RECORD.size))())
            if not self._free:
                # CUPTI drops records then, and counts them
                buffer[0], size[0] = None, 0
                return
            lent = self._free.pop()
            self._lent[ctypes.addressof(lent)] = lent
            buffer[0], size[0] = ctypes.addressof(lent), _BUFFER
        except BaseException as e:  # ctypes would print it and go on
            self.error = e
            buffer[0], size[0] = None, 0

    def _complete(
        self, context: int, stream: int, address: int, size: int, valid: int
    ) -> None:
        try:
            # otherwise it is from before `start`, another tool's
            if lent := self._lent.pop(address, None):
                self._filled.append(
                    ctypes.string_at(address, valid + _RECORD.size) if valid else b""
                )
                self._free.append(lent)
        except BaseException as e:
            self.error = e

    def records(self) -> Iterator[tuple[int, int, int, int]]:
        """(kind, start, end, address of the name) of each record from the last flush;
        the address only for kernels.
        """
        for filled in self._filled:
            offset = 0
            end = len(filled) - _RECORD.size
            while offset < end:
                record = _RECORD.unpack_from(filled, offset)
                yield record
                kind = record[0]
                offset += self._sizes.get(kind) or self._size(kind, filled, offset, end)

    def _size(self, kind: int, filled: bytes, offset: int, end: int) -> int:
        """The record's size, from CUPTI itself: it depends on CUPTI's version."""
        base = ctypes.cast(c_char_p(filled), c_void_p).value
        assert base is not None
        following = c_void_p(base + offset)
        status = self._library.cuptiActivityGetNextRecord(base, end, byref(following))
        if status == _NO_MORE:
            return end - offset
        if status:
            raise TierUnavailableError(
                f"CUPTI cannot read its own buffer (error {status} after a record of kind {kind})"
            )
        assert following.value is not None
        self._sizes[kind] = following.value - base - offset
        return self._sizes[kind]


@cache
def _cupti() -> _Cupti:
    """Raises TierUnavailableError if there is none."""
    try:
        library = _load()
        for name, types in {
            "cuptiGetVersion": [POINTER(c_uint32)],
            "cuptiGetResultString": [c_int, POINTER(c_char_p)],
            "cuptiActivityRegisterCallbacks": [_REQUESTED, _COMPLETED],
            "cuptiActivityRegisterTimestampCallback": [c_void_p],
            "cuptiGetTimestamp": [POINTER(c_uint64)],
            "cuptiActivityEnable": [c_int],
            "cuptiActivityDisable": [c_int],
            "cuptiActivityFlushAll": [c_uint32],
            "cuptiActivityGetNumDroppedRecords": [
                c_void_p,
                c_uint32,
                POINTER(c_size_t),
            ],
            "cuptiActivityGetNextRecord": [c_void_p, c_size_t, POINTER(c_void_p)],
        }.items():
            function = getattr(library, name)
            function.argtypes = types
            function.restype = c_int
        cupti = _Cupti(library)
    except (OSError, AttributeError) as e:
        raise TierUnavailableError(
            f"libcupti cannot be loaded ({str(e).splitlines()[0]})"
        ) from None
    atexit.register(cupti.stop)
    return cupti


def _steady_clock() -> int | None:
    """The address of a function without arguments that returns nanoseconds, which CUPTI
    calls from its own threads: std::chrono::steady_clock::now() of the C++ library that
    torch has loaded.
    """
    now = ctypes.CDLL("libstdc++.so.6")["_ZNSt6chrono3_V212steady_clock3nowEv"]
    return ctypes.cast(now, c_void_p).value


def _load() -> Any:
    """The copy loaded in the process, torch's before others (Triton has one); a second
    copy would conflict with it.
    """
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    loaded = re.findall(r"/\S*/libcupti\.so\S*", text)
    loaded.sort(key=lambda path: "/triton/" in path)
    major, _, _ = (torch.version.cuda or "13").partition(".")
    return ctypes.CDLL(loaded[0] if loaded else f"libcupti.so.{major}")
