"""gdn's own folders, whatever HOME and the other variables say."""

import pwd
from pathlib import Path

import pytest

from gdn_cli import errors, paths
from gdn_cli.errors import MissingError, UsageError

_VARIABLES = ("GDN_HOME", "HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nobody(monkeypatch):
    """A user without an entry in passwd, as a container may have."""

    def unknown(uid: int):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("home", [None, "", "relative", ".", "~", "~nouser/x"])
def test_a_home_that_is_none_is_the_one_of_passwd_or_one_line(
    home, nobody, monkeypatch
):
    if home is not None:
        monkeypatch.setenv("HOME", home)
    for folder in (paths.runs_dir, paths.builds_dir, paths.profiles_dir):
        with pytest.raises(MissingError) as e:
            folder()
        assert (
            e.value.message == "this user has no home folder"
            and "GDN_HOME names" in e.value.hint
        )
    monkeypatch.setenv("GDN_HOME", "/own")
    assert paths.runs_dir() == Path("/own/runs")
    monkeypatch.undo()
    monkeypatch.delenv("GDN_HOME", raising=False)
    monkeypatch.setenv("HOME", home or "")
    there = Path(pwd.getpwuid(paths.os.getuid()).pw_dir)
    assert paths.runs_dir() == there / ".local/share/gdn/runs"


def test_relative_folders_of_xdg_are_ignored(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_DATA_HOME", "here")
    assert paths.runs_dir() == Path("/home/me/.local/share/gdn/runs")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert paths.runs_dir() == Path("/data/gdn/runs")


def test_a_tilde_is_a_home_folder_and_an_unknown_user_is_one_line(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    root = pwd.getpwnam("root").pw_dir
    for name, path in (
        ("~", "/home/me"),
        ("~/x", "/home/me/x"),
        ("~root/x", f"{root}/x"),
        ("a/~", "a/~"),
    ):
        assert paths.expanded(name) == Path(path)
    for name in ("~nouser/x", "~nouser", "~no\udcffuser/x"):
        with pytest.raises(UsageError, match="no such user: no"):
            paths.expanded(name)


@pytest.mark.parametrize(
    "args", [["history"], ["report"], ["list", "--algos", "~nouser/x"], ["doctor"]]
)
@pytest.mark.sampled(2)
def test_no_command_ends_in_a_traceback(args, gdn, tmp_path):
    for variables in (
        {"GDN_HOME": "~nouser/x"},
        {"GDN_HOME": "", "HOME": ""},
        {"GDN_HOME": "", "HOME": "x"},
    ):
        xdg = {
            name: str(tmp_path / "xdg") for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME")
        }
        done = gdn(
            *args,
            env=xdg | {"TRITON_CACHE_DIR": str(tmp_path / "xdg")} | variables,
            cwd=tmp_path,
        )
        assert "Traceback" not in done.err and done.code in (
            errors.OK,
            errors.USAGE,
            errors.MISSING,
        )
        made = [path.name for path in tmp_path.iterdir()]
        assert made in ([], ["xdg"])  # nothing under a name that is no folder
    done = gdn(*args, env={"GDN_HOME": "~nouser/x"}, cwd=tmp_path)
    assert "~nouser/x: no such user: nouser" in (
        done.out if args == ["doctor"] else done.err
    )
