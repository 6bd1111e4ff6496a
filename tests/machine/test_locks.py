"""gdn_cli.machine.locks: one holder per GPU among processes that come, wait and die."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile

import helpers
import pytest

from gdn_cli.machine import locks

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
ARGS = ["bench", "--algo", "cuda-v4"]

# holds the lock until a line comes in; {inside} runs while it does
HOLDER = """
import os, signal, subprocess, sys
from gdn_cli.machine import locks
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with it ignored
say = lambda line: print(line, flush=True)
with locks.gpu({uuid!r}, say, "GPU 0"):
    {inside}
    say("held")
    sys.stdin.readline()
say("free")
"""


class Busy(Exception):
    """Raised instead of waiting: the lock is another's."""


def busy(line: str):
    raise Busy(line)


def unexpected(line: str):
    raise AssertionError(line)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The lock's file, in a folder of the test's own."""
    monkeypatch.setenv("GDN_LOCK_DIR", str(tmp_path))
    return tmp_path / f"gdn-{UUID}.lock"


@pytest.fixture
def start(file):
    """start() -> a process that takes the lock; all of them are gone after the test."""
    started = []

    def start(inside: str = "pass", uuid: str = UUID) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER.format(uuid=uuid, inside=inside), *ARGS]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=helpers.environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen) -> str:
    return process.stdout.readline().rstrip("\n")


def release(process: subprocess.Popen):
    process.stdin.write("\n")
    process.stdin.flush()


def waiting_line(process: subprocess.Popen) -> str:
    return f"GPU 0 is in use by `gdn bench --algo cuda-v4` (pid {process.pid}); waiting"


def test_two_processes_exclude_each_other(start):
    first = start()
    assert says(first) == "held"
    second = start()
    assert says(second) == waiting_line(first)
    with pytest.raises(Busy), locks.gpu(UUID, busy):
        pass
    release(first)
    assert says(first) == "free"
    assert says(second) == "held"
    with pytest.raises(Busy, match=f"pid {second.pid}"), locks.gpu(UUID, busy):
        pass
    release(second)
    assert says(second) == "free"
    with locks.gpu(UUID, unexpected):
        pass


def test_the_waiting_line_comes_once(start, monkeypatch):
    holder = start()
    assert says(holder) == "held"
    expected, naps, lines = waiting_line(holder), [], []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            release(holder)
            assert says(holder) == "free"

    monkeypatch.setattr(locks.time, "sleep", nap)
    with locks.gpu(UUID, lines.append, "GPU 0"):
        assert lines == [expected]
    assert naps == [locks._POLL_S] * 3


def test_the_cpu_has_one_lock_and_no_gpu_waits_for_it(file):
    with locks.cpu(unexpected):
        child = "from gdn_cli.machine import locks\nimport sys\ndef say(line):\n    sys.exit(line)\n"
        done = [
            subprocess.run(
                [sys.executable, "-c", f"{child}with locks.{asked}:\n    pass", *ARGS],
                capture_output=True, text=True, env=helpers.environment(),
            )
            for asked in ("cpu(say)", f"gpu({UUID!r}, say)")
        ]  # fmt: skip
    assert done[0].returncode == 1 and done[1].returncode == 0 and not done[1].stderr
    said = done[0].stderr
    assert said.startswith("the CPU is in use by `gdn")
    assert said.endswith(f"(pid {os.getpid()}); waiting\n")
    assert (file.parent / "gdn-cpu.lock").read_text() == ""


def test_a_killed_holder_blocks_nobody(start, file):
    holder = start()
    assert says(holder) == "held"
    holder.kill()
    holder.wait()
    assert "cuda-v4" in file.read_text()  # it had no time to tidy up
    file.write_text(file.read_text() + 200 * "x")
    with locks.gpu(UUID, unexpected):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert file.read_text() == ""


@pytest.mark.parametrize(
    "bears",
    [
        (
            "say(subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'],"
            " close_fds=False).pid)"
        ),
        # the parent goes on when the child is there: until then it does have a copy
        (
            "r, w = os.pipe(); pid = os.fork(); pid or (os.write(w, b'x'), sys.stdin.read(),"
            " os._exit(0)); os.read(r, 1); say(pid)"
        ),
    ],
    ids=["spawned", "forked"],
)
def test_a_child_does_not_inherit_it(start, bears):
    holder = start(inside=bears)
    child = int(says(holder))
    assert says(holder) == "held"
    with pytest.raises(Busy), locks.gpu(UUID, busy):  # the child's birth freed nothing
        pass
    holder.kill()
    holder.wait()
    assert helpers.alive(child)
    with locks.gpu(UUID, unexpected):
        pass
    holder.stdin.close()  # the child's as well: it ends
    holder.stdin = None


def test_a_forked_child_that_ends_properly_leaves_the_lock_alone(start):
    leaves = (
        "pid = os.fork()\n    if not pid: sys.exit()\n    say(os.waitpid(pid, 0)[1])"
    )
    holder = start(inside=leaves)
    assert [says(holder), says(holder)] == ["0", "held"]
    with pytest.raises(Busy), locks.gpu(UUID, busy):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(start, number):
    holder = start()
    assert says(holder) == "held"
    waiter = start()
    assert says(waiter).endswith("; waiting")
    waiter.send_signal(number)
    out, _ = waiter.communicate(timeout=helpers.PATIENCE_S)
    assert (waiter.returncode, out) == (-number, "")


def test_the_end_frees_it_whoever_has_a_copy(start, file):
    with locks.gpu(UUID, unexpected):
        copy = os.dup(locks._held[file])  # as a fork in C code leaves one
    assert says(start()) == "held"
    os.close(copy)


def test_an_error_inside_frees_it(start):
    with pytest.raises(ZeroDivisionError), locks.gpu(UUID, unexpected):
        raise ZeroDivisionError
    assert says(start()) == "held"


def test_one_process_does_not_wait_for_itself(start, file):
    with locks.gpu(UUID, unexpected):
        with locks.gpu(UUID, unexpected):
            pass
        other = start()
        assert f"pid {os.getpid()}" in says(other)  # the inner one's end freed nothing
    assert says(other) == "held"


# --- what a file that any user may write can say


def line_for(content: bytes, start, file) -> str:
    assert says(start()) == "held"
    file.write_bytes(content)
    with pytest.raises(Busy) as e, locks.gpu(UUID, busy, "GPU 0"):
        pass
    return str(e.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 4096,
        b"[1]",
        b'{"pid": 1}',
        b'{"pid": "x", "command": "y"}',
        b'{"pid": Infinity, "command": "y"}',
    ],
)
def test_a_holder_that_cannot_be_read(content, start, file):
    assert (
        line_for(content, start, file) == "GPU 0 is in use by another command; waiting"
    )


def test_a_holder_s_command_has_no_escapes(start, file):
    command = "gdn \x1b[31m`\u202ebench\n" + "x" * 200
    content = json.dumps({"pid": 12, "command": command})
    line = line_for(content.encode(), start, file)
    assert line.startswith(r"GPU 0 is in use by `gdn \x1b[31m\u202ebench\nxxxx")
    assert line.endswith("xxxx` (pid 12); waiting") and line.isprintable()
    assert len(line) < 160


# --- without a lock


def without(reason: str) -> str:
    return f"no lock on GPU 0 ({reason}): another command may use it meanwhile"


def told() -> list[str]:
    """What `waiting` is told by a block that runs in any case."""
    lines, ran = [], False
    with locks.gpu(UUID, lines.append, "GPU 0"):
        ran = True
    assert ran
    return lines


def test_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("GDN_LOCK_DIR", str(tmp_path / "none"))
    assert told() == [
        without(f"{tmp_path}/none/gdn-{UUID}.lock: No such file or directory")
    ]


def test_a_read_only_folder(monkeypatch, file):
    real = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *mode)

    # root may write wherever a chmod forbids it
    monkeypatch.setattr(os, "open", read_only)
    assert told() == [without(f"{file}: Read-only file system")]


def test_a_link_is_not_followed(file, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    file.symlink_to(precious)
    assert told() == [without(f"{file}: Too many levels of symbolic links")]
    file.unlink()
    file.symlink_to(tmp_path / "new")
    assert told() == [without(f"{file}: Too many levels of symbolic links")]
    assert not (tmp_path / "new").exists()
    file.unlink()
    os.link(precious, file)
    assert told() == [without(f"{file}: not a plain file")]
    assert precious.read_text() == "keep"


def test_a_lock_that_is_not_a_plain_file(file):
    os.mkfifo(file)
    assert told() == [without(f"{file}: not a plain file")]
    file.unlink()
    file.mkdir()
    assert told() == [without(f"{file}: Is a directory")]


def test_a_file_system_without_locks(monkeypatch, file):
    def refuse(fd, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert told() == [without(f"{file}: No locks available")]


def test_all_users_may_lock_it(file):
    before = os.umask(0o077)
    try:
        with locks.gpu(UUID, unexpected):
            assert stat.S_IMODE(file.stat().st_mode) == 0o666
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_a_file_that_is_tidied_away_meanwhile(monkeypatch, file, start):
    real, tidied = locks.fcntl.flock, []

    def flock(fd, how):
        if not tidied:
            tidied.append(file.unlink())
        real(fd, how)

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with locks.gpu(UUID, unexpected):
        assert f"pid {os.getpid()}" in says(start())


def test_the_shared_folder_is_the_system_s(monkeypatch):
    monkeypatch.delenv("GDN_LOCK_DIR")
    # TMPDIR: each user's own, no place to meet
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere/else")
    # a slice's old name
    assert str(locks._file("MIG-GPU-3/7/0")) == "/tmp/gdn-MIG-GPU-3_7_0.lock"
