"""Plot each algo's time, as a multiple of a plain copy's, over batch size; from record
files of one GPU or CPU.

gdn bench --preset sweep --out records.json
python examples/plot.py records.json
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402


def times(files: list[Path], wanted: set[str]) -> dict[str, dict[int, float]]:
    """Algo -> batch size -> median in microseconds, of the records that passed."""
    medians = defaultdict(dict)
    for file in files:
        for record in json.loads(file.read_text())["records"]:
            size = ((record.get("workload") or {}).get("axes") or {}).get("batch_size")
            chosen = record["algo"] in wanted or wanted == {"copy"}
            timing = record.get("timing")
            if record["status"] == "passed" and timing and size and chosen:
                medians[record["algo"]][size] = timing["median_us"]
    return medians


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("plot.png"))
    parser.add_argument(
        "--algo", help="only these algos, separated by commas", default=""
    )
    given = parser.parse_args()
    medians = times(given.files, set(filter(None, given.algo.split(","))) | {"copy"})
    copy = medians.pop("copy", {})
    if not copy or not medians:
        parser.error(
            "no times of algos and of a copy in these records; make some with `gdn bench`"
        )

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.axhline(1, color="gray", linestyle="--", label="copy")
    for algo, by_size in medians.items():
        sizes = sorted(by_size.keys() & copy.keys())
        axes.plot(
            sizes,
            [by_size[size] / copy[size] for size in sizes],
            marker="o",
            markersize=3,
            label=algo,
        )
    axes.set(
        xscale="log",
        xlabel="batch size",
        ylabel="time / time of a copy",
        ylim=(0, None),
    )
    axes.set_xticks(sorted(copy), sorted(copy))
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(given.out, dpi=150)
    print(given.out)


if __name__ == "__main__":
    main()
