"""A Qwen3.5 of random weights in vLLM 0.33, with gdn's kernels and without, in turns.

    python examples/clients/vllm_qwen.py --batch 1,8,64 --json

Two engines in this process, each with its own CUDA graphs: the first one is made before gdn is
installed. It needs an NVIDIA GPU and vllm 0.33.0. It was written against that release's files and
has not been run as it is. Where vLLM's optional packages are missing, stand-ins for them have to be
imported before: `python -c "import stand_ins, runpy; runpy.run_path(...)"`, and `--attention
TRITON_ATTN` needs no FlashAttention.
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines in this process
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import transformers  # noqa: E402
import vllm  # noqa: E402
from turns import Times, in_turns, rows, show  # noqa: E402

from gdn.serving import vllm as on_gdn  # noqa: E402


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers", type=int, default=8, help="of every four three have GDN"
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", default="16/32", help="of q and k, and of v")
    parser.add_argument("--batch", default="1", help="sizes, such as 1,8,64")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens, at least 2")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument(
        "--attention", help="vLLM's attention_backend, such as TRITON_ATTN"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def engine(given: argparse.Namespace, folder: str) -> vllm.LLM:
    H, HV = map(int, given.heads.split("/"))
    transformers.Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 256,
        num_key_value_heads=2,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        vocab_size=32000,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.4,  # two of them
        max_model_len=given.prompt + given.new,
        enable_prefix_caching=False,
        attention_backend=given.attention,
        additional_config={"gdn_prefill_backend": "triton"},
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )


def generate(made: vllm.LLM, batch: int, prompt: int, new: int) -> Times:
    tokens = [[1 + (7 * n + i) % 31000 for i in range(prompt)] for n in range(batch)]
    prompts = [{"prompt_token_ids": row} for row in tokens]
    seconds = []
    for count in (1, new):
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        sampling = vllm.SamplingParams(max_tokens=count, **greedy)
        begin = time.perf_counter()
        made.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], (seconds[1] - seconds[0]) / (new - 1)


def main() -> None:
    given = options()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        own = engine(given, folder)
        replaced = on_gdn.install()
        ours = engine(given, folder)
    for batch in map(int, given.batch.split(",")):
        sizes = batch, given.prompt, given.new

        def baseline(sizes: tuple[int, int, int] = sizes) -> Times:
            on_gdn.uninstall()
            return generate(own, *sizes)

        def gdn(sizes: tuple[int, int, int] = sizes) -> Times:
            on_gdn.install()
            return generate(ours, *sizes)

        table += rows(batch, in_turns({"baseline": baseline, "gdn": gdn}, given.rounds))
    about = {
        "vllm": vllm.__version__,
        "replaced": replaced,
        "fallbacks": dict(on_gdn.fallbacks),
    }
    show(about | {"prompt": given.prompt, "new": given.new}, table, given.json)


if __name__ == "__main__":
    main()
