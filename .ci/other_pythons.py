"""The quick tests of the command on the lowest and the highest other Python that this machine has.

    python .ci/other_pythons.py

Others than the one that runs this, of those that pyproject.toml allows. Each gets a venv in .ci/venvs without torch,
which would take minutes and gigabytes; the tests that need torch are skipped there. A Python for which nothing can be
installed because there is no network is passed over, in one line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import requirements

HERE = Path(__file__).parent
ROOT = HERE.parent
WITHOUT = "torch", "triton", "flashinfer-bench", "ncu-report", "ruff"  # the first three need torch; no such test
OFFLINE = "Connection", "Max retries exceeded", "timed out", "Temporary failure in name resolution", "ProxyError"
TESTS = "-m", "pytest", "tests/cli", "-n", "2", "--dist", "loadfile", "-m", "not slow and not records"


def allowed() -> list[str]:
    """The versions that pyproject.toml allows, such as 3.10, from the lowest to the highest."""
    low, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", requirements.PROJECT["requires-python"]).groups()
    return [f"3.{minor}" for minor in range(int(low), int(end))]


def found(version: str) -> str | None:
    """A Python of this version that can make a venv: on PATH, or one of pyenv's."""
    on_path = shutil.which(f"python{version}")
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    check = f"import ensurepip, sys, venv; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
    for python in (on_path, *map(str, pyenv)):
        if python and subprocess.run([python, "-c", check], capture_output=True).returncode == 0:
            return python
    return None


def installed(python: str, venv: Path) -> bool:
    """Whether the venv has what the tests need; False without a network. Raises SystemExit if pip fails otherwise."""
    venv.mkdir(parents=True, exist_ok=True)
    needed = venv / "requirements.txt"
    needed.write_text("\n".join(requirements.main("without", *WITHOUT)) + "\n", encoding="utf-8")
    if not (venv / "bin" / "pip").exists():
        subprocess.run([python, "-m", "venv", venv], check=True)
    for what in (["-r", needed], ["--no-deps", "--editable", ROOT]):
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode and any(word in done.stderr for word in OFFLINE):
            return False
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    return True


def main() -> int:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [(version, python) for version in allowed() if version != here and (python := found(version))]
    failed = 0
    for version, python in others[:1] + others[1:][-1:]:
        venv = HERE / "venvs" / version
        if not installed(python, venv):
            print(f"Python {version}: no network, so the tests of the command are skipped there", flush=True)
            continue
        print(f"Python {version}: the tests of the command", flush=True)
        failed |= subprocess.run([venv / "bin" / "python", *TESTS], cwd=ROOT).returncode
    if not others:
        print(f"no Python but {here} is here: the tests of the command run on that one only")
    return failed


if __name__ == "__main__":
    sys.exit(main())
