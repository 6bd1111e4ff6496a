"""A Qwen3.5 of random weights in vLLM 0.33, with gdn's kernels and without, in turns.

    python examples/clients/vllm_qwen.py --batch 1,8,64 --out vllm.jsonl

Engines without gdn and with it, each in a process of its own, are asked in turns. Decode is in CUDA
graphs, prompts are not, and nothing is compiled by torch. It needs an NVIDIA GPU and vllm
0.33.0. `--attention TRITON_ATTN` needs no FlashAttention. Where vLLM's optional packages are
missing, stand-ins for them can be imported by a sitecustomize.py on PYTHONPATH.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import turns
from turns import Point, Sample

from gdn.serving import vllm as on_gdn


def options() -> argparse.Namespace:
    parser = turns.options(__doc__, prompts="1x2048,1x8192,16x512")
    add = parser.add_argument
    add("--pool", default="float32", help="the states' dtype: float32 or bfloat16")
    add("--engines", type=int, default=2, choices=(1, 2), help="of each kind")
    add("--requests", type=int, default=128, help="of the mixed load; 0: none")
    add("--at-once", type=int, default=64, help="of these")
    add("--prefill", default="triton", help="vLLM's own: triton or flashinfer")
    add(
        "--prefix-caching",
        action="store_true",
        help="vLLM's default, emptied each time",
    )
    add("--attention", help="vLLM's attention_backend, such as TRITON_ATTN")
    add("--cache", type=int, default=16, help="GiB of each engine for states and keys")
    return parser.parse_args()


def save(given: argparse.Namespace, folder: str) -> None:
    """The model that all engines load."""
    import transformers

    config = transformers.Qwen3_5TextConfig(**turns.model_config(given))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.Qwen3_5ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def engine(given: argparse.Namespace, folder: str) -> Any:
    vllm = importlib.import_module("vllm")  # seconds: only where an engine is made
    points = turns.points(given)
    batches = {point.batch for point in points if point.new > 1}
    sizes = sorted(batches | {1, 2, 4, *range(8, given.at_once + 1, 8)})
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=given.cache << 30,  # what is free changes
        gpu_memory_utilization=0.1,
        max_model_len=max(2048, *(point.prompt + point.new for point in points)),
        max_num_seqs=max(sizes),
        max_num_batched_tokens=8192,
        enable_prefix_caching=given.prefix_caching,
        attention_backend=given.attention,
        mamba_ssm_cache_dtype=given.pool,
        additional_config={"gdn_prefill_backend": given.prefill},
        compilation_config={"mode": 0, **graphs},
    )


def prompts(tokens: list[list[int]]) -> list[dict]:
    return [{"prompt_token_ids": row} for row in tokens]


def greedy(new: int, **more: object) -> Any:
    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    sampling = importlib.import_module("vllm").SamplingParams
    return sampling(max_tokens=new, **fixed, **more)


class Served(NamedTuple):
    """When each request came, had its first token and its last one, and steps' ends: seconds."""

    arrivals: list[float]
    first: list[float]
    last: list[float]
    steps: list[float]


def serve(llm: Any, rows: list[list[int]], new: list[int], at_once: int) -> Served:
    """A new request comes as soon as there is room, so prompts and decodes may be in one batch.

    rows  the token ids of each prompt
    new   how many tokens each wants
    """
    llm.reset_prefix_cache()
    arrivals: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    steps = []
    while len(last) < len(rows):
        while len(arrivals) - len(last) < at_once and len(arrivals) < len(rows):
            n = len(arrivals)
            arrivals[str(n)] = time.perf_counter()
            (prompt,) = prompts(rows[n : n + 1])
            llm.llm_engine.add_request(str(n), prompt, greedy(new[n]))
        outputs = llm.llm_engine.step()
        now = time.perf_counter()
        steps += [now] if outputs else []
        for output in outputs:
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, now)
            if output.finished:
                last[output.request_id] = now
    columns = [[times[name] for name in arrivals] for times in (arrivals, first, last)]
    return Served(*columns, steps)


def runner(llm: Any, point: Point) -> Callable[[int], turns.Times]:
    """What is timed of a point; a token's time is that of the steps in which all decode."""
    rows = point.tokens()

    def run(new: int) -> turns.Times:
        times = serve(llm, rows, [new] * len(rows), len(rows))
        begin, end = max(times.first), min(times.last)
        steps = sum(begin < step <= end for step in times.steps)
        return begin - times.arrivals[0], (end - begin) / steps if steps else None

    return run


def mixed(llm: Any, requests: int, at_once: int) -> Sample:
    """Requests of 64 to 1,024 tokens that want 16 to 111."""
    rows = [turns.token_ids(n, 64 * (1 + 7 * n % 16)) for n in range(requests)]
    new = [16 + 37 * n % 96 for n in range(requests)]
    arrivals, first, last, _ = serve(llm, rows, new, at_once)
    waits = [b - a for a, b in zip(arrivals, first, strict=True)]
    spans = zip(first, last, new, strict=True)
    times = [(c - b) / (n - 1) for b, c, n in spans]
    rate = sum(new) / (max(last) - arrivals[0])
    return Sample(statistics.mean(waits), statistics.mean(times), rate)


def logprobs(llm: Any, new: int) -> list[dict]:
    """Of the tokens of eight prompts, and of the new ones of each: "prompt" and "new"."""
    tokens = [turns.token_ids(100 + n, 64 * n + 37) for n in range(1, 9)]
    sampling = greedy(new, logprobs=0, prompt_logprobs=0)
    sequences = []
    outputs = llm.generate(prompts(tokens), sampling, use_tqdm=False)
    for row, output in zip(tokens, outputs, strict=True):
        ids = list(output.outputs[0].token_ids)
        of_prompt = zip(row[1:], output.prompt_logprobs[1:], strict=True)
        of_new = zip(ids, output.outputs[0].logprobs, strict=True)
        values = {
            "prompt": [entry[token].logprob for token, entry in of_prompt],
            "new": [entry[token].logprob for token, entry in of_new],
        }
        sequences.append({"tokens": row + ids} | values)
    return sequences


def work(pipe: Connection, kind: str, given: argparse.Namespace, folder: str) -> None:
    """In a process of its own: an engine that is asked for one thing after another."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    turns.same_cores()
    importlib.import_module("vllm")
    pipe.recv()
    replaced = on_gdn.install() if kind == "gdn" else []
    llm = engine(given, folder)
    points = {str(point): point for point in turns.points(given)}
    answers: dict[str, Callable[[], object]] = {
        "replaced": lambda: replaced,
        "fallbacks": lambda: dict(on_gdn.fallbacks),
        "kernels": lambda: {
            name: turns.kernels(runner(llm, point), point)
            for name, point in points.items()
        },
        "logprobs": lambda: logprobs(llm, given.new),
    }
    pipe.send("ready")
    warm = set()
    for name in iter(pipe.recv, None):
        if name in answers:
            pipe.send(answers[name]())
            continue
        if name in points:
            point = points[name]
            run = runner(llm, point)
            samples, sample = given.samples, lambda p=point, run=run: p.sample(run)
        else:
            samples, sample = 1, lambda: mixed(llm, given.requests, given.at_once)
        if name not in warm:
            sample()
        warm.add(name)
        pipe.send([sample() for _ in range(samples)])


def start_engine(
    kind: str, given: argparse.Namespace, folder: str
) -> Callable[..., Any]:
    """A process that works; what asks it: first to make its engine. None ends it."""
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=work, args=(other_end, kind, given, folder))
    process.start()
    other_end.close()

    def ask(name: str | None) -> Any:
        try:
            pipe.send(name)
            return None if name is None else pipe.recv()
        except (EOFError, BrokenPipeError):
            raise SystemExit(f"the engine of {kind} has ended") from None

    return ask


def main() -> None:
    given = options()
    if not (torch.cuda.is_available() and importlib.util.find_spec("vllm")):
        raise SystemExit(
            "vllm_qwen.py needs an NVIDIA GPU and vllm 0.33.0: pip install vllm==0.33.0"
        )
    names = [str(point) for point in turns.points(given)]
    if given.requests:
        names.append(f"mixed {given.requests}, {given.at_once} at once")
    kinds = turns.ORDER[: 2 * given.engines]
    with tempfile.TemporaryDirectory() as folder:
        engines = [(kind, start_engine(kind, given, folder)) for kind in kinds]
        context = multiprocessing.get_context("spawn")
        saving = context.Process(target=save, args=(given, folder))
        saving.start()
        saving.join()
        asks = [ask for _, ask in engines]
        # alone: vLLM's kernels are tuned by their times, for the others too
        asks[0]("make")
        with ThreadPoolExecutor() as at_once:
            list(at_once.map(lambda ask: ask("make"), asks[1:]))
        runs = engines if given.engines > 1 else engines + engines[::-1]
        samples = turns.in_turns(runs, names)
        about = {
            "vllm": importlib.metadata.version("vllm"),
            "torch": torch.__version__,
            "baseline": given.prefill + ", prefix caching" * given.prefix_caching,
            "heads": given.heads,
            "layers": given.layers,
            "pool": given.pool,
            "replaced": turns.of_kinds(runs, "replaced")["gdn"],
            "fallbacks": turns.of_kinds(runs, "fallbacks")["gdn"],
            "kernels": turns.of_kinds(runs, "kernels"),
        }
        values = turns.of_kinds(runs, "logprobs") if given.accuracy else None
        for _, ask in engines:
            ask(None)
        if values:
            about["errors"] = turns.errors(folder, values)
    turns.finish(about, samples, given.out)


if __name__ == "__main__":
    main()
