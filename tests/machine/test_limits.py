"""A machine without room for a worker: its fault, in one line, and never the algo's."""

import itertools
import os
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager

import helpers
import pytest

from gdn_cli import errors
from gdn_cli.machine import limits


@contextmanager
def files_up_to(most: int):
    """This process may have descriptors below `most`, which the system enforces for root too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def tried_anew():
    limits.check.cache_clear()
    yield
    limits.check.cache_clear()


def test_a_usual_machine_has_room_and_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    limits.check()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_too_few_files():
    free = (descriptor for descriptor in itertools.count() if not is_open(descriptor))
    *_, fifth = itertools.islice(free, 5)
    with files_up_to(fifth + 1), pytest.raises(errors.MissingError) as e:
        limits.check()
    assert (
        e.value.message
        == f"{limits.FILES} more open files are needed, this machine gives 5"
    )
    limits.check()


def test_too_few_threads(monkeypatch):
    start, started = threading.Thread.start, []

    def refused(thread):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(
        errors.MissingError,
        match="^20 more processes and threads are needed, this machine gives 3; ",
    ):
        limits.check()
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("asked", "count"),
    [("3", 3), ("4,2", 4), ("", None), ("0", None), ("-1", None), ("x", None)],
)
def test_threads_of_a_library(asked, count, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert limits.threads() == (count or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("command", ["run", "bench", "compare"])
@pytest.mark.sampled(2)
def test_no_algo_is_blamed(command, tmp_path):
    algos = ["pt-reference", "cpp-v1"] if command == "compare" else ["pt-reference"]
    gdn = [
        sys.executable,
        "-m",
        "gdn_cli",
        command,
        *algos,
        "-w",
        "0",
        "--device",
        "cpu",
    ]
    line = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash", *gdn]
    done = subprocess.run(
        line, capture_output=True, text=True, env=helpers.environment(), cwd=tmp_path
    )
    assert done.returncode == errors.MISSING and done.stdout == ""
    # a line before these may say that the machine is busy
    first, hint = done.stderr.splitlines()[-2:]
    assert (
        first.startswith("gdn: 64 more open files are needed, this machine gives ")
        and "ulimit -a" in hint
    )


def test_a_user_who_may_have_three_processes():
    """Root has no such limit: the process becomes another user's once it has imported
    all that it needs.
    """
    code = """if True:
        import os, resource
        from gdn_cli.machine import limits
        if os.geteuid() == 0:
            os.setgid(54321), os.setuid(54321)
        resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
        try:
            limits.check()
        except Exception as e:
            print(e.code, e.message)
    """
    done = helpers.python("-c", code, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.err
    assert done.out.startswith(
        "3 16 more processes and threads are needed, this machine gives "
    )
