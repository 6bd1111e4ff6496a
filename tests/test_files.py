"""How a file is written: whole or not at all, links followed, streams and devices kept.
And what is read.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import helpers
import pytest

from gdn_cli import errors, files
from gdn_cli.errors import MissingError, UsageError


@contextmanager
def no_file_above(size: int):
    """Linux refuses to let a file grow beyond `size` bytes: a write succeeds in part,
    then fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        # Python keeps bytecode that was half written
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def raising(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


# --- whole or not at all


def test_a_file_is_written_with_its_folders_and_the_rights_that_the_umask_leaves(
    tmp_path,
):
    file = tmp_path / "a" / "b" / "x.json"
    files.write(file, "größe\n")
    assert file.read_bytes() == "größe\n".encode() and names(file.parent) == ["x.json"]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode
    files.write(file, b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"


def test_an_older_file_s_rights_and_owner_are_kept(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 1234, 1235)
    before = file.stat()
    files.write(file, "new")
    after = file.stat()
    assert file.read_text() == "new" and after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )


def test_a_write_that_breaks_off_leaves_the_older_file(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    with no_file_above(1000), pytest.raises(MissingError) as e:
        files.write(file, "n" * 100_000)
    assert (
        str(e.value)
        == f"cannot write {file}: File too large; -o FILE names another place"
    )
    assert file.read_text() == "old" and names(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "chmod"])
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]
)
def test_a_fault_at_any_step_leaves_the_older_file_and_nothing_beside_it(
    call, number, tmp_path, monkeypatch
):
    file = tmp_path / "x"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, raising(number))
        with pytest.raises(errors.GdnError) as e:
            files.write(file, "new")
    assert str(e.value).startswith(
        f"cannot write {file}: {os.strerror(number)}"
    ) and "\n" not in str(e.value)
    # the name's fault, or not
    assert e.value.code == (errors.USAGE if number == errno.EACCES else errors.MISSING)
    assert file.read_text() == "old" and names(tmp_path) == ["x"]


def test_an_interrupted_write_leaves_the_older_file(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.beside(file) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert file.read_text() == "old" and names(tmp_path) == ["x"]


def test_a_file_that_is_not_to_be_written_stays():
    """Renaming would bypass a file's own permissions. Run as a user without root's rights."""
    code = """if True:
        import os, pathlib, sys
        from gdn_cli import errors, files
        file = pathlib.Path(sys.argv[1]) / "x"
        if os.geteuid() == 0:
            os.chown(file.parent, 1234, 1234), os.chown(file, 1234, 1234)
            os.setgid(1234), os.setuid(1234)
        for _ in range(2):
            try:
                files.write(file, "new")
            except errors.UsageError as e:
                print(e)
            os.chmod(file, 0o600), os.chmod(file.parent, 0o500)
    """
    # pytest's own folders are closed to the other user
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "x"
        file.write_text("old")
        file.chmod(0o400)
        done = helpers.python("-c", code, name)
        assert done.code == 0, done.err
        first, second = done.out.splitlines()
        assert "the file is read-only" in first and "Permission denied" in second
        Path(name).chmod(0o700)
        assert file.read_text() == "old" and names(file.parent) == ["x"]


def test_lines_are_appended(tmp_path):
    file = tmp_path / "x.jsonl"
    files.append_text(file, "one\n")
    with no_file_above(1000), pytest.raises(MissingError, match="File too large"):
        files.append_text(file, "n" * 5000)
    assert file.read_text().startswith("one\nnnn")


# --- links


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, second = (
        tmp_path / "there" / "x",
        tmp_path / "link",
        tmp_path / "second",
    )
    target.write_text("old")
    link.symlink_to("there/x")
    second.symlink_to(link)
    files.write(second, "new")
    assert target.read_text() == "new" and link.is_symlink() and second.is_symlink()
    assert names(tmp_path) == ["link", "second", "there"] and names(target.parent) == [
        "x"
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p.mkdir(), "it is a folder"),
        (lambda p: p.symlink_to(p.with_name("none")), "it is a link to {folder}/none, which is not there"),
        (lambda p: p.symlink_to(p), "Too many levels of symbolic links"),
        (lambda p: p.symlink_to("/"), "it is a folder"),
        (lambda p: os.mknod(p, 0o600 | stat.S_IFSOCK), "it is a socket"),
    ],
    ids=["folder", "dangling", "circle", "link to a folder", "socket"],
)  # fmt: skip
def test_paths_that_cannot_be_files_are_refused(make, says, tmp_path):
    make(tmp_path / "x")
    for act in (
        lambda: files.write(tmp_path / "x", "new"),
        lambda: files.check_writable(tmp_path / "x"),
    ):
        with pytest.raises(UsageError) as e:
            act()
        assert (
            e.value.message
            == f"cannot write {tmp_path}/x: {says.format(folder=tmp_path)}"
        )
    assert names(tmp_path) == ["x"]


def test_a_disk_is_never_written_to(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    os.mknod(tmp_path / "x", 0o600 | stat.S_IFBLK, os.makedev(7, 200))
    with pytest.raises(UsageError, match="it is a disk"):
        files.write(tmp_path / "x", "new")
    assert stat.S_ISBLK((tmp_path / "x").stat().st_mode)


@pytest.mark.parametrize("name", ["../x", "out", "sub/../../x", "away/x", "stream"])
def test_within_a_folder_means_where_links_lead(name, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "x").write_text("old")
    (folder / "out").symlink_to("../x")
    (folder / "away").symlink_to(tmp_path)
    (folder / "stream").symlink_to("/dev/null")
    with pytest.raises(UsageError, match="leads out of"):
        files.write(folder / name, "new", within=folder)
    assert (tmp_path / "x").read_text() == "old" and names(folder) == [
        "away",
        "out",
        "stream",
    ]
    files.write(folder / "y", "new", within=tmp_path / "folder")
    assert (folder / "y").read_text() == "new"


def test_nobody_can_put_a_link_where_the_new_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "guessed")
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / ".x.guessed").symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match="File exists"):
        files.write(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "theirs" and not (
        tmp_path / "x"
    ).exists()


# --- streams


def test_a_device_stays_one(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    before = os.stat("/dev/null").st_ino
    for name in ("/dev/null", link):
        files.check_writable(name)
        files.write(name, "text")
    assert (
        stat.S_ISCHR(os.stat("/dev/null").st_mode)
        and os.stat("/dev/null").st_ino == before
    )
    assert link.is_symlink()


def test_a_pipe_is_written_into(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    files.write(pipe, "text")
    reader.join(10)
    assert got == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)


_STDOUT = """if True:
    import sys
    from gdn_cli import files
    print("before")
    files.write(sys.argv[1], "written\\n")
    print("after", files.is_stdout(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"]
)
def test_stdout_gets_it_in_its_turn_whatever_it_is(name, tmp_path):
    if name == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        name = str(tmp_path / "link")
    wanted = "before\nwritten\nafter True\n"
    assert helpers.python("-c", _STDOUT, name).out == wanted  # a pipe
    file = tmp_path / "file"
    with file.open("w") as f:  # which is written into, not replaced
        subprocess.run([sys.executable, "-c", _STDOUT, name], stdout=f, check=True)
        assert (
            os.fstat(f.fileno()).st_ino == file.stat().st_ino
            and file.read_text() == wanted
        )


def test_a_descriptor_that_is_not_open(tmp_path):
    with pytest.raises(UsageError, match="cannot write /dev/fd/987: "):
        files.write("/dev/fd/987", "text")
    assert not files.is_stdout(tmp_path / "x")


# --- reading


def _long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk


NO_FILES = {
    "folder": (lambda p: p.mkdir(), "Is a directory"),
    "pipe": (os.mkfifo, "it is a pipe, not a plain file"),
    "socket": (
        lambda p: os.mknod(p, 0o600 | stat.S_IFSOCK),
        "it is a socket, not a plain file",
    ),
    "link to a device without end": (
        lambda p: p.symlink_to("/dev/zero"),
        "it is a device, not a plain file",
    ),
    "link to a terminal": (
        lambda p: p.symlink_to("/dev/ptmx"),
        "it is a device, not a plain file",
    ),
    "link in a circle": (
        lambda p: p.symlink_to(p),
        "Too many levels of symbolic links",
    ),
    "link to nothing": (lambda p: p.symlink_to("none"), "No such file or directory"),
    "file in a file": (lambda p: None, "Not a directory"),
    "too long": (_long, "it has more than 256 MiB"),
    "long name": (lambda p: None, "File name too long"),
    "zero byte": (lambda p: None, "no file can have this name"),
    "half a character": (lambda p: None, "no file can have this name"),
}


@pytest.fixture(params=NO_FILES)
def no_file(request, tmp_path):
    """A path that no file can be read from, and why."""
    make, why = NO_FILES[request.param]
    path = tmp_path / "x.json"
    make(path)
    (tmp_path / "plain").write_text("")
    names = {
        "file in a file": "plain/x.json",
        "long name": "x" * 10_000 + ".json",
        "zero byte": "x\0.json",
        "half a character": "x\ud800.json",
    }
    return tmp_path / names.get(request.param, "x.json"), why


def test_only_a_plain_file_is_read(no_file):
    path, why = no_file
    with pytest.raises(OSError) as e:
        files.read(path)
    assert e.value.strerror == why


def test_a_plain_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")
    assert files.read(tmp_path / "link", most=5) == b"12345"
    with pytest.raises(OSError):
        files.read(file, most=4)
    assert files.read(Path("/proc/self/stat"))  # which says that it has no bytes


def test_no_source_reads_a_file_in_another_way():
    """Each file that a user or anyone else may have written goes through `files.read`."""
    package = Path(files.__file__).parent
    own = {"worker", "remote"}  # their files are gdn's own
    # these read the kernel's files in /proc and /sys
    system = {"environment", "gpu_sharing", "host_load", "inventory", "linux", "locks"}
    reads = re.compile(r"\.read_(text|bytes)\(|json\.load\(")
    others = set()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        if room not in own and reads.search(path.read_text(encoding="utf-8")):
            others.add(path.stem)
    assert others - system == set()
