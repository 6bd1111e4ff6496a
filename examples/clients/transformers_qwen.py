"""A Qwen3.5 of random weights in transformers, with gdn's kernels and without, in turns.

    python examples/clients/transformers_qwen.py --layers 4 --hidden 64 --heads 2/4   # on a CPU
    python examples/clients/transformers_qwen.py --batch 1,8 --prompt 2048 --json     # on a GPU

It needs transformers and kernels (`pip install '.[clients]'` in a clone). Without gdn
transformers calls flash-linear-attention if that is installed, else its own functions in PyTorch:
`baseline` says which. On a GPU the kernels' shares of the GPU's time are shown too. The loop is
greedy and eager, so on a GPU the host's time counts.
"""

import argparse
import importlib.util
import platform
import time

import torch
import transformers
from turns import Times, in_turns, rows, show

from gdn.serving import transformers as on_gdn


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers", type=int, default=4, help="of every four three have GDN"
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", default="16/32", help="of q and k, and of v")
    parser.add_argument("--batch", default="1", help="sizes, such as 1,8,64")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens, at least 2")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def models(given: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The same weights twice: as transformers runs them, and on gdn."""
    H, HV = map(int, given.heads.split("/"))
    config = transformers.Qwen3_5TextConfig(
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.hidden // 256),
        num_key_value_heads=1,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        vocab_size=32000,
    )
    torch.manual_seed(0)
    made = {}
    for kind in ("baseline", "gdn"):
        model = transformers.Qwen3_5ForCausalLM(config).to(given.device, torch.bfloat16)
        if made:
            model.load_state_dict(made["baseline"].state_dict(), assign=True)
        made[kind] = model.eval()
    on_gdn.kernelize(made["gdn"])
    return made


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def generate(model: torch.nn.Module, prompt: torch.Tensor, new: int) -> Times:
    begin = now()
    step = model(prompt, use_cache=True, logits_to_keep=1)
    token = step.logits[:, -1:].argmax(-1)
    first = now()
    for _ in range(new - 1):
        step = model(token, past_key_values=step.past_key_values, use_cache=True)
        token = step.logits[:, -1:].argmax(-1)
    return first - begin, (now() - first) / (new - 1)


def shares(model: torch.nn.Module, prompt: torch.Tensor) -> dict[str, float]:
    """The ten kernels that take most of the GPU's time, of a prompt and 15 tokens."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        generate(model, prompt, 16)
    times = {e.key: e.self_device_time_total for e in profile.key_averages()}
    most = sorted(times, key=times.__getitem__, reverse=True)[:10]
    return {name: times[name] / sum(times.values()) for name in most}


def main() -> None:
    given = options()
    made = models(given)
    fla = importlib.util.find_spec("fla") is not None
    cuda = given.device.startswith("cuda")
    about = {
        "device": torch.cuda.get_device_name()
        if cuda
        else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "baseline": "fla" if fla else "torch",
        "prompt": given.prompt,
        "new": given.new,
    }
    table = []
    for batch in map(int, given.batch.split(",")):
        prompt = torch.randint(1, 32000, (batch, given.prompt), device=given.device)
        kinds = {
            kind: lambda model=model, prompt=prompt: generate(model, prompt, given.new)
            for kind, model in made.items()
        }
        table += rows(batch, in_turns(kinds, given.rounds))
        if cuda:
            about["kernels"] = {
                kind: shares(model, prompt) for kind, model in made.items()
            }
    about["fallbacks"] = dict(on_gdn.fallbacks)
    show(about, table, given.json)


if __name__ == "__main__":
    main()
