"""The tables of docs/serving.md from the records of the scripts beside it.

    python examples/clients/table.py docs/serving.md

What is between `<!-- clients FILE -->` and `<!-- /clients -->` is written anew; FILE is a file of
records beside `docs`.
"""

import argparse
import json
import re
from pathlib import Path

BLOCK = re.compile(r"(<!-- clients (\S+) -->\n).*?(<!-- /clients -->)", re.DOTALL)
TITLES = ["", "first token, ms", "a token, ms", "tokens/s", "gain", "GPU, ms", "gain"]
SHOWN = ("first_token_ms", "token_ms", "tokens_per_second")


def filled(text: str, root: Path) -> str:
    """The page with its tables written anew."""

    def block(match: re.Match) -> str:
        return match[1] + tables(root / match[2]) + match[3]

    return BLOCK.sub(block, text)


def tables(file: Path) -> str:
    if not file.is_file():
        return "Not timed yet.\n"
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return "\n".join(map(table, records))


def table(record: dict) -> str:
    client = next(name for name in ("vllm", "sglang", "transformers") if name in record)
    about = [f"{record['heads']} heads", f"a {record['pool']} pool"]
    about += [f"{record['layers']} layers", record["device"]]
    about.append(f"torch {record['torch']}")
    title = f"{client} {record[client]} (own prefill: {record['baseline']})"
    times = record.get("kernels", {})
    titles = TITLES if times else TITLES[:-2]
    lines = [f"{title}, {', '.join(about)}; the client's own -> gdn:", ""]
    lines += [row(titles), "|---" + "|---:" * (len(titles) - 1) + "|"]
    rows = iter(record["rows"])
    for own, ours in zip(rows, rows, strict=True):
        cells = [turned(own[name], ours[name]) for name in SHOWN]
        cells += [f"{ours['speedup']:.3f}x", *gpu(times, own["what"])]
        lines.append(row([own["what"], *cells]))
    lines += ["", *notes(record)]
    return "\n".join(lines) + "\n"


def gpu(times: dict, name: str) -> list[str]:
    """Of a prompt, or of a token: the time and the gain."""
    if not times:
        return []
    if name not in times["gdn"]:
        return ["", ""]
    own, ours = (times[kind][name]["gpu_ms"] for kind in ("baseline", "gdn"))
    return [turned(own, ours), f"{own / ours:.3f}x"]


def notes(record: dict) -> list[str]:
    lines = []
    errors = record.get("errors", {"baseline": {}, "gdn": {}})
    for part, own in errors["baseline"].items():
        change = turned(own, errors["gdn"][part])
        lines.append(f"- rms error of log-probabilities, {part} tokens: {change}")
    if "fallbacks" in record:
        lines.append(f"- calls that fell back: {sum(record['fallbacks'].values())}")
    if "note" in record:
        lines.append(f"- {record['note']}")
    return lines


def turned(own: float | None, ours: float | None) -> str:
    return "" if own is None else f"{number(own)} -> {number(ours)}"


def number(x: float | None) -> str:
    return f"{x:,.0f}" if x and x >= 1000 else f"{x:.4g}"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, help="such as docs/serving.md")
    page = parser.parse_args().page
    if not page.is_file():
        raise SystemExit(f"table.py: {page}: no such file; name docs/serving.md")
    text = filled(page.read_text(encoding="utf-8"), page.resolve().parent.parent)
    page.write_text(text, encoding="utf-8")
