"""The decode kernels as a server calls them, with the state updated in place, beside cuda-v5 and the copy of the bytes.

`gdn bench` asks every algo for a new state and leaves the old one as it was. FlashInfer's kernel cannot do that, and
`fi-baseline` pays for a copy of the state. Here it does what it was written for: it overwrites the state.

    python benchmarks/decode_in_place.py [--out FILE] [--batch 1,2,3] [--op gdn_decode,gdn_decode_bf16]

Needs a GPU of capability 9.0, `flashinfer-python` and, for the float32 state, `fla-core`. All rivals of a batch size
take turns in one process; times are CUPTI's (tier `cupti`: the sum over a call's kernels, L2 cold), midmeans in us.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gdn_cli import environment, load, machine, paired
from gdn_cli.timing import Plan, Subject, interleave
from gdn_cli.timing.floor import fastest_copy

BATCHES = "1,2,3,4,5,7,8,12,16,24,31,32,33,47,48,63,64,65,96,100,127,128,129,192,200,255,256"
H, HV, D = 4, 8, 128
STATE = {"gdn_decode": torch.float32, "gdn_decode_bf16": torch.bfloat16}
CUDA = {"gdn_decode": ["cuda-v5", "triton-v2", "cuda-v4", "fla-recurrent"], "gdn_decode_bf16": ["cuda-v5-bf16"]}


def inputs(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(batch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=random)

    return {
        "q": normal(batch, 1, H, D).bfloat16(),
        "k": torch.nn.functional.normalize(normal(batch, 1, H, D), dim=-1).bfloat16(),
        "v": normal(batch, 1, HV, D).bfloat16(),
        "state": normal(batch, HV, D, D).to(dtype),
        "A_log": normal(HV),
        "a": normal(batch, 1, HV).bfloat16(),
        "dt_bias": normal(HV),
        "b": normal(batch, 1, HV).bfloat16(),
    }


def calls(op: str, batch: int) -> dict[str, Callable[[], Any]]:
    """Rival -> its call, each on a state of its own that it may overwrite again and again."""
    x = inputs(batch, STATE[op])
    output = torch.empty_like(x["v"])
    found: dict[str, Callable[[], Any]] = {}

    def add(name: str, function: Callable[..., Any], into: torch.Tensor, state: torch.Tensor) -> None:
        given = [state if key == "state" else value for key, value in x.items()]
        found[name] = lambda: function(*given, out=(output, into))

    for name in CUDA[op]:
        add(name, load(name, op), torch.empty_like(x["state"]), x["state"])
    state = x["state"].clone()
    add(f"{CUDA[op][0]} in place", load(CUDA[op][0], op), state, state)
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    own = x["state"].clone()
    found["flashinfer in place"] = lambda: gated_delta_rule_decode_pretranspose(
        x["q"], x["k"], x["v"], own, x["A_log"], x["a"], x["dt_bias"], x["b"],
        scale=D**-0.5, output=output, use_qk_l2norm=False,
    )  # fmt: skip
    if op == "gdn_decode":
        upstream = load("fla-upstream", op)
        found["fla-upstream"] = lambda: upstream(*x.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", default=BATCHES, help="batch sizes, such as 1,8,64")
    parser.add_argument("--op", default=",".join(CUDA), help="one of these, or both")
    asked = parser.parse_args()
    ops, batches = asked.op.split(","), asked.batch.split(",")
    if not set(ops) <= set(CUDA):
        parser.error(f"--op {asked.op}: expected {' or '.join(CUDA)}")
    if not all(batch.isdigit() and int(batch) > 0 for batch in batches):
        parser.error(f"--batch {asked.batch}: expected sizes from 1 on, such as 1,8,64")
    if not (gpus := machine.gpus()):
        sys.exit("no GPU here; `gdn doctor` says what is missing")
    if importlib.util.find_spec("flashinfer") is None:
        sys.exit("FlashInfer is missing: pip install flashinfer-python")
    gpu = gpus[0]
    about = {"gpu": gpu.name, "driver": gpu.driver, "tier": "cupti", "l2": "cold"}
    about |= environment.commit() | {"versions": environment.versions()}
    rows = []
    for op in ops:
        for batch in map(int, batches):
            rivals = calls(op, batch)
            bytes_ = 2 * batch * HV * D * D * STATE[op].itemsize + batch * (2 * H + 2 * HV) * D * 2
            copy, how = fastest_copy(bytes_, "cuda")
            subjects = [copy, *(Subject(call, [], []) for call in rivals.values())]
            _, samples = interleave("cupti", subjects, Plan(seconds=0.4, target=0.002))
            us = {name: round(paired.centre(s), 3) for name, s in zip(["copy", *rivals], samples, strict=True)}
            rows.append({"op": op, "batch_size": batch, "us": us, "samples": len(samples[0]), "copy": how})
            print(f"{op} B={batch:<4}", "  ".join(f"{name} {t:.2f}" for name, t in us.items()), flush=True)
            if asked.out:
                body = ",\n ".join(json.dumps(row) for row in rows)
                asked.out.write_text(json.dumps(about)[:-1] + f', "rows": [\n {body}\n]}}\n')


if __name__ == "__main__":
    main()
