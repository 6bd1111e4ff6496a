"""What the examples of this folder share: runs in turns, A B B A, and their table.

A machine gets slower or faster while it works. In turns that falls on both alike.
"""

import json
import statistics
from collections.abc import Callable

Times = tuple[float, float]  # seconds to the first token, and for each one after it
TITLES = ["batch", "kind", "first token, ms", "a token, ms", "tokens/s", "speedup"]


def in_turns(
    kinds: dict[str, Callable[[], Times]], rounds: int
) -> dict[str, list[Times]]:
    """The times of each kind: one warm-up each, then rounds of A B B A."""
    names = list(kinds)
    for name in names:
        kinds[name]()
    times: dict[str, list[Times]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in [*names, *reversed(names)]:
            times[name].append(kinds[name]())
    return times


def rows(batch: int, times: dict[str, list[Times]]) -> list[dict]:
    """A row for each kind, of medians; speedup is that of a token, over the first kind."""
    found = []
    for kind, samples in times.items():
        first, each = (
            statistics.median(column) for column in zip(*samples, strict=True)
        )
        row = {
            "batch": batch,
            "kind": kind,
            "first_token_ms": first * 1e3,
            "token_ms": each * 1e3,
        }
        row["tokens_per_second"] = batch / each
        row["speedup"] = (found[0]["token_ms"] / row["token_ms"]) if found else 1.0
        row["samples_ms"] = [[a * 1e3, b * 1e3] for a, b in samples]
        found.append(row)
    return found


def show(about: dict, table: list[dict], as_json: bool) -> None:
    if as_json:
        print(json.dumps(about | {"rows": table}, indent=2))
        return
    print(
        ", ".join(
            f"{name} {value}" for name, value in about.items() if name != "kernels"
        )
    )
    lines = [TITLES]
    for row in table:
        numbers = [row[x] for x in ("first_token_ms", "token_ms", "tokens_per_second")]
        cells = [f"{number:.4g}" for number in numbers]
        lines.append([str(row["batch"]), row["kind"], *cells, f"{row['speedup']:.2f}x"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(line, widths, strict=True)
            )
        )
    for kind, kernels in about.get("kernels", {}).items():
        print(f"\n{kind}: share of GPU time")
        for name, share in kernels.items():
            print(f"  {share:6.1%}  {name[:80]}")
