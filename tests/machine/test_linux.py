"""What Linux keeps from other processes of the same user."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux only"
)

CONFINED = """
import os, shutil, signal, sys, tempfile
from gdn_cli.machine import linux

if not linux.confine():
    sys.exit(77)
parent = os.getppid()
for path in (f"/proc/{parent}/mem", f"/proc/{parent}/fd/0"):
    try:
        open(path, "rb").close()
    except OSError:
        continue
    sys.exit(f"{path} can be opened")
one, two = tempfile.mkdtemp(), tempfile.mkdtemp()
open(f"{one}/file", "w").close()
os.rename(f"{one}/file", f"{two}/file")  # as caches of compilers do
shutil.rmtree(one), shutil.rmtree(two)
child = os.fork()
if not child:
    signal.pause()
os.kill(child, signal.SIGTERM)  # its own processes are its own
os.waitpid(child, 0)
"""


def test_a_confined_process_cannot_look_into_others_and_works_as_before():
    done = subprocess.run(
        [sys.executable, "-c", CONFINED], capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("this Linux has no Landlock of 5.19 or newer")
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_is_hidden():
    code = (
        "import ctypes; from gdn_cli.machine import linux\n"
        "dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE\n"
        "print(dumpable()); linux.hide_memory(); print(dumpable())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "0"]
