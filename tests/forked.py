"""`gdn` in a process forked from one that has imported the package: a tenth of the time
of a new process.

    forked.run(args, env, cwd, stdin, timeout) -> subprocess.CompletedProcess, as
    subprocess.run gives it

A server has imported the command's modules and has done nothing else. Each command gets
its own environment, folder and streams. Where Python itself would read a variable
at its start, `helpers.gdn` starts a new process.

Commands that need a package that is slow to import come from a server which has imported
it, too: torch takes a worker 1.7 s of CPU time. Keepers and workers are forked from their
command, with the parents, streams and environment that they have else. What is wrapped (a
profiler) or sandboxed is a new process here, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gdn_cli.paths import PACKAGE
from gdn_cli.worker.executor import process

_STATUS = struct.Struct("<i")
_PR_SET_NAME = 15
# commands that start workers
_WITH_WORKERS = ("run", "bench", "compare", "profile", "tune", "prove", "pack")
_TORCH = "flashinfer_bench"  # and torch
# command -> the package that its server has imported
_IMPORTED = dict.fromkeys(_WITH_WORKERS, _TORCH)
_IMPORTED |= {"data": _TORCH, "modal": "modal", "report": "matplotlib.figure"}
# modal reads it when it is imported
_NO_CONFIGURATION = {"MODAL_CONFIG_PATH": os.devnull}
# Each version of Python or of a library warns of other things, such as os.fork beside threads from
# 3.12 on, and tests compare all that is on stderr.
QUIET = {"PYTHONWARNINGS": "ignore"}
# the package that it has imported -> of which process, it
_servers: dict[str, tuple[int, socket.socket, subprocess.Popen]] = {}
_Popen = subprocess.Popen
_old_streams = []  # never collected: their buffers belong to the parent


def run(
    args: list[str], env: dict[str, str], cwd: Path | None, stdin: str, timeout: float
):
    ours, theirs = socket.socketpair()
    pipes = [os.pipe() for _ in range(3)]
    (given, write), *read = pipes
    with ours:
        server = _connection(_IMPORTED.get(args[0], "") if args else "")
        socket.send_fds(
            server, [b"x"], [theirs.fileno(), given, *(end for _, end in read)]
        )
        theirs.close()
        for descriptor in (given, *(end for _, end in read)):
            os.close(descriptor)
        ours.settimeout(timeout)
        ours.sendall(
            json.dumps(
                {"args": args, "env": env, "cwd": str(cwd or Path.cwd())}
            ).encode()
        )
        ours.shutdown(socket.SHUT_WR)
        with ThreadPoolExecutor(3) as pool:
            pool.submit(_write, write, stdin.encode())
            said = [pool.submit(_read, end) for end, _ in read]
            (code,) = _STATUS.unpack(ours.recv(_STATUS.size))
            out, err = (data.result(timeout) for data in said)
    return subprocess.CompletedProcess(["gdn", *args], code, out, err)


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(descriptor, "wb") as pipe:
        pipe.write(data)


def _read(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8") as pipe:
        return pipe.read()


def _connection(package: str) -> socket.socket:
    """To this process's server, which is started with the first command."""
    if package not in _servers or _servers[package][0] != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), package]
        env = os.environ | QUIET | _NO_CONFIGURATION
        with theirs:
            server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        _servers[package] = os.getpid(), ours, server
        atexit.register(_end, ours, server)
    return _servers[package][1]


def _end(line: socket.socket, server: subprocess.Popen) -> None:
    line.close()
    server.wait()


# --- the server


# run by name: each is a process's main module
_MAIN = ("worker/serve.py", "worker/executor/__main__.py")


def _import_rooms(wanted: Callable[[str], bool]) -> None:
    for file in PACKAGE.glob("*/**/*.py"):
        path = file.relative_to(PACKAGE)
        if wanted(path.parts[0]) and str(path) not in _MAIN:
            importlib.import_module(".".join(["gdn_cli", *path.with_suffix("").parts]))


def _import(package: str) -> None:
    # these two import torch
    _import_rooms(lambda room: room not in ("worker", "serving"))
    # .ci/other_pythons.py does without torch
    if not package or not importlib.util.find_spec(package.partition(".")[0]):
        return
    importlib.import_module(package)
    if package == _TORCH:
        from gdn_cli.run import worker_process

        _import_rooms(lambda room: room == "worker")
        worker_process.subprocess = types.SimpleNamespace(
            **vars(subprocess) | {"Popen": _start}
        )


def serve(line: socket.socket, package: str) -> None:
    """Until the other end is closed: a child for each command, which is not waited for here."""
    # a tenth of the time of imports; what is there now is never collected, nor looked at
    gc.disable()
    _import(package)
    gc.freeze()
    gc.enable()

    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 1, 4)
        # those that have ended; at the end all
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if data else 0)[0]:
                pass
        if not data:
            return
        if os.fork() == 0:
            line.close()
            _command(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _command(answer: int, *streams: int) -> None:
    """In a child: run the command in another child, and report how that ended."""
    client = socket.socket(fileno=answer)
    data = bytearray()
    while part := client.recv(1 << 16):
        data += part
    pid = os.fork()
    if pid == 0:
        client.close()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _gdn(**json.loads(data))
    _, status = os.waitpid(pid, 0)
    client.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _gdn(args: list[str], env: dict[str, str], cwd: str) -> None:
    """`python -m gdn_cli ARGS`, from its first line on."""
    from gdn_cli import cli

    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [str(Path(cli.__file__).parent.parent / "__main__.py"), *args]
    # "Usage: python -m gdn_cli", as click has it
    sys.modules["__main__"].__package__ = "gdn_cli"
    _new_streams(cwd)
    _end_with(cli.main)


def _end_with(work: Callable[[], None]) -> None:
    """Do this and nothing else, and end as Python would."""
    code = 0
    try:
        work()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _new_streams(cwd: str) -> None:
    tempfile.tempdir = None  # the folder for temporary files is another
    _old_streams.append((sys.stdin, sys.stdout, sys.stderr))
    sys.path[0] = cwd
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


# --- in a command: its workers


class _Child(process.Forked):
    """As Popen: one that somebody else has waited for ended somehow."""

    def poll(self) -> int | None:
        try:
            return super().poll()
        except ChildProcessError:
            self.returncode = 0
            return 0

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


# filelock refuses a fork while another thread's is under way
_one_at_a_time = threading.Lock()


def _fork(work: Callable[[], None]) -> _Child:
    """A child that does this work, with the parts of Popen's interface that its starter uses."""
    with _one_at_a_time:
        pid = os.fork()
    if pid == 0:
        _end_with(work)
    return _Child(pid)


def _start(command: list[str], **how) -> subprocess.Popen | _Child:
    """What run/worker_process.py starts, a keeper with a worker below it. Anything else
    is a new process.
    """
    inner = command[command.index("--") + 1 :] if "--" in command else []
    if inner[1:3] != ["-m", "gdn_cli.worker.serve"] or "--runner" not in inner:
        return subprocess.Popen(command, **how)
    (out, out_in), (err, err_in) = os.pipe(), os.pipe()

    def keeper() -> None:
        os.setsid()
        if sys.platform == "linux":  # its command line is this file's
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"keeper", 0, 0, 0)
        for number, descriptor in enumerate((how["stdin"].fileno(), out_in, err_in)):
            os.dup2(descriptor, number)
        _close_all_but(how["pass_fds"])
        os.environ.clear()
        os.environ.update(how["env"])
        os.chdir(how["cwd"])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _new_streams(str(how["cwd"]))
        subprocess.Popen = lambda command, **_: _fork(
            lambda: _run(command[2], command[3:])
        )
        _run(command[3], command[4:])

    child = _fork(keeper)
    os.close(out_in)
    os.close(err_in)
    child.stdout, child.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")
    return child


def _run(what: str, args: list[str]) -> None:
    """`python FILE ARGS`, or `python -m MODULE ARGS`."""
    sys.argv = [what, *args]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if what.endswith(".py"):
        runpy.run_path(what, run_name="__main__")
    else:
        subprocess.Popen = _Popen  # the worker's own children are real ones
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def _close_all_but(kept) -> None:
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
