"""The quick tests of the command on the lowest and the highest other Python of this machine.

    python .ci/other_pythons.py

Other than the one that runs this, of those that pyproject.toml allows. Each gets a venv in
.ci/venvs without torch, which takes minutes and gigabytes; tests that need torch are skipped there.
Where pip has no network, one line says so, and the Python is passed over.
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
NEED_TORCH = "torch", "triton", "flashinfer-bench"
UNUSED = "ncu-report", "ruff", "kernels"  # by the tests of the command
OFFLINE = (
    "NewConnectionError",
    "Max retries exceeded",
    "timed out",
    "name resolution",
    "ProxyError",
)
PYTEST = "-m", "pytest", "tests/cli", "-n", "2", "--dist", "loadfile"
# what is said to Modal's servers, what is kept and what is shown: most of the time, and it
# depends little on the Python
for name in "modal", "kept", "show":
    PYTEST += "--ignore", f"tests/cli/test_{name}.py"
QUICK = "-m", "not slow and not records"


def allowed() -> list[str]:
    """The versions that pyproject.toml allows, such as 3.10, from the lowest to the highest."""
    bounds = requirements.PROJECT["requires-python"]
    low, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", bounds).groups()
    return [f"3.{minor}" for minor in range(int(low), int(end))]


def found(version: str) -> str | None:
    """A Python of this version that can make a venv: on PATH, or one of pyenv's."""
    on_path = shutil.which(f"python{version}")
    pyenv = sorted(
        (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    )
    check = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    # on PATH it may be a shim of none
    for python in filter(None, (on_path, *map(str, pyenv))):
        done = subprocess.run([python, "-c", check], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return python
    return None


def installed(python: str, venv: Path) -> bool:
    """Whether the venv has what the tests need: not without a network.

    Raises SystemExit if pip fails for another reason.
    """
    venv.mkdir(parents=True, exist_ok=True)
    needed = venv / "requirements.txt"
    lines = requirements.main("without", *NEED_TORCH, *UNUSED)
    needed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not (venv / "bin" / "pip").exists():
        subprocess.run([python, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    for what in (["-r", needed], ["--no-deps", "--editable", ROOT]):
        done = subprocess.run([*pip, *what], capture_output=True, text=True)
        if done.returncode and any(word in done.stderr for word in OFFLINE):
            return False
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    return True


def main() -> int:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    pythons = {version: found(version) for version in allowed() if version != own}
    others = [version for version, python in pythons.items() if python]
    failed = 0
    for version in others[:1] + others[1:][-1:]:
        venv = HERE / "venvs" / version
        if not installed(pythons[version], venv):
            print(
                f"Python {version}: no network, so no tests of the command there",
                flush=True,
            )
            continue
        print(f"Python {version}: the tests of the command", flush=True)
        failed |= subprocess.run(
            [venv / "bin" / "python", *PYTEST, *QUICK], cwd=ROOT
        ).returncode
    if not others:
        print(
            f"this machine has no Python but {own}: the command is tested on that one only"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
