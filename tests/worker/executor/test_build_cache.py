"""The folder of builds: what of it is damaged is made again, and one that cannot be
used is not the algo's fault.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest

from gdn_cli import errors
from gdn_cli.catalog import registry
from gdn_cli.tune import search
from gdn_cli.worker.executor import build, build_cache

HOLDER = """if True:
    import sys
    from pathlib import Path
    from gdn_cli.machine import locks
    with locks.hold(Path(sys.argv[1]), print, "it"):
        print("held", flush=True)
        sys.stdin.readline()
"""


class Busy(Exception):
    pass


def busy(line: str):
    raise Busy(line)


@pytest.fixture
def held():
    """held(file): another process has the lock on it from now on; the line that names
    this process.
    """
    started = []

    def hold(file: Path) -> str:
        command = [sys.executable, "-c", HOLDER, str(file)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=helpers.environment()
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return f"(pid {process.pid})"

    yield hold
    for process in started:
        process.kill()
        process.communicate()


# --- damage


@pytest.fixture
def library(tmp_path):
    """A library in the folder of a build."""
    file = tmp_path / "build" / "x.so"
    file.parent.mkdir()
    file.write_bytes(b"compiled")
    (file.parent / "main.o").write_text("what it was linked from")
    build_cache.sign(file)
    return file


def flipped(file: Path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda f: f.write_bytes(b""),
        lambda f: os.truncate(f, f.stat().st_size - 1),
        lambda f: f.with_name("x.so.sha256").unlink(),
    ],
)
def test_damage_is_found_before_loading(damage, library):
    assert build_cache.drop_damaged(library) and library.is_file()
    damage(library)
    assert not build_cache.drop_damaged(library)
    assert not library.parent.exists()  # nor what the next one would be linked from


@pytest.mark.slow
def test_a_library_that_was_cut_short_is_compiled_again(tmp_path, gdn):
    source = """
    #include <tvm/ffi/tvm_ffi.h>
    void run(tvm::ffi::TensorView q) {}
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
    """
    helpers.write_algo(
        tmp_path / "own",
        "x",
        {"k.cpp": source},
        language="cpp",
        entry_point="k.cpp::run",
    )
    env = {
        "GDN_HOME": str(tmp_path / "home"),
        "FIB_CACHE_PATH": str(tmp_path / "cache"),
    }
    args = "run", "--algos", tmp_path / "own", "--algo", "x", "-w", "0", "--json"
    first = gdn(*args, env=env).json["records"][0]
    (made,) = (tmp_path / "cache").rglob("*.so")
    before = made.read_bytes()
    os.truncate(made, len(before) // 2)
    again = gdn(*args, env=env).json["records"][0]
    assert (
        first["status"] == again["status"] != "build_failed"
        and first["reason"] == again["reason"]
    )
    assert len(made.read_bytes()) == len(before)


class Registry:
    """Stands in for flashinfer-bench's: `answers` are the results of its builds, one
    after the other.
    """

    def __init__(self, folder: Path, *answers) -> None:
        self.answers, self._cache, self.folder = list(answers), {}, folder
        self._builders = [self]
        self._build_dir_name = "tvm_ffi"

    def can_build(self, solution):
        return True

    def _get_package_name_and_build_path(self, solution):
        return "x", self.folder

    def build(self, definition, solution):
        answer = self.answers.pop(0)
        self._cache[solution.hash()] = answer
        if isinstance(answer, Exception):
            raise answer
        return answer


SOLUTION = SimpleNamespace(hash=lambda: "hash")


@pytest.fixture
def built(monkeypatch, library):
    """built(*answers) -> what build._built returns, with a whole library in the cache."""

    def run(*answers):
        from flashinfer_bench.compile import BuilderRegistry

        fake = Registry(library.parent, *answers)
        monkeypatch.setattr(BuilderRegistry, "get_instance", lambda: fake)
        return build._built(None, SOLUTION)

    return run


def test_a_whole_library_that_cannot_be_loaded_is_compiled_again_once(built, library):
    assert built(RuntimeError("undefined symbol"), "good") == "good"
    assert not library.parent.exists()
    library.parent.mkdir()
    library.write_bytes(b"compiled")
    build_cache.sign(library)
    with pytest.raises(RuntimeError, match="second"):
        built(RuntimeError("first"), RuntimeError("second"), "third")


def test_an_algo_that_does_not_compile_is_compiled_once(built, library):
    library.unlink()
    with pytest.raises(RuntimeError, match="no such header"):
        built(RuntimeError("no such header"), "never")


# --- the machine's fault


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]
)
def test_a_cache_that_cannot_be_written_is_the_machine_s_fault(
    number, tmp_path, monkeypatch
):
    def fail(**more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(build.BuildFailedError) as e:
        build._cache()
    says = (
        f"the build cache {tmp_path}/cache cannot be written: {os.strerror(number)};"
        " FIB_CACHE_PATH or"
    )
    assert e.value.missing and str(e.value).startswith(says)


def test_a_cache_on_a_full_or_read_only_disk_is_exit_3(tmp_path, gdn):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "gdn", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount")
    env = {"GDN_HOME": str(tmp_path / "home"), "FIB_CACHE_PATH": str(disk / "cache")}
    args = "run", "--algo", "pt-reference", "-w", "0"
    try:
        full = gdn(*args, env=env)  # room for a lock, and not for the sources
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        read_only = gdn(*args, env=env)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    for done, says in (
        (full, "No space left on device"),
        (read_only, "Read-only file system"),
    ):
        assert done.code == errors.MISSING, done.out + done.err
        assert says in done.out and "Traceback" not in done.out + done.err


def test_another_user_s_cache_is_not_run_from(tmp_path, gdn):
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o1777)
    (shared / "cache").chmod(0o777)
    env = {"GDN_HOME": str(tmp_path / "home"), "FIB_CACHE_PATH": str(shared / "cache")}
    done = gdn("run", "--algo", "pt-reference", "-w", "0", env=env)
    assert done.code == errors.MISSING and "others may write to" in " ".join(
        done.out.split()
    )
    assert list((shared / "cache").iterdir()) == []


# --- waiting


def test_who_waits_for_a_build_says_for_whom(held, tmp_path, monkeypatch):
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(build, "_say", busy)
    holder = held(tmp_path / "locks" / "gdn_decode_x")
    with (
        pytest.raises(Busy) as e,
        build._alone(tmp_path, "gdn_decode/x", "gdn_decode-x"),
    ):
        pass
    assert str(e.value).startswith(
        "the build of gdn_decode-x is in use by `gdn "
    ) and holder in str(e.value)
    with build._alone(tmp_path, "another", "another"):
        pass


def test_two_tunes_of_one_algo_wait_for_each_other(held, tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_LOCK_DIR", str(tmp_path))
    first, second = registry.load().find("cuda-v5"), registry.load().find("cpp-v1")
    with search.alone(first, busy):
        (file,) = tmp_path.glob("gdn-tune-*.lock")
    holder = held(file)
    with pytest.raises(Busy) as e, search.alone(first, busy):
        pass
    assert str(e.value).startswith(
        "gdn_decode/cuda-v5 is in use by `gdn "
    ) and holder in str(e.value)
    with search.alone(second, busy):
        pass
