"""`gdn` in a process of its own, forked from one that has imported the package: a tenth of the time of a new process.

    forked.run(args, env, cwd, stdin, timeout) -> subprocess.CompletedProcess, as subprocess.run gives it

The server has imported what `gdn --help` imports and has done nothing else. Each command gets its own environment,
folder and streams. Where Python itself would read a variable at its start, `helpers.gdn` starts a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_STATUS = struct.Struct("<i")
_server: tuple[int, socket.socket, subprocess.Popen] | None = None


def run(args: list[str], env: dict[str, str], cwd: Path | None, stdin: str, timeout: float):
    ours, theirs = socket.socketpair()
    pipes = [os.pipe() for _ in range(3)]
    (given, write), *read = pipes
    with ours:
        socket.send_fds(_connection(), [b"x"], [theirs.fileno(), given, *(end for _, end in read)])
        theirs.close()
        for descriptor in (given, *(end for _, end in read)):
            os.close(descriptor)
        ours.settimeout(timeout)
        ours.sendall(json.dumps({"args": args, "env": env, "cwd": str(cwd or Path.cwd())}).encode())
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


def _connection() -> socket.socket:
    """To this process's server, which is started with the first command."""
    global _server
    if _server is None or _server[0] != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        _server = os.getpid(), ours, process
        atexit.register(_end, ours, process)
    return _server[1]


def _end(line: socket.socket, process: subprocess.Popen) -> None:
    line.close()
    process.wait()


# --- the server -------------------------------------------------------------------------------------------------------


def serve(line: socket.socket) -> None:
    """Until the other end is closed: a child for each command, which nobody waits for here."""
    from gdn_cli import cli  # noqa: F401

    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 1, 4)
        with contextlib.suppress(ChildProcessError):  # those that have ended; at the end all
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
    """In a child: run the command in a child of its own, and tell how that ended."""
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
    sys.modules["__main__"].__package__ = "gdn_cli"  # "Usage: python -m gdn_cli", as click has it
    sys.path[0] = cwd
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    code = 0
    try:
        cli.main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
