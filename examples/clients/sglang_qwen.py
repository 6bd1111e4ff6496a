"""A Qwen3.5 of random weights in SGLang 0.5.23, with gdn's kernels and without, in turns.

    python examples/clients/sglang_qwen.py --batch 1,8,64 --out sglang.jsonl

Each turn is a fresh process with SGLang's own benchmark of one batch (sglang.benchmark.one_batch),
which waits for the GPU after each step; decode is in CUDA graphs. Its profiler gives the GPU's time
of some steps. Prompts stay SGLang's own: decode alone is compared. It needs an NVIDIA GPU and
sglang 0.5.23. What follows `--` is SGLang's.
"""

import argparse
import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import turns


def options() -> tuple[argparse.Namespace, list[str]]:
    """Ours, and what follows `--`."""
    ours = sys.argv[1:]
    theirs = []
    if "--" in ours:
        end = ours.index("--")
        ours, theirs = ours[:end], ours[end + 1 :]
    parser = turns.options(__doc__, prompts="", layers=40)
    add = parser.add_argument
    dtypes = "float32", "bfloat16"
    add("--pool", default="float32", choices=dtypes, help="the states' dtype")
    add("--turn", choices=turns.KINDS, help=argparse.SUPPRESS)
    add("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(ours)
    if given.new < 3:
        parser.error("--new: expected 3 or more, for a step in SGLang's profiler")
    return given, theirs


def save(given: argparse.Namespace, folder: Path) -> None:
    """The model's sizes, without weights, and a tokenizer, which SGLang loads and does not ask."""
    transformers = importlib.import_module("transformers")
    text = turns.model_config(given)
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 1,
        "out_hidden_size": given.hidden,
    }
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    saved = config.to_dict()
    saved["text_config"]["full_attention_interval"] = 4  # which SGLang reads
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="a"
    )
    tokenizer.save_pretrained(folder)


def turn(given: argparse.Namespace, theirs: list[str]) -> None:
    """In a process of its own: SGLang's benchmark of all batches; its records, and our counts."""
    on_gdn = None
    if given.turn == "gdn":
        on_gdn = importlib.import_module("gdn.serving.sglang")
        print("replaced", json.dumps(on_gdn.install()), flush=True)
    turns.same_cores()
    os.environ["SGLANG_TORCH_PROFILER_DIR"] = str(given.model)
    benchmark = importlib.import_module("sglang.benchmark.one_batch")
    sizes = [str(point.batch) for point in turns.points(given)]
    sys.argv[1:] = [
        *("--model-path", str(given.model), "--load-format", "dummy"),
        *("--dtype", "bfloat16", "--mamba-ssm-dtype", given.pool),
        *("--disable-radix-cache", "--random-seed", "0"),
        *("--batch-size", *sizes, "--input-len", str(given.context)),
        *("--output-len", str(given.new)),
        *("--result-filename", str(given.model / "results.jsonl")),
        *("--profile", "--profile-activities", "GPU", "--profile-stage", "decode"),
        *("--profile-steps", str(profiled(given)), "--profile-prefix", given.turn),
        *theirs,
    ]
    benchmark.cli_main()
    if on_gdn:
        print("fallbacks", json.dumps(dict(on_gdn.fallbacks)), flush=True)


def profiled(given: argparse.Namespace) -> int:
    """Steps in SGLang's trace, which begins in the middle of a sequence."""
    return min(4, (given.new - 1) // 2)


def kernels(given: argparse.Namespace, kind: str, batch: int) -> dict[str, Any]:
    """The GPU's time of a step in SGLang's trace, ms, and the kernels' shares."""
    size = f"batch{batch}_input{given.context}_output{given.new}"
    trace = given.model / f"{kind}_{size}_decode.trace.json.gz"
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times[event["name"][:90]] += event["dur"] / 1e3 / profiled(given)
    return turns.shares(times)


class Turn(NamedTuple):
    """What was replaced and fell back, and SGLang's records."""

    replaced: list[str]
    fallbacks: dict[str, int]
    records: list[dict[str, Any]]


def measure(kind: str, given: argparse.Namespace, theirs: list[str]) -> Turn:
    results = given.model / "results.jsonl"
    results.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--turn", kind, "--model", str(given.model)]
    for name in ("layers", "hidden", "heads", "batch", "context", "new", "pool"):
        command += [f"--{name}", str(getattr(given, name))]
    command += ["--", *theirs]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if process.returncode or not results.is_file():
        raise SystemExit(
            f"SGLang's benchmark of {kind} has ended: {process.stdout[-2000:]}"
        )
    counts = {"replaced": "[]", "fallbacks": "{}"}
    for line in process.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in counts:
            counts[word] = rest
    lines = results.read_text(encoding="utf-8").splitlines()
    return Turn(*map(json.loads, counts.values()), list(map(json.loads, lines)))


def sample(record: dict[str, Any]) -> turns.Sample:
    token = record["median_decode_latency"]
    return turns.Sample(record["prefill_latency"], token, record["batch_size"] / token)


def main() -> None:
    given, theirs = options()
    if given.turn:
        return turn(given, theirs)
    if not (torch.cuda.is_available() and importlib.util.find_spec("sglang")):
        raise SystemExit(
            "sglang_qwen.py needs an NVIDIA GPU and sglang 0.5.23: pip install sglang==0.5.23"
        )
    samples: dict[str, dict] = {kind: {} for kind in turns.KINDS}
    replaced: list[str] = []
    fallbacks: Counter[str] = Counter()
    times: dict[str, dict] = {kind: {} for kind in turns.KINDS}
    with tempfile.TemporaryDirectory() as folder:
        given.model = Path(folder)
        save(given, given.model)
        for kind in turns.ORDER:
            answer = measure(kind, given, theirs)
            replaced = answer.replaced or replaced
            fallbacks.update(answer.fallbacks)
            for record in answer.records:
                name = f"decode {record['batch_size']}x{given.context}"
                samples[kind].setdefault(name, []).append(sample(record))
                times[kind][name] = kernels(given, kind, record["batch_size"])
    about = {
        "sglang": importlib.metadata.version("sglang"),
        "torch": torch.__version__,
        "baseline": "triton",
        "heads": given.heads,
        "layers": given.layers,
        "pool": given.pool,
        "replaced": replaced,
        "fallbacks": dict(fallbacks),
        "kernels": times,
    }
    turns.finish(about, samples, given.out)


if __name__ == "__main__":
    main()
