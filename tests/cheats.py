"""Decode algos that are right when they are called once and are no good: for each probe, those that it must catch.

CHEATS run on a CPU, GPU_CHEATS need a CUDA device. All but the one in C++ are Python on top of the definition's
reference (`right`); each is a function's body, in which CALL stands for the right results.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from helpers import DECODE_ARGS, OURS

_TOP = """\
import ctypes, queue, threading
import torch
from .right import run as right

calls, kept = [], {}

def content(*tensors):
    return b"".join(x.cpu().float().numpy().tobytes() for x in tensors)

def fill(output, new_state, results):
    output.copy_(results[0])
    new_state.copy_(results[1])

"""


@dataclass(frozen=True)
class Cheat:
    """An algo, the probe that must catch it, and a part of the probe's message."""

    probe: str
    says: str
    sources: dict[str, str] | str
    destination_passing: bool = False
    language: str = "python"
    entry_point: str = "main.py::run"
    checked: bool = True  # False: not to be called on outputs without guards, or not passed by the check every time

    def keys(self) -> dict:
        """For helpers.write_algo."""
        names = ("sources", "destination_passing", "language", "entry_point")
        return {name: getattr(self, name) for name in names}


def source(body: str, outputs: bool = False, top: str = "") -> str:
    """main.py with this body as `run`, which gets the outputs where asked for."""
    body = textwrap.indent(textwrap.dedent(body).replace("CALL", f"right({DECODE_ARGS})"), "    ")
    return f"{_TOP}{textwrap.dedent(top)}\n\ndef run({DECODE_ARGS}{', output, new_state' if outputs else ''}):\n{body}"


def returns(probe: str, says: str, body: str, top: str = "", **more) -> Cheat:
    """A value-returning one."""
    return Cheat(probe, says, source(body, top=top), **more)


def fills(probe: str, says: str, body: str, top: str = "", **more) -> Cheat:
    """One that gets `output` and `new_state`."""
    return Cheat(probe, says, source(body, True, top), destination_passing=True, **more)


# a thread that waits for work, as one does that is to be ready at once
_THREAD = """
work = queue.SimpleQueue()

def serve():
    while True:
        work.get()()

threading.Thread(target=serve, daemon=True).start()
"""

CHEATS: dict[str, Cheat] = {
    # --- inputs-changed
    "scales-k-at-times": returns(
        "inputs-changed", "changed k in call 2 of 3",
        """
        results = CALL
        calls.append(1)
        if len(calls) % 3 == 0:
            k.mul_(2)
        return results
        """,
    ),
    "updates-the-state-in-place-once-it-is-timed": fills(
        "inputs-changed", "changed state in call 3 of 3",
        """
        looked_at = bool(new_state.isnan().any())
        fill(output, new_state, CALL)
        if not looked_at:
            state.copy_(new_state)
        """,
    ),
    # --- out-of-bounds
    "writes-one-byte-behind": fills(
        "out-of-bounds", "output: 1 bytes written, 1 after its last",
        """
        fill(output, new_state, CALL)
        ctypes.memset(output.data_ptr() + output.nbytes, 0, 1)
        """,
        checked=False,
    ),
    "writes-before": fills(
        "out-of-bounds", "new_state: 8 bytes written, 513 to 520 before its first",
        """
        fill(output, new_state, CALL)
        ctypes.memset(new_state.data_ptr() - 520, 0, 8)
        """,
        checked=False,
    ),
    # --- late-work
    "leaves-it-to-a-thread": fills(
        "late-work", "was not complete when the call returned",
        "work.put(lambda: fill(output, new_state, CALL))", _THREAD, checked=False,
    ),
    "returns-before-its-thread": returns(
        "late-work", "was not complete when the call returned",
        """
        results = torch.zeros_like(v), torch.zeros_like(state)
        work.put(lambda: fill(*results, CALL))
        return results
        """,
        _THREAD, checked=False,
    ),
    "returns-lazy-tensors": returns(
        "late-work", "output: returned a Lazy, not a plain tensor",
        """
        out, new = CALL
        return out.as_subclass(Lazy), new
        """,
        "class Lazy(torch.Tensor): pass",
    ),
    # --- overwritten-results
    "has-one-set-of-results": returns(
        "overwritten-results", "output of one call was overwritten by the next",
        """
        results = CALL
        mine = kept.setdefault(q.shape, results)
        fill(*mine, results)
        return mine
        """,
    ),
    "shares-one-of-its-results": returns(
        "overwritten-results", "new_state of one call was overwritten by the next",
        """
        out, new = CALL
        return out, kept.setdefault(q.shape, torch.empty_like(new)).copy_(new)
        """,
    ),
    "writes-where-it-first-wrote": fills(
        "overwritten-results", "output: 1024 of 1024 elements were not written in a buffer that is new to the kernel",
        "fill(*kept.setdefault(q.shape, (output, new_state)), CALL)",
    ),
    # --- pointer-cache
    "remembers-addresses": returns(
        "pointer-cache", "output stayed the same when the same buffers got new values",
        """
        if q.data_ptr() not in kept:
            kept[q.data_ptr()] = CALL
        return kept[q.data_ptr()]
        """,
    ),
    "remembers-addresses-and-versions": fills(
        "pointer-cache", "output stayed the same when the same buffers got new values",
        """
        key = v.data_ptr(), v._version, state.data_ptr(), state._version
        if key not in kept:
            kept[key] = CALL
        fill(output, new_state, kept[key])
        """,
    ),
    "remembers-the-state-alone": returns(
        "pointer-cache", "new_state stayed the same when the same buffers got new values",
        """
        out, new = CALL
        return out, kept.setdefault(state.data_ptr(), new).clone()
        """,
    ),
    "prepares-the-gates-once": returns(
        "pointer-cache", "wrong when the same buffers get new values",
        """
        A_log = kept.setdefault(A_log.data_ptr(), A_log.clone())
        return CALL
        """,
    ),
    "skips-what-is-there": fills(
        "pointer-cache", "output stayed the same when the same buffers got new values",
        """
        if not (output.isfinite().all() and output.any()):
            fill(output, new_state, CALL)
        """,
    ),
    # --- content-cache
    "remembers-contents": returns(
        "content-cache", "output: a second call with the same values returned the first one's tensor",
        """
        key = content(q, k, v, state, A_log, a, dt_bias, b)
        if key not in kept:
            kept[key] = CALL
        return kept[key]
        """,
    ),
    "remembers-contents-and-copies": fills(
        "content-cache", "values that it has just seen take",
        """
        key = content(q, k, v, state, A_log, a, dt_bias, b)
        if key not in kept:
            for _ in range(40):  # as if it were as much work as a prefill
                kept[key] = CALL
        fill(output, new_state, kept[key])
        """,
    ),
    "remembers-the-last-contents": returns(
        "content-cache", "values that it has just seen take",
        """
        key = content(q, k, v, state, A_log, a, dt_bias, b)
        if key not in kept:
            kept.clear()
            for _ in range(40):
                kept[key] = CALL
        return tuple(x.clone() for x in kept[key])
        """,
    ),
    "goes-by-a-few-elements": fills(
        "content-cache", "output stayed the same when single elements of v, state changed",
        """
        key = tuple(float(x.view(-1)[i]) for x in (q, k, v, state, A_log, a, dt_bias, b) for i in (0, 1, -1))
        if key not in kept:
            kept[key] = CALL
        fill(output, new_state, kept[key])
        """,
    ),
    "goes-by-every-eighth-element": returns(
        "content-cache", "output stayed the same when single elements of v, state changed",
        """
        key = content(*(x.view(-1)[::8] for x in (q, k, v, state, A_log, a, dt_bias, b)))
        if key not in kept:
            kept[key] = CALL
        return tuple(x.clone() for x in kept[key])
        """,
    ),
    "reads-little-of-q-and-k": returns(
        "content-cache", "output stayed the same when single elements of q, k, A_log, a, dt_bias, b changed",
        """
        key = content(q[..., :8], k[..., :8], v, state)
        if key not in kept:
            kept[key] = CALL
        return tuple(x.clone() for x in kept[key])
        """,
    ),
    # --- zero-outputs
    "computes-where-it-is-looked-at": fills(
        "zero-outputs", "output is all zeros if its buffer held no NaN",
        """
        if output.any():  # NaN counts
            fill(output, new_state, CALL)
        """,
    ),
    "computes-half-where-it-is-looked-at": fills(
        "zero-outputs", "new_state is all zeros if its buffer held no NaN",
        """
        out, new = CALL
        fill(output, new_state, (out, new if new_state.any() else 0 * new))
        """,
    ),
    "tires": returns(
        "zero-outputs", "output is all zeros",
        """
        out, new = CALL
        calls.append(1)
        return (out, new) if len(calls) < 3 else (0 * out, new)
        """,
    ),
    # --- nondeterminism
    "races": returns(
        "nondeterminism", "new_state: differs between equal calls by 2e-06, over a tenth of the tolerance 1e-05",
        """
        out, new = CALL
        calls.append(1)
        return out, new * (1 + 2e-6 * (len(calls) % 2))
        """,
    ),
}  # fmt: skip


def _too_many_rows() -> dict[str, str]:
    """cpp-v1 with a row of zeros after the last one of the state."""
    folder = OURS / "gdn_decode" / "cpp-v1"
    shared = *(OURS / "_cuda" / "cpu").glob("*.h"), OURS / "_cuda" / "ffi" / "tensor.cuh"
    sources = {path.name: path.read_text(encoding="utf-8") for path in (*folder.glob("*.[ch]*"), *shared)}
    end = "  pool.run(rows / j.chunk_rows, run_chunk, &j);\n"
    more = "  for (int c = 0; c < K; ++c) j.new_state[rows * K + c] = 0.f;\n"
    assert end in sources["kernel.cpp"]
    return sources | {"kernel.cpp": sources["kernel.cpp"].replace(end, end + more)}


CHEATS["cpp-writes-a-row-too-many"] = Cheat(
    "out-of-bounds", "new_state: 512 bytes written, 1 to 512 after its last", _too_many_rows(),
    destination_passing=True, language="cpp", entry_point="kernel.cpp::run", checked=False,
)  # fmt: skip


# What follows the call on the current stream is not known to it, and the check waits for the whole device.
_STREAM = "side = torch.cuda.Stream()"
_EARLY = "was computed before its inputs were there: the work does not wait for the current stream"
_LATE = "was not complete for what follows on the current stream"

GPU_CHEATS: dict[str, Cheat] = {
    "works-on-a-stream-of-its-own": fills(
        "late-work", _EARLY,
        """
        with torch.cuda.stream(side):
            fill(output, new_state, CALL)
        """,
        _STREAM, checked=False,
    ),
    "returns-from-a-stream-of-its-own": returns(
        "late-work", _EARLY,
        """
        with torch.cuda.stream(side):
            return CALL
        """,
        _STREAM, checked=False,
    ),
    "works-on-the-legacy-stream": fills(
        "late-work", _EARLY,
        """
        with torch.cuda.stream(torch.cuda.default_stream()):
            fill(output, new_state, CALL)
        """,
    ),
    "waits-and-is-not-waited-for": fills(
        "late-work", _LATE,
        """
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fill(output, new_state, CALL)
        """,
        _STREAM,
    ),
    "waits-and-returns-what-is-not-waited-for": returns(
        "late-work", _LATE,
        """
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            return CALL
        """,
        _STREAM,
    ),
    "leaves-it-to-a-thread": fills(
        "late-work", "output was",  # computed too early or not complete, as it comes
        "work.put(lambda: fill(output, new_state, CALL))", _THREAD, checked=False,
    ),
    "writes-one-element-behind": fills(
        "out-of-bounds", "new_state: 4 bytes written, 1 to 4 after its last",
        """
        fill(output, new_state, CALL)
        new_state.as_strided((1,), (1,), new_state.storage_offset() + new_state.numel()).zero_()
        """,
        checked=False,
    ),
    "remembers-contents-and-copies": fills(
        "content-cache", "for values that were just seen",
        """
        key = content(q, k, v, state, A_log, a, dt_bias, b)
        if key not in kept:
            kept[key] = CALL
        fill(output, new_state, kept[key])
        """,
    ),
    "does-less-for-what-it-has-seen": fills(
        "content-cache", "for values that were just seen its kernels take",
        """
        key = content(q, k, v, state, A_log, a, dt_bias, b)
        torch.cuda._sleep(1000 if key in kept else 2_000_000)  # the same kernel: it decides on the GPU what to skip
        kept[key] = True
        fill(output, new_state, CALL)
        """,
    ),
    **{name: CHEATS[name] for name in (
        "updates-the-state-in-place-once-it-is-timed", "has-one-set-of-results", "remembers-addresses-and-versions",
        "goes-by-every-eighth-element", "computes-where-it-is-looked-at", "races",
    )},
}  # fmt: skip
