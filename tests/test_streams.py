"""Streams that are closed, full or left by their reader: every command ends as it
would, and loses nothing.
"""

import os
import subprocess
import sys

import helpers
import pytest

from gdn_cli import errors

_GDN = [sys.executable, "-m", "gdn_cli"]
_COMMANDS = [
    (["list"], errors.OK),
    (["list", "--json"], errors.OK),
    (["--help"], errors.OK),
    (["show", "nothing"], errors.USAGE),
    (["show", "nothing", "--json"], errors.USAGE),
]
_IDS = [" ".join(args) for args, _ in _COMMANDS]


def through(redirection: str, command: list[str], **how) -> subprocess.CompletedProcess:
    """A command with streams as the shell opens or closes them."""
    line = ["bash", "-c", f'"$@" {redirection}', "bash", *command]
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        env=helpers.environment(),
        timeout=helpers.PATIENCE_S,
        **how,
    )


@pytest.mark.parametrize(("args", "code"), _COMMANDS, ids=_IDS)
@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "2>/dev/full"]
)
@pytest.mark.sampled(11)
def test_closed_streams_change_nothing_else(redirection, args, code):
    done = through(redirection, [*_GDN, *args])
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    if redirection in ("2>&-", "<&-", "2>/dev/full") and code == errors.OK:
        assert done.stdout


@pytest.mark.parametrize(("args", "code"), _COMMANDS, ids=_IDS)
@pytest.mark.sampled(2)
def test_a_full_stdout_is_exit_3_unless_the_command_has_failed(args, code):
    done = through(">/dev/full", [*_GDN, *args])
    assert done.returncode == (code or errors.MISSING)
    assert ("cannot write the output: No space left on device" in done.stderr) == (
        code == errors.OK
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def read_by_nobody(args: list[str], **how) -> subprocess.CompletedProcess:
    """`gdn ARGS` into a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        env = helpers.environment()
        return subprocess.run(
            [*_GDN, *args],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            **how,
        )


@pytest.mark.parametrize(("args", "code"), _COMMANDS, ids=_IDS)
@pytest.mark.sampled(2)
def test_a_reader_that_has_left_changes_no_exit_code(args, code):
    done = read_by_nobody(args)
    assert (
        done.returncode == code
        and "Traceback" not in done.stderr
        and "Exception" not in done.stderr
    )


def test_a_packed_file_may_go_to_a_reader_that_leaves(tmp_path):
    done = read_by_nobody(
        ["pack", "--algo", "cpp-v1", "-o", "/dev/stdout"], cwd=tmp_path
    )
    assert (
        done.returncode == 0
        and done.stderr.startswith("gdn: /dev/stdout: ")
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("columns", ["0", "00", "-5", "wide", "", "9" * 30])
def test_a_width_that_no_screen_has_hides_nothing(columns, gdn):
    assert "gdn_decode" in gdn("list", env={"COLUMNS": columns}).out


_WORKS_ON = """if True:
    import os, sys
    from gdn_cli import streams, text
    streams.keep(), text.guard()
    for i in range(20000):
        print("a line of the result"), print("a line of progress", file=sys.stderr)
    os.system("echo a child process; echo its log >&2")
    opened = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    os.write(opened, f"{opened} {streams.fault()}".encode())
"""


@pytest.mark.parametrize(
    ("redirection", "fault"),
    [
        (">&- 2>&- <&-", "None"),
        ("2>&-", "None"),
        (">/dev/full 2>/dev/full", "No space left on device"),
        ("1</dev/null 2</dev/null", "Bad file descriptor"),
        ("2>&1 | head -c 1", "None"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_work_goes_on_and_no_file_gets_the_number_of_a_stream(
    redirection, fault, unbuffered, tmp_path
):
    file = tmp_path / "file"
    done = through(
        redirection,
        [
            "env",
            f"PYTHONUNBUFFERED={unbuffered}",
            sys.executable,
            "-c",
            _WORKS_ON,
            str(file),
        ],
    )
    number, told = file.read_text().split(" ", 1)
    assert int(number) > 2 and told == fault
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_stream_that_is_busy_is_waited_for():
    """Another process may have made a pipe non-blocking."""
    script = (
        "import os, sys; os.set_blocking(1, False)\n"
        "from gdn_cli import streams; streams.keep()\n"
        "print('x' * 1_000_000); sys.exit(bool(streams.fault()))\n"
    )
    done = through(
        "| { read -r line; echo ${#line}; cat; }", [sys.executable, "-c", script]
    )
    assert (done.stdout, done.stderr) == ("1000000\n", "")
