"""The log-probability of each token of given sequences, after those before it, in float32.

    python examples/clients/float32.py FOLDER < sequences.json

By transformers' own functions in PyTorch, on a GPU if there is one. `sequences` is a list of lists
of token ids; what is written has one number less in each.
"""

import json
import sys

sys.modules["fla"] = None  # transformers would call its kernels, which multiply in TF32

import torch  # noqa: E402
import transformers  # noqa: E402


@torch.inference_mode()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_folder = transformers.Qwen3_5ForCausalLM.from_pretrained
    model = of_folder(sys.argv[1], dtype=torch.float32).to(device).eval()
    logprobs = []
    for sequence in json.load(sys.stdin):
        ids = torch.tensor([sequence], device=device)
        rows = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        logprobs.append(rows.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    json.dump(logprobs, sys.stdout)


if __name__ == "__main__":
    main()
