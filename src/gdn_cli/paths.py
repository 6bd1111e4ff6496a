"""Where things lie: the algos and configs that ship with gdn, and the user's own folders for results and builds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = PACKAGE.parent.parent

# A checkout keeps algos/ and configs/ at its top; a wheel carries them inside the package.
IN_CHECKOUT = (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "algos").is_dir()
_ROOT = _CHECKOUT if IN_CHECKOUT else PACKAGE
ALGOS_DIR = _ROOT / "algos"
CONFIGS_DIR = _ROOT / "configs"
PYPROJECT = _CHECKOUT / "pyproject.toml"  # of a checkout only


def _user_dir(kind: str, xdg: str, fallback: str) -> Path:
    if home := os.environ.get("GDN_HOME"):
        return Path(home).expanduser().absolute() / kind
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / fallback) / "gdn" / kind


def runs_dir() -> Path:
    """Records of every run and bench. `GDN_HOME` moves it; else XDG_DATA_HOME, else ~/.local/share."""
    return _user_dir("runs", "XDG_DATA_HOME", ".local/share")


def profiles_dir() -> Path:
    """A folder for each profile, beside the records."""
    return _user_dir("profiles", "XDG_DATA_HOME", ".local/share")


def tunes_dir() -> Path:
    """What `gdn tune` has measured so far: it goes on from there. Beside the records."""
    return _user_dir("tunes", "XDG_DATA_HOME", ".local/share")


def builds_dir() -> Path:
    """What the builders compile; safe to delete. `GDN_HOME` moves it; else XDG_CACHE_HOME, else ~/.cache.

    A path with white space breaks the builders' ninja files: then a folder of this user's under the temporary one.
    """
    folder = _user_dir("builds", "XDG_CACHE_HOME", ".cache")
    if any(c.isspace() for c in str(folder)):
        return Path(tempfile.gettempdir()) / f"gdn-builds-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    return folder
