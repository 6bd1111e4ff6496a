"""Where things lie: the algos and configs that ship with gdn, and the user's own
folders for results and builds.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import MissingError, UsageError

PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = PACKAGE.parent.parent

# A checkout keeps algos/ and configs/ at its top; a wheel carries them inside the package.
# Of a checkout only.
PYPROJECT = _CHECKOUT / "pyproject.toml"
IN_CHECKOUT = PYPROJECT.is_file() and (_CHECKOUT / "algos").is_dir()
_ROOT = _CHECKOUT if IN_CHECKOUT else PACKAGE
ALGOS_DIR = _ROOT / "algos"
CONFIGS_DIR = _ROOT / "configs"


def home() -> Path:
    """The user's home folder: HOME, or what the system says of this user. MissingError if there is
    none, as for a user of a container who has no entry in its passwd."""
    try:
        import pwd

        listed = pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        listed = ""
    for name in (os.environ.get("HOME", ""), listed):
        if os.path.isabs(name):
            return Path(name)
    hint = "HOME names one; GDN_HOME names a folder for gdn alone"
    raise MissingError("this user has no home folder", hint=hint)


def expanded(name: str) -> Path:
    """A path that may begin with `~` or `~user`. UsageError if that has no home folder."""
    if name == "~" or name.startswith("~/"):
        return home() / name[2:]
    path = Path(os.path.expanduser(name))
    if name.startswith("~") and not path.is_absolute():
        hint = "./~... names a folder that begins with ~"
        raise UsageError(f"{name}: no such user: {path.parts[0][1:]}", hint=hint)
    return path


def _user_dir(kind: str, xdg: str, fallback: str) -> Path:
    if name := os.environ.get("GDN_HOME"):
        return expanded(name).absolute() / kind
    base = os.environ.get(xdg, "")  # that standard wants a relative one to be ignored
    return (Path(base) if os.path.isabs(base) else home() / fallback) / "gdn" / kind


def _data_dir(kind: str) -> Path:
    return _user_dir(kind, "XDG_DATA_HOME", ".local/share")


def runs_dir() -> Path:
    """Records of every run and bench. `GDN_HOME` moves it; else XDG_DATA_HOME, else
    ~/.local/share.
    """
    return _data_dir("runs")


def profiles_dir() -> Path:
    """A folder for each profile, next to the records."""
    return _data_dir("profiles")


def tunes_dir() -> Path:
    """Measurements of `gdn tune`, next to the records; it resumes from there."""
    return _data_dir("tunes")


def cluster_dir() -> Path:
    """A folder for each run on a cluster, next to the records: on a file system that its
    nodes share.
    """
    return _data_dir("cluster")


def harness_dir() -> Path:
    """Folders with a flashinfer-bench each, for `gdn run --official`. Next to the records."""
    return _data_dir("harness")


def config_dirs() -> list[Path]:
    """The folders of ops, presets and engines: gdn's own and the user's."""
    try:
        return [CONFIGS_DIR, _user_dir("configs", "XDG_CONFIG_HOME", ".config")]
    except MissingError:  # a user without a home
        return [CONFIGS_DIR]


def make(folder: Path) -> Path:
    """Make one of gdn's own folders and its missing parents, for this user alone
    (0700): its files are executed, or show what the user works on. An existing folder
    keeps its permissions. Raises MissingError.
    """
    try:
        for part in [*reversed(folder.parents), folder]:
            if not part.is_dir():
                part.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        reason = "Not a directory" if isinstance(e, FileExistsError) else e.strerror
        raise MissingError(
            f"cannot write {folder}: {reason}", hint="GDN_HOME names another place"
        ) from None
    return folder


def builds_dir() -> Path:
    """Where the builders put compiled code; safe to delete. `GDN_HOME` moves it; else
    XDG_CACHE_HOME, else ~/.cache.

    White space in a path breaks the builders' ninja files. In that case a folder under
    the temporary directory is used and made at once. Anyone may have made a folder of
    that name before: MissingError unless it is this user's alone, because files in it
    are executed.
    """
    folder = _user_dir("builds", "XDG_CACHE_HOME", ".cache")
    if not any(c.isspace() for c in str(folder)):
        return folder
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"gdn-builds-{user}"
    if not folder.is_symlink():
        make(folder)
    status = folder.lstat()
    private = os.name != "posix" or not status.st_mode & 0o077
    if not (stat.S_ISDIR(status.st_mode) and _trusted(status) and private):
        raise MissingError(
            f"{folder} is not a folder of yours alone (0700), and builds would be run from it",
            hint="delete it, or let GDN_HOME name a folder without white space",
        )
    return folder


def planted(folder: Path) -> str | None:
    """Why another user could have planted a path and everything in it, with the part of
    it that is theirs; None if nobody could.

    That can happen in a folder that everyone may write to, such as /tmp: whoever comes
    first gets the name.
    """
    shared = False
    path = Path(os.path.realpath(folder))
    for part in [*reversed(path.parents), path]:
        try:
            status = part.stat()
        except FileNotFoundError:
            return None
        except OSError as e:
            return f"{part}: {e.strerror}"
        if shared and not _trusted(status):
            return f"{part} belongs to another user"
        shared = shared or bool(status.st_mode & stat.S_IWOTH)
        if shared and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            return f"others may write to {part}"
    return None


def _trusted(status: os.stat_result) -> bool:
    """Whether it belongs to this user or to root."""
    return not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), 0)
