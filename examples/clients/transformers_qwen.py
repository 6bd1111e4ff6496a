"""A Qwen3.5 of random weights in transformers, with gdn's kernels and without, in turns.

    python examples/clients/transformers_qwen.py --layers 4 --hidden 64 --heads 2/4   # on a CPU
    python examples/clients/transformers_qwen.py --batch 1,8 --out hf.jsonl           # on a GPU

It needs transformers and kernels (`pip install '.[clients]'` in a clone). Without gdn
transformers calls flash-linear-attention if that is installed, else its own functions in PyTorch:
`baseline` says which. The loop is greedy and eager, so on a GPU the host's time counts.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import turns
from turns import Point

from gdn.serving import transformers as on_gdn

CUDA = torch.cuda.is_available()


def options() -> argparse.Namespace:
    parser = turns.options(__doc__)
    device = "cuda" if CUDA else "cpu"
    parser.add_argument("--device", default=device)
    return parser.parse_args()


def models(given: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The same weights twice: as transformers runs them, and on gdn."""
    config = transformers.Qwen3_5TextConfig(**turns.model_config(given))
    torch.manual_seed(0)
    models: dict[str, torch.nn.Module] = {}
    for kind in turns.KINDS:
        with torch.device(given.device):
            model = transformers.Qwen3_5ForCausalLM(config).to(torch.bfloat16)
        if models:
            model.load_state_dict(models["baseline"].state_dict(), assign=True)
        models[kind] = model.eval()
    on_gdn.kernelize(models["gdn"])
    return models


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def seconds(model: torch.nn.Module, prompt: torch.Tensor, new: int) -> turns.Times:
    begin = now()
    step = model(prompt, use_cache=True, logits_to_keep=1)
    first = now()
    for _ in range(new - 1):
        token = step.logits[:, -1:].argmax(-1)
        step = model(token, past_key_values=step.past_key_values, use_cache=True)
    token = (now() - first) / (new - 1) if new > 1 else None
    return first - begin, token


@torch.inference_mode()
def logprobs(model: torch.nn.Module, given: argparse.Namespace) -> list[dict]:
    """Of the tokens of eight prompts, and of the new ones of each: "prompt" and "new"."""
    new, device = given.new, given.device
    sequences = []
    for n in range(1, 9):
        ids = turns.token_ids(100 + n, 64 * n + 37 + new)
        row = torch.tensor([ids], device=device)
        step = model(row[:, :-new], use_cache=True)
        logits = [step.logits[0]]
        for token in row[0, -new:-1]:
            cache = step.past_key_values
            step = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            logits.append(step.logits[0])
        rows = torch.cat(logits).float().log_softmax(-1)
        values = rows.gather(-1, row[0, 1:, None])[:, 0].tolist()
        parts = {"prompt": values[:-new], "new": values[-new:]}
        sequences.append({"tokens": ids} | parts)
    return sequences


def runner(
    model: torch.nn.Module, given: argparse.Namespace, point: Point
) -> Callable[[int], turns.Times]:
    prompt = torch.tensor(point.tokens(), device=given.device)
    return lambda new: seconds(model, prompt, new)


def samples(
    model: torch.nn.Module, given: argparse.Namespace, point: Point
) -> list[turns.Sample]:
    run = runner(model, given, point)
    point.sample(run)  # to warm up
    return [point.sample(run) for _ in range(given.samples)]


def kernels(model: torch.nn.Module, given: argparse.Namespace) -> dict[str, dict]:
    return {
        str(point): turns.kernels(runner(model, given, point), point)
        for point in turns.points(given)
    }


def main() -> None:
    given = options()
    instances = models(given)
    points = {str(point): point for point in turns.points(given)}
    runs = [
        (kind, lambda name, kind=kind: samples(instances[kind], given, points[name]))
        for kind in turns.ORDER
    ]
    results = turns.in_turns(runs, list(points))
    fla = importlib.util.find_spec("fla") is not None
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "baseline": "fla" if fla else "torch",
        "heads": given.heads,
        "layers": given.layers,
        "pool": "float32",
        "fallbacks": dict(on_gdn.fallbacks),
    }
    if CUDA:
        about["kernels"] = {
            kind: kernels(model, given) for kind, model in instances.items()
        }
    if given.accuracy:
        values = {kind: logprobs(instances[kind], given) for kind in turns.KINDS}
        with tempfile.TemporaryDirectory() as folder:
            instances["baseline"].save_pretrained(folder)
            about["errors"] = turns.errors(folder, values)
    turns.finish(about, results, given.out)


if __name__ == "__main__":
    main()
