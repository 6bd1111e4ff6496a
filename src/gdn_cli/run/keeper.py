"""A process around one worker that lets no process outlive it: `python -I -S keeper.py
FOLDER [--cpus 0,1] -- COMMAND ...`

It is a subreaper (prctl, Linux): any process that the worker starts, in another session
or forked twice, becomes its child once the parent is gone. When the command ends, on
SIGTERM, and when the process that started this one dies in any way, all of them are
killed and FOLDER is deleted. It ends with the command's exit code or signal.

Standard library only, and nothing of gdn: it must start in milliseconds, and runs
outside the package.
"""

import os
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PASSES = 1000  # over the process table: with a fork bomb more would not help


def main(folder: str, cpus: set[int], command: list[str]) -> int:
    """Run the command and clean up after it; returns its return code as in Popen."""
    # it holds the request for a moment, and the pipe that records go to
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:  # the allowed CPUs have changed: run on those
            pass
    child = None
    try:
        child = subprocess.Popen(command, close_fds=False)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):  # only the worker uses the request and the reply
            os.dup2(nothing, descriptor)
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(os.getpid())
        if child:
            child.poll()
        shutil.rmtree(folder, ignore_errors=True)


def end_all(root: int) -> None:
    """Kill every descendant of `root`, which is this process, including those that
    appear meanwhile.
    """
    for _ in range(_PASSES):
        pids = descendants(root)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        _reap()
        if not pids:
            return


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except OSError:
        pass


def descendants(root: int) -> list[int]:
    """The living descendants of `root`; without /proc the members of its process group."""
    parents = {}
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in entries:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
        except (OSError, IndexError, ValueError):
            continue
        if state not in (b"Z", b"X"):
            parents[pid] = int(parent)
    pids: list[int] = []
    level = {root}
    while level:
        level = {
            pid
            for pid, parent in parents.items()
            if parent in level and pid not in pids
        }
        pids += level
    return pids


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    mark = sys.argv.index("--")
    options = sys.argv[2:mark]
    cpus = {int(cpu) for cpu in options[1].split(",")} if options else set()
    code = main(sys.argv[1], cpus, sys.argv[mark + 1 :])
    if code < 0:  # end by the same signal as the command
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            signal.signal(-code, signal.SIG_DFL)
        except OSError:  # SIGKILL
            pass
        os.kill(os.getpid(), -code)
    os._exit(code)
