"""What the examples of this folder share: flags, the model's sizes, what is timed, turns, a table.

Runs are in turns, A B B A: a machine gets slower or faster while it works, and in turns that falls
on both alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

KINDS = ("baseline", "gdn")
ORDER = (*KINDS, *reversed(KINDS))  # of turns
TITLES = ["what", "kind", "first token, ms", "a token, ms", "tokens/s", "speedup"]
SHOWN = ("first_token_ms", "token_ms", "tokens_per_second")
VOCABULARY = 32000


# Seconds until all sequences have a token, and for each of the next ones.
Times = tuple[float, float | None]


class Sample(NamedTuple):
    """A run's times, in seconds; tokens are a second's, of prompts alone those of the prompts."""

    first: float
    token: float | None
    tokens: float


class Point(NamedTuple):
    """Sequences of one length: prompts alone, or with so many new tokens each."""

    batch: int
    prompt: int
    new: int = 1

    def __str__(self) -> str:
        kind = "prompt" if self.new == 1 else "decode"
        return f"{kind} {self.batch}x{self.prompt}"

    def tokens(self) -> list[list[int]]:
        return [token_ids(n, self.prompt) for n in range(self.batch)]

    def sample(self, run: Callable[[int], Times]) -> Sample:
        """run: new tokens of each sequence -> seconds."""
        first, token = run(self.new)
        if token is None:
            return Sample(first, None, self.batch * self.prompt / first)
        return Sample(first, token, self.batch / token)


def token_ids(seed: int, count: int) -> list[int]:
    return [1 + (7919 * seed + 31 * i) % (VOCABULARY - 1) for i in range(count)]


def heads(text: str) -> str:
    """QK/V, as it was given."""
    H, _, HV = text.partition("/")
    numbers = H.isdecimal() and HV.isdecimal()
    if not (numbers and 0 < int(H) <= int(HV) and int(HV) % int(H) == 0):
        raise argparse.ArgumentTypeError(f"expected QK/V, such as 16/32, got {text!r}")
    return text


def options(text: str, **defaults: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text.partition("\n")[0])
    add = parser.add_argument
    add("--layers", type=int, default=8, help="of every four three have GDN")
    add("--hidden", type=int, default=2048)
    add("--heads", type=heads, default="16/32", help="of q and k, and of v")
    add("--batch", default="1,8,64", help="sequences in decode")
    add("--context", type=int, default=128, help="tokens of each before decode")
    add("--new", type=int, default=33, help="tokens of each in decode")
    add("--prompts", default="1x2048,1x8192", help="number x tokens")
    add("--samples", type=int, default=3, help="of each turn of A B B A")
    add("--accuracy", action="store_true", help="errors against float32 as well")
    add("--out", type=Path, help="a file, to which the record is added as a line")
    parser.set_defaults(**defaults)
    return parser


def points(given: argparse.Namespace) -> list[Point]:
    prompts = [Point(*map(int, x.split("x"))) for x in given.prompts.split(",") if x]
    batches = [int(x) for x in given.batch.split(",") if x]
    return prompts + [Point(batch, given.context, given.new) for batch in batches]


def model_config(given: argparse.Namespace) -> dict[str, object]:
    """Of a Qwen3.5 without experts: at 2048 hidden the sizes of Qwen3.5-35B-A3B's layers, with the
    nine experts' of a token in one MLP."""
    H, HV = map(int, given.heads.split("/"))
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": given.hidden,
        "intermediate_size": 9 * given.hidden // 4,
        "num_hidden_layers": given.layers,
        "num_attention_heads": max(1, given.hidden // 128),
        "num_key_value_heads": 1 if given.hidden < 256 else 2,
        "linear_num_key_heads": H,
        "linear_num_value_heads": HV,
        "vocab_size": VOCABULARY,
        "dtype": "bfloat16",
    }


def in_turns(runs: list[tuple[str, Callable]], names: list[str]) -> dict[str, dict]:
    """The samples of each kind, by name. Each run, in the order A B B A, takes a name and gives
    samples of it. What is done so far is told on stderr."""
    samples: dict[str, dict] = {kind: {} for kind in KINDS}
    for name in names:
        for kind, run in runs:
            samples[kind][name] = samples[kind].get(name, []) + run(name)
        for row in rows(name, {kind: samples[kind][name] for kind in KINDS}):
            values = {key: value for key, value in row.items() if key != "samples"}
            print(json.dumps(values), file=sys.stderr, flush=True)
    return samples


def of_kinds(runs: list[tuple[str, Callable]], name: str) -> dict:
    """What a run of each kind gives for something that is wanted once."""
    return {kind: run(name) for kind, run in runs[: len(KINDS)]}


def rows(name: str, samples: dict[str, list[Sample]]) -> list[dict]:
    """A row for each kind, of medians; the speedup is that of tokens/s over the first kind."""
    table: list[dict] = []
    for kind, of_kind in samples.items():
        first, token, tokens = (median(column) for column in zip(*of_kind, strict=True))
        base = table[0]["tokens_per_second"] if table else tokens
        row = {
            "what": name,
            "kind": kind,
            "first_token_ms": milliseconds(first),
            "token_ms": milliseconds(token),
            "tokens_per_second": tokens,
            "speedup": tokens / base,
        }
        row["samples"] = [[round(x, 7) if x else None for x in s] for s in of_kind]
        table.append(row)
    return table


def median(column: tuple) -> float | None:
    return None if None in column else statistics.median(column)


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def same_cores(count: int = 4) -> None:
    """Engines take turns on the same cores: a step of one sequence took 1.7 or 2.1 ms in vLLM, by
    the cores that its process had."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def kernels(run: Callable[[int], object], point: Point, new: int = 9) -> dict:
    """The GPU's time of a prompt, or of a token of all sequences, ms, and the kernels' shares."""
    if point.new == 1:
        return shares(gpu_times(lambda: run(1)))
    first, times = gpu_times(lambda: run(1)), gpu_times(lambda: run(new))
    return shares({name: (x - first[name]) / (new - 1) for name, x in times.items()})


def gpu_times(run: Callable[[], object]) -> Counter[str]:
    """Of each kernel, ms."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profile.key_averages():
        times[event.key[:90]] += event.self_device_time_total / 1e3
    return times


def shares(times: dict[str, float]) -> dict:
    total = sum(times.values())
    longest = sorted(times, key=times.__getitem__, reverse=True)[:16]
    return {"gpu_ms": total, "shares": {name: times[name] / total for name in longest}}


def errors(folder: str, logprobs: dict[str, list[dict]]) -> dict[str, dict]:
    """Root mean square of what the log-probabilities differ from those in float32.

    logprobs  kind -> sequences of "tokens", and the log-probabilities of all but the first one: of
      the "prompt" and the "new" ones
    """
    sequences = [x["tokens"] for of_kind in logprobs.values() for x in of_kind]
    command = [sys.executable, str(Path(__file__).with_name("float32.py")), folder]
    text = json.dumps(sequences)
    result = subprocess.run(command, input=text, stdout=-1, text=True, check=True)
    references = iter(json.loads(result.stdout))
    errors: dict[str, dict] = {}
    for kind, of_kind in logprobs.items():
        squares: dict[str, list[float]] = {"prompt": [], "new": []}
        for x in of_kind:
            expected = iter(next(references))
            for part, differences in squares.items():
                differences += [(value - next(expected)) ** 2 for value in x[part]]
        errors[kind] = {part: statistics.mean(x) ** 0.5 for part, x in squares.items()}
    return errors


def finish(about: dict, samples: dict[str, dict], out: Path | None) -> None:
    """Show what in_turns gave, and add it to a file."""
    table = []
    for name in samples["baseline"]:
        table += rows(name, {kind: samples[kind][name] for kind in KINDS})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"device": device} | about
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | {"rows": table}) + "\n")
    show(about, table)


def show(about: dict, table: list[dict]) -> None:
    print(", ".join(f"{name} {x}" for name, x in about.items() if name != "kernels"))
    lines = [TITLES]
    for row in table:
        cells = ["-" if row[x] is None else f"{row[x]:.4g}" for x in SHOWN]
        lines.append([row["what"], row["kind"], *cells, f"{row['speedup']:.2f}x"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells))
    for kind, runs in about.get("kernels", {}).items():
        for name, times in runs.items():
            print(f"\n{kind}, {name}: {times['gpu_ms']:.4g} ms of the GPU")
            for kernel, share in times["shares"].items():
                print(f"  {share:6.1%}  {kernel[:80]}")
