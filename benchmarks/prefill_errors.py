"""How far prefill is from float64, ours beside FlashInfer, flash-linear-attention and FlashQLA, on the same inputs.

The inputs are those of tests/test_prefill_edges.py: lengths around chunks, many sequences, 65536 tokens, and what is
meant to break a kernel (one key for all tokens, gates at their ends, signs that alternate). Peers get their gates
ready-made, in float32 of the float64 values.

    python benchmarks/prefill_errors.py [--algos cuda-chunk,cuda-recurrent,fla-chunk] [--peers flashinfer,fla,flashqla]
                                        [--cases "65536, signs;1000"] [--out FILE]

Relative Frobenius errors of the output and of the new state. `ratio` is ours (the first algo) over the best peer's, the
worse of the two results; a result that is not finite has none. Needs a GPU and what prefill_peers.py needs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import prefill_peers as rivals
import torch

from gdn_cli import environment, machine

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # behind this folder: only what is not found here

import test_prefill_edges as edges  # noqa: E402

NAMES = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "cu_seqlens", "scale")
CASES = edges.SMALL | edges.LONG | edges.LARGE


def untuned() -> None:
    """Triton's kernels with the first of their constants: FLA would try all of them for every number of heads,
    and which are fastest is nothing to an error."""
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *args, **more: list(pruned(self, *args, **more))[:1]


def inputs(work: dict[str, Any], device: str = "cuda") -> dict[str, Any]:
    """One case as prefill_peers binds it: the definition's tensors, and what peers want ready-made."""
    x: dict[str, Any] = dict(zip(NAMES, edges.inputs(**work, device=device), strict=True))
    x["scale"] = x["scale"] or rivals.D**-0.5
    sums = x["a"].double() + x["dt_bias"].double()
    g = -x["A_log"].double().exp() * (sums.clamp(min=0) + torch.log1p(torch.exp(-sums.abs())))
    x |= {"g": g.float(), "alpha": g.exp().float(), "beta": x["b"].double().sigmoid().float()}
    return x | {"state_kv": x["state"].mT.contiguous(), "longest": max(work["lengths"])}


def errors_of(x: dict[str, Any], found: dict[str, Any]) -> dict[str, list[float | None] | str]:
    """Rival -> errors of output and state, None where that is not finite; or why it did not run."""
    right = edges.exact(*(x[name] for name in NAMES))
    said: dict[str, list[float | None] | str] = {}
    for name, bind in found.items():
        try:
            result = bind(x)()
            each = [edges.error(y, z) for y, z in zip(result, right, strict=True)]
        except Exception as e:  # a peer's refusal
            said[name] = rivals.reason(e)
            continue
        said[name] = [float(f"{e:.3g}") if math.isfinite(e) else None for e in each]
    return said


def ratio(errors: dict[str, Any], algos: list[str]) -> float | None:
    """Ours over the best peer's, for the worse of output and state; None where there is nothing to compare."""
    mine = errors[algos[0]]
    worst = []
    for i in range(2):
        peers = [e[i] for name, e in errors.items() if name not in algos and isinstance(e, list) and e[i] is not None]
        if isinstance(mine, str) or mine[i] is None or not peers:
            return None
        worst.append(mine[i] / min(peers) if min(peers) > 0 else 1.0 if mine[i] == 0 else math.inf)
    return round(max(worst), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algos", default="cuda-chunk,cuda-recurrent,fla-chunk", help="default: %(default)s")
    parser.add_argument("--peers", default=",".join(rivals.PEERS), help="default: %(default)s")
    parser.add_argument("--cases", help="some of the cases, separated by semicolons; default: all")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    algos, peers = given.algos.split(","), [p for p in given.peers.split(",") if p]
    names = given.cases.split(";") if given.cases else list(CASES)
    if wrong := [name for name in names if name not in CASES]:
        parser.error(f"--cases {wrong[0]}: expected some of {'; '.join(CASES)}")
    if wrong := [name for name in peers if name not in rivals.PEERS]:
        parser.error(f"--peers {wrong[0]}: expected some of {', '.join(rivals.PEERS)}")
    if not (gpus := machine.gpus()):
        sys.exit("no GPU here; `gdn doctor` says what is missing")
    untuned()
    wanted = {name: functools.partial(rivals.ours, name) for name in algos}
    found, missing = rivals.gathered(wanted | {name: rivals.PEERS[name] for name in peers})
    about = {"gpu": gpus[0].name, "driver": gpus[0].driver} | environment.commit()
    about |= {"versions": environment.versions() | {"torch": torch.__version__}, "missing": missing}
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            errors = errors_of(inputs(CASES[name]), found)
        except torch.OutOfMemoryError as e:
            print(f"{name}: {rivals.reason(e)}", file=sys.stderr)
            continue
        rows.append({"case": name, "errors": errors, "ratio": ratio(errors, algos)})
        cells = [f"{n} {e if isinstance(e, str) else '/'.join(map(str, e))}" for n, e in errors.items()]
        print(f"{name}: {', '.join(cells)}; ratio {rows[-1]['ratio']}", flush=True)
        if given.out:
            lines = ",\n  ".join(map(json.dumps, rows))
            given.out.write_text(f'{json.dumps(about)[:-1]},\n "cases": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    with torch.no_grad():
        main()
