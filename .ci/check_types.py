"""mypy, which may not find more errors than the number in .ci/mypy-errors.

    python .ci/check_types.py

Where it finds fewer, the number is to be lowered to that. At 0 this is plain mypy.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMIT = Path(__file__).with_name("mypy-errors")
ERROR = re.compile(r"^(?P<file>[^:]+):\d+: error:", re.MULTILINE)


def main() -> int:
    limit = int(LIMIT.read_text(encoding="utf-8"))
    mypy = subprocess.run(
        [sys.executable, "-m", "mypy"],
        cwd=LIMIT.parent.parent,
        capture_output=True,
        text=True,
    )
    rooms = Counter(str(Path(file).parent) for file in ERROR.findall(mypy.stdout))
    errors = rooms.total()
    crashed = mypy.returncode not in (0, 1) or mypy.returncode != bool(errors)
    if crashed or errors > limit:
        print(mypy.stdout + mypy.stderr, end="")
        print(f"mypy: {errors} errors, allowed are {limit} (.ci/mypy-errors)")
        return 1
    for room, count in rooms.most_common():
        print(f"{count:5} {room}")
    print(f"mypy: {errors} errors in src, allowed are {limit}")
    if errors < limit:
        print(f"write {errors} into .ci/mypy-errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
