"""Try the attacks of this folder: python tests/attacks/run.py [NAME...] [--device cuda]

Each is run by the command that it names, as a user would run it. The table says what
became of it. Exit code 1: an attack got through, or a control did not end as it must.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

import cheats  # noqa: E402
import helpers  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    unknown = sorted({*asked.names} - {*cheats.ALL})
    if unknown:
        parser.error(
            f"no attack {', '.join(unknown)}; there are {', '.join(cheats.ALL)}"
        )
    chosen = {
        name: cheat
        for name, cheat in cheats.ALL.items()
        if asked.device in cheat.devices and (not asked.names or name in asked.names)
    }
    table = Table("attack", "stopped by", "as gdn says it")
    through: list[str] = []
    for name, records in tried(chosen, asked.device):
        cheat = chosen[name]
        right = stopped(cheat, records)
        told = (
            records[-1].get("reason")
            or "; ".join(records[-1].get("doubts") or ())
            or records[-1]["status"]
        )
        table.add_row(name, cheat.by if right else "[red]NOTHING[/]", told)
        if not right:
            through.append(name)
    Console().print(table)
    print(
        f"{len(chosen)} attacks and controls, {len(through)} not as they must be:"
        f" {', '.join(through) or '-'}"
    )
    return int(bool(through))


def tried(
    chosen: dict[str, cheats.Cheat], device: str
) -> Iterator[tuple[str, list[dict]]]:
    """Each attack's records. Those with the same command and workloads are run together."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, cheat in chosen.items():
        groups.setdefault((cheat.command, cheat.workloads), []).append(name)
    for (command, workloads), names in groups.items():
        together = [names]
        if command == "compare":
            together = [[name, "pt-reference"] for name in names]
        for algos in together:
            records = _records(command, workloads, algos, chosen, device)
            for name in algos:
                if name in chosen:
                    yield name, [r for r in records if r["algo"] == name]


def stopped(cheat: cheats.Cheat, records: list[dict]) -> bool:
    """Whether it ended as it must, at the last of its workloads."""
    if not records:
        return False
    last = records[-1]
    if not cheat.checked:  # the check may stop it before its probe does
        return last["status"] != "passed"
    doubts = "\n".join(last.get("doubts") or ())
    return (
        last["status"] in cheat.stopped
        and cheat.says in (last.get("reason") or "")
        and all(doubt in doubts for doubt in cheat.doubts)
    )


def _records(
    command: str,
    workloads: tuple[str, ...],
    algos: list[str],
    chosen: dict,
    device: str,
) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        for name in algos:
            if name in chosen:
                helpers.write_algo(
                    Path(folder), name, devices=[device], **chosen[name].keys()
                )
        words = [sys.executable, "-m", "gdn_cli", command, *algos, "--algos", folder]
        words += ["--json", "--device", device]
        for workload in workloads:
            words += ["-w", workload]
        if command != "run":
            # many calls: some are honest in the first
            words += ["--seconds", "0.3", "--target", "0.001"]
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env=helpers.environment(device == "cuda"),
        )
    return json.loads(done.stdout)["records"]


if __name__ == "__main__":
    sys.exit(main())
