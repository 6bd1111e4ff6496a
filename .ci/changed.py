"""The tests of what changed since main, for pytest: `make check`.

    python .ci/changed.py [SINCE]

A module has the test file of its name, else all tests of its room. What is changed and not
committed counts, and so do new files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALWAYS = "tests/test_rooms.py"  # who may import whom: a second


def git(*args: str) -> list[str]:
    output = subprocess.check_output(["git", *args], cwd=ROOT, text=True)
    return output.splitlines()


def changed(since: str) -> list[str]:
    [base] = git("merge-base", since, "HEAD")
    new = git("ls-files", "--others", "--exclude-standard")
    return git("diff", "--name-only", "--no-renames", base) + new


def of_module(path: Path) -> list[Path]:
    """The tests of a file below src/: of its name, else of the innermost room that has tests."""
    package, *rooms = path.relative_to("src").parts[:-1]
    room = Path("tests", "library" if package == "gdn" else "", *rooms)
    while not (ROOT / room).is_dir():
        room = room.parent
    named = room / f"test_{path.stem}.py"
    if (ROOT / named).is_file():
        return [named]
    return [] if room == Path("tests") else [room]


def tests_of(path: Path) -> list[Path]:
    top = path.parts[0]
    if path.name.startswith("test_") and path.suffix == ".py":
        return [path]
    if top == "src" and path.suffix == ".py":
        return of_module(path)
    if top == "algos":
        return [Path("tests/rungs/test_sources.py")]
    if top == "configs":
        return [Path("tests/catalog")]
    if path.suffix == ".md":
        return [Path("tests/test_docs.py")]
    return []


def main(since: str = "main") -> list[str]:
    tests = {ALWAYS}
    for name in changed(since):
        tests.update(str(test) for test in tests_of(Path(name)))
    return sorted(test for test in tests if (ROOT / test).exists())


if __name__ == "__main__":
    print(*main(*sys.argv[1:]))
