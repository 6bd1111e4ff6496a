"""What pyproject.toml requires, for pip: the one list, read in other ways.

requirements.py lowest             the lower bound of each as ==, as constraints (pip -c)
requirements.py without torch ...  all but these, as requirements (pip -r); dev: all that the
                                   tests need beside
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pip is in every new venv and has one
    from pip._vendor import tomli as tomllib

FILE = Path(__file__).parent.parent / "pyproject.toml"
PROJECT = tomllib.loads(FILE.read_text(encoding="utf-8"))["project"]
DEV = PROJECT["optional-dependencies"]["dev"]
ALL = [*PROJECT["dependencies"], *DEV]


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def lowest(requirement: str) -> str:
    """Raises ValueError for one without a lower bound: nobody has tested that."""
    versions, semicolon, condition = requirement.partition(";")
    if not (bound := re.search(r">=\s*([\w.]+)", versions)):
        raise ValueError(f"pyproject.toml: no lower bound in {requirement!r}")
    return f"{name(requirement)}=={bound[1]} {semicolon}{condition}".strip()


def main(what: str, *names: str) -> list[str]:
    if what == "lowest":
        return [lowest(requirement) for requirement in ALL]
    left_out = set(names)
    if "dev" in left_out:
        left_out |= {name(requirement) for requirement in DEV}
    if unknown := left_out - {"dev"} - {name(requirement) for requirement in ALL}:
        raise ValueError(f"pyproject.toml requires no {', '.join(sorted(unknown))}")
    return [requirement for requirement in ALL if name(requirement) not in left_out]


if __name__ == "__main__":
    print(*main(*sys.argv[1:]), sep="\n")
