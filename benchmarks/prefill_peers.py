"""Prefill from raw gates beside FlashInfer, flash-linear-attention and FlashQLA, which get their gates ready-made.

`gdn bench` times peers as solutions of the op: with the kernel that makes their gates, and by their own dispatch. Here
they have what they want: g (or its exponential) and beta in float32, the state in their own layout, and FlashInfer both
of its paths, with the length of the longest sequence where it can use that. Ours start from a, b, A_log and dt_bias.

    python benchmarks/prefill_peers.py [--heads 4/8,16/32] [--shapes 1x64,1024+7168] [--twins] [--algos cuda-chunk]
                                       [--peers flashinfer,fla,flashqla] [--seconds 0.2] [--out FILE]

All rivals of a shape take turns in one process; times are CUPTI's (tier `cupti`: the sum over a call's kernels, L2
cold), medians in us. Values are of the twins' distribution (gdn_cli/twins.py), drawn on the GPU. --twins adds the
contest's lengths with few samples each; `--shapes none --twins` is the twins alone. The first of --algos is `ours`.
A peer that is not installed, fails, or is further than 0.02 from ours is a line under the table.

Before anything is timed all that compiles does so in processes of its own, side by side: their caches on disk are what
this one then finds. FlashInfer has none and compiles here. FLA tunes itself here, alone on the GPU, at a quarter of
Triton's usual measuring time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault(
    "FLA_FLASH_QLA", "0"
)  # else FLA hands calls with ready-made gates to FlashQLA; read at its import

import torch

from gdn_cli import environment, errors, load, machine, presets, registry, twins, workloads
from gdn_cli.timing import Plan, Subject, TierUnavailable, interleave, measure

OP, D = "gdn_prefill", 128
HEADS = "4/8,16/32,16/64"
SHAPES = {"4/8": "1x64,1x512,1x2048,1x8192,1x32768,4x2048,8x1024,32x256,64x64,1024+7168"}
OTHERS = "1x2048,4x2048,8x256,16x128"  # with other heads
TUNED = "4x2048"  # FLA tunes itself at the first call with these heads, whatever its lengths
COMPILED = "1x64,1x8192"  # short and long: FlashQLA splits the second over CTAs at few heads
LIMIT = 2e-2  # relative error beyond which a result is wrong
WORST = 10  # twins that are printed; all are in the file
COMPILE_S = 240  # how long the processes that compile may take

Pair = tuple[torch.Tensor, torch.Tensor]  # output and new state, as the definition has them
Bind = Callable[[dict[str, Any]], Callable[[], Pair]]  # inputs -> a call on them


class Case(NamedTuple):
    """What all rivals are timed at."""

    heads: str  # "4/8": of q and k, of v
    shape: str  # "4x2048"
    lengths: tuple[int, ...]
    twin: bool = False


def inputs(case: Case, device: str = "cuda", seed: int = 1) -> dict[str, Any]:
    """The definition's tensors; `g` and its exponential `alpha`, `beta`; the state k-first (`state_kv`); `longest`."""
    random = torch.Generator(device).manual_seed(seed)
    H, HV = map(int, case.heads.split("/"))
    T, N = sum(case.lengths), len(case.lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=random)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(HV, device=device, generator=random)

    normalize, softplus = torch.nn.functional.normalize, torch.nn.functional.softplus
    dt = uniform(math.log(1e-3), math.log(1e-1)).exp()
    x: dict[str, Any] = {
        "q": normalize(normal(T, H, D), dim=-1).bfloat16(),
        "k": normalize(normal(T, H, D), dim=-1).bfloat16(),
        "v": normal(T, HV, D).bfloat16(),
        "state": 0.17 * normal(N, HV, D, D),
        "A_log": uniform(1, 16).log(),
        "a": normal(T, HV).bfloat16(),
        "dt_bias": dt + torch.log(-torch.expm1(-dt)),
        "b": normal(T, HV).bfloat16(),
        "cu_seqlens": torch.tensor([0, *case.lengths], device=device).cumsum(0),
        "scale": D**-0.5,
    }
    g = -x["A_log"].exp() * softplus(x["a"].float() + x["dt_bias"])
    ready = {"g": g, "alpha": g.exp(), "beta": x["b"].float().sigmoid(), "state_kv": x["state"].mT.contiguous()}
    return x | ready | {"longest": max(case.lengths)}


# --- rivals -----------------------------------------------------------------------------------------------------------


def ours(name: str) -> dict[str, Bind]:
    function, names = load(name, OP), list(registry.load().ops[OP].inputs)

    def bind(x: dict[str, Any]) -> Callable[[], Pair]:
        given, out = [x[key] for key in names], (torch.empty_like(x["v"]), torch.empty_like(x["state"]))
        return lambda: function(*given, out=out)

    return {name: bind}


def flashinfer() -> dict[str, Bind]:
    _below_its_init("flashinfer")
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def binding(use_cp: bool) -> Bind:
        def bind(x: dict[str, Any]) -> Callable[[], Pair]:
            given = {key: x[key] for key in ("q", "k", "v", "beta", "scale", "cu_seqlens")}
            given |= {"g": x["alpha"], "initial_state": x["state"], "output_final_state": True, "use_cp": use_cp}
            given |= {"output": torch.empty_like(x["v"]), "output_state": torch.empty_like(x["state"])}
            given |= {"max_seqlen": x["longest"]} if use_cp else {}
            return lambda: chunk_gated_delta_rule(**given)

        return bind

    return {"flashinfer": binding(False), "flashinfer cp": binding(True)}


def fla() -> dict[str, Bind]:
    import triton.testing

    triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=6, rep=25)  # its autotuner's, in ms
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return {"fla": _batched(chunk_gated_delta_rule)}


def flashqla() -> dict[str, Bind]:
    from flash_qla import chunk_gated_delta_rule

    return {"flashqla": _batched(chunk_gated_delta_rule)}


def _batched(function: Callable[..., Pair]) -> Bind:
    """Packed sequences as one batch entry, a state [K, V]; both plan by `cu_seqlens`, once for each tensor object."""

    def bind(x: dict[str, Any]) -> Callable[[], Pair]:
        given = {key: x[key][None] for key in ("q", "k", "v", "g", "beta")}
        given |= {"scale": x["scale"], "cu_seqlens": x["cu_seqlens"]}
        given |= {"initial_state": x["state_kv"], "output_final_state": True}

        def call() -> Pair:
            output, state = function(**given)
            return output[0], state.mT  # views: no kernel

        return call

    return bind


def _below_its_init(package: str) -> None:
    """Make a package importable without its __init__: FlashInfer's imports far more than its GDN kernels need."""
    if package in sys.modules:
        return
    if (spec := importlib.util.find_spec(package)) is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{package}'")
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = module
    module.__version__ = importlib.import_module(f"{package}._build_meta").__version__


PEERS: dict[str, Callable[[], dict[str, Bind]]] = {"flashinfer": flashinfer, "fla": fla, "flashqla": flashqla}


def gathered(wanted: dict[str, Callable[[], dict[str, Bind]]]) -> tuple[dict[str, Bind], dict[str, str]]:
    """Rival -> how to bind it; and who is not there, with the reason."""
    found: dict[str, Bind] = {}
    missing: dict[str, str] = {}
    for name, get in wanted.items():
        try:
            found |= get()
        except Exception as e:  # whatever a package does at its import
            missing[name] = reason(e)
    return found, missing


def reason(e: Exception) -> str:
    return ("not installed: " * isinstance(e, ModuleNotFoundError) + errors.one_line(e))[:160]


# --- compiling, in processes of its own -------------------------------------------------------------------------------


def compile_apart(algos: list[str], peers: list[str], heads: list[str]) -> list[subprocess.Popen]:
    """Started processes, one for each algo and for each peer and head count, which leave caches behind."""
    tasks = [(name, heads) for name in algos] + [(p, [h]) for p in peers if p != "flashinfer" for h in heads]
    environ = os.environ | {"FLA_CACHE_RESULTS": "0"}  # what FLA finds fastest while others use the GPU is no result
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--compile", name, "--heads", ",".join(of)],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name, of in tasks
    ]  # fmt: skip


def compile_here(name: str, heads: list[str]) -> None:
    """Call a rival at a short and a long shape of these heads. What fails here says so where it is timed."""
    for bind in (PEERS.get(name) or functools.partial(ours, name))().values():
        for case in cases(heads, COMPILED):
            call = bind(inputs(case))
            call()
            torch.cuda.synchronize()


def wait(processes: list[subprocess.Popen]) -> None:
    until = time.monotonic() + COMPILE_S
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- timing -----------------------------------------------------------------------------------------------------------


def relative(x: torch.Tensor, right: torch.Tensor) -> float:
    """The relative Frobenius error; of an empty or zero `right` the norm itself."""
    norm = right.float().norm()
    return float((x.float() - right.float()).norm() / (norm if norm > 0 else 1))


def timed(case: Case, rivals: dict[str, Bind], plan: Plan, device: str = "cuda", tier: str = "cupti") -> dict[str, Any]:
    """One row: medians, quartiles, kernels and errors against the first rival that runs; who failed, and why."""
    where = {"heads": case.heads, "shape": case.shape}
    try:
        x = inputs(case, device)
    except Exception as e:  # too little memory, or a fault on the GPU before
        return where | {"failed": dict.fromkeys(rivals, reason(e))}
    calls: dict[str, Callable[[], Pair]] = {}
    found: dict[str, Any] = {"us": {}, "quartiles": {}, "kernels": {}, "error": {}, "failed": {}}
    right = None
    for name, bind in rivals.items():
        try:
            call = bind(x)
            result = call()
            right = right or [y.clone() for y in result]
            error = [relative(y, z) for y, z in zip(result, right, strict=True)]
        except Exception as e:  # a peer's refusal; after a fault on the GPU all that follow fail too
            found["failed"][name] = reason(e)
            continue
        found["error"][name] = [float(f"{e:.2g}") if math.isfinite(e) else None for e in error]
        if all(e <= LIMIT for e in error):  # false for NaN
            calls[name] = call
        else:
            found["failed"][name] = f"relative error of output {error[0]:.2g}, of the state {error[1]:.2g}"
    subjects = {name: Subject(call, [], []) for name, call in calls.items()}
    for name, timing in _times(tier, subjects, plan, found["failed"]).items():
        found["us"][name] = round(timing.median_us, 3)
        found["quartiles"][name] = [round(timing.low_us, 3), round(timing.high_us, 3)]
        found["kernels"][name] = timing.kernels
        found["samples"] = timing.samples
    return where | {key: value for key, value in found.items() if value}


def _times(tier: str, subjects: dict[str, Subject], plan: Plan, failed: dict[str, str]) -> dict[str, Any]:
    """All in turns; where one of them makes that impossible, each alone, so that only it is lost."""
    if not subjects:
        return {}
    try:
        return dict(zip(subjects, interleave(tier, list(subjects.values()), plan)[0], strict=True))
    except Exception as e:
        if not isinstance(e, TierUnavailable) and "CUDA" in str(e):  # the GPU's context is gone
            failed |= dict.fromkeys(subjects, reason(e))
            return {}
    alone = {}
    for name, subject in subjects.items():
        try:
            alone[name] = measure(tier, subject, plan)
        except Exception as e:
            failed[name] = reason(e)
    return alone


# --- what came of it --------------------------------------------------------------------------------------------------


def judged(row: dict[str, Any], algos: list[str]) -> dict[str, Any]:
    """The row with its best peer, and best peer / ours (the first algo): above 1, ours is faster."""
    us = row.get("us", {})
    peers = {name: t for name, t in us.items() if name not in algos}
    best = min(peers, key=peers.get, default=None)
    ratio = round(peers[best] / us[algos[0]], 3) if best and algos[0] in us else None
    return row | {"best_peer": best, "ratio": ratio}


def over(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The geometric mean of best peer / ours, how often ours is slower, and how many of the rows have both."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    mean = round(statistics.geometric_mean(ratios), 3) if ratios else None
    least = min(ratios, default=None)
    return {"rows": len(rows), "judged": len(ratios), "geometric_mean": mean, "least": least,
            "slower": sum(ratio < 1 for ratio in ratios)}  # fmt: skip


def table(rows: list[dict[str, Any]], algos: list[str]) -> list[str]:
    """Lines: a row for each shape, medians in us, the best peer marked."""
    names = list(dict.fromkeys([*algos, *(name for row in rows for name in row.get("us", {}))]))
    names = [name for name in names if any(name in row.get("us", {}) for row in rows)]
    widths = [max(len(name), 7) + 1 for name in names]
    first = max([len(f"{row['heads']} {row['shape']}") for row in rows] + [5])
    cells = [f"{name:>{w}}" for name, w in zip(names, widths, strict=True)]
    lines = ["us".ljust(first) + "".join(cells) + "  best/ours"]
    for row in rows:
        cells = []
        for name, w in zip(names, widths, strict=True):
            us = row.get("us", {}).get(name)
            text = "-" if us is None else f"{us:.4g}" if us < 1000 else f"{us:.0f}"
            cells.append(f"{text + '*' * (name == row['best_peer']):>{w}}")
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(f"{row['heads']} {row['shape']}".ljust(first) + "".join(cells) + f"{ratio:>11}")
    return lines


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Lines: who failed, why, and where."""
    places: dict[tuple[str, str], list[str]] = {}  # (rival, reason) -> where
    for row in rows:
        for name, why in row.get("failed", {}).items():
            places.setdefault((name, why), []).append(f"{row['heads']} {row['shape']}")
    return [
        f"{name}: {why} [{', '.join(where[:4])}{f' and {len(where) - 4} more' * (len(where) > 4)}]"
        for (name, why), where in places.items()
    ]


def document(about: dict[str, Any], shapes: list[dict[str, Any]], of_twins: list[dict[str, Any]]) -> str:
    """JSON, one line for each row."""
    parts = {"shapes": shapes, "twins": of_twins}
    bodies = [f' "{key}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for key, rows in parts.items() if rows]
    heads = {"over_shapes": over(shapes)} if shapes else {}
    heads |= {"over_twins": over(of_twins)} if of_twins else {}
    return (
        "{\n"
        + ",\n".join([f" {json.dumps(k)}: {json.dumps(v)}" for k, v in (about | heads).items()] + bodies)
        + "\n}\n"
    )


# --- the command ------------------------------------------------------------------------------------------------------


def cases(heads: list[str], shapes: str | None) -> list[Case]:
    """Every shape with every head count; without `shapes`, those of the table."""
    wanted = [(h, shape) for h in heads for shape in (shapes or SHAPES.get(h, OTHERS)).split(",")]
    return [Case(h, shape, presets.parse_seq_lens(shape)) for h, shape in wanted if shape != "none"]


def contest(heads: str = "4/8") -> list[Case]:
    """The contest's workloads by their twins' lengths."""
    embedded = workloads.embedded(registry.load().ops[OP])
    each = [(w.uuid[:8], twins.sequence_lengths(w)) for w in embedded]
    return [Case(heads, f"{uuid} T={sum(n)} N={len(n)}", n, twin=True) for uuid, n in each]


def asked(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="such as 1x64,1024+7168, with every head count; none; default: the table's")
    parser.add_argument("--heads", default=HEADS, help="of q and k / of v; default: %(default)s")
    parser.add_argument("--twins", action="store_true", help="the contest's 100 workloads as well, at 4/8 heads")
    parser.add_argument("--algos", default="cuda-chunk,cuda-recurrent,fla-chunk", help="default: %(default)s")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of these, or none; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each shape, all rivals together (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="of each rival at each twin; default: %(default)s")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    given.heads, given.algos = given.heads.split(","), given.algos.split(",")
    given.peers = [] if given.peers == "none" else given.peers.split(",")
    for h in given.heads:
        numbers = h.split("/")
        if (
            len(numbers) != 2
            or not all(n.isdigit() and int(n) > 0 for n in numbers)
            or int(numbers[1]) % int(numbers[0])
        ):
            parser.error(f"--heads {h}: expected such as 4/8, the second a multiple of the first")
    for shape in (given.shapes or "none").split(","):
        if shape != "none" and not presets.parse_seq_lens(shape):
            parser.error(f"--shapes {shape}: expected lengths such as 4x2048 or 1024+7168, or none")
    mine = registry.load(os.environ.get("GDN_ALGOS"))  # a folder of one's own counts, too, as in gdn_cli.load
    known = [algo.name for algo in mine.of(OP) if not algo.packages]  # the others are peers
    if wrong := [name for name in given.algos if name not in known]:
        parser.error(f"--algos {wrong[0]}: expected some of {', '.join(known)}")
    if wrong := [name for name in given.peers if name not in PEERS]:
        parser.error(f"--peers {wrong[0]}: expected some of {', '.join(PEERS)}, or none")
    if not 0 < given.seconds < math.inf or given.samples < 1:
        parser.error("--seconds and --samples: expected more than 0")
    return given


def main() -> None:
    given, began = asked(), time.monotonic()
    if not (gpus := machine.gpus()):
        sys.exit("no GPU here; `gdn doctor` says what is missing")
    if given.compile:
        return compile_here(given.compile, given.heads)

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    of_twins = contest() if given.twins else []
    of_shapes = cases(given.heads, given.shapes)
    heads = list(dict.fromkeys(case.heads for case in of_shapes + of_twins))
    if not heads:
        sys.exit("nothing to time: give --shapes or --twins")
    compiling = compile_apart(given.algos, given.peers, heads)
    try:
        peers, missing = gathered({name: PEERS[name] for name in given.peers})
        for name in ("flashinfer", "flashinfer cp"):
            if name in peers:
                peers[name](inputs(Case(heads[0], "1x512", (512,))))()
        torch.cuda.synchronize()
    except Exception as e:
        say(f"flashinfer does not start: {reason(e)}")
    finally:  # an interrupted one leaves no processes behind
        say("imported; waiting for the compilers")
        wait(compiling)
    mine, absent = gathered({name: functools.partial(ours, name) for name in given.algos})
    missing |= absent
    about: dict[str, Any] = {"gpu": gpus[0].name, "driver": gpus[0].driver, "tier": "cupti", "l2": "cold"}
    about |= environment.commit() | {"versions": environment.versions() | {"torch": torch.__version__}}
    if "flashinfer" in peers:
        about["versions"].setdefault("flashinfer-python", sys.modules["flashinfer"].__version__)
    about |= {"ours": given.algos[0], "missing": missing}
    for h in heads if "fla" in peers else []:
        with contextlib.suppress(Exception):  # it says so where it is timed
            peers["fla"](inputs(*cases([h], TUNED)))()
    say(f"compiled; {', '.join([*mine, *peers])}")

    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    plans = {False: Plan(seconds=given.seconds, target=0.002), True: Plan(warmup=1, iterations=given.samples)}
    for case in of_shapes + of_twins:
        row = judged(timed(case, mine | peers, plans[case.twin]), given.algos)
        rows[case.twin].append(row)
        if given.out and (not case.twin or len(rows[True]) % 25 == 0):
            given.out.write_text(document(about, *rows.values()))
    if given.out:
        given.out.write_text(document(about, *rows.values()))
    say("timed")
    for line in lines(rows[False], rows[True], given.algos, missing):
        print(line)


def lines(
    shapes: list[dict[str, Any]], of_twins: list[dict[str, Any]], algos: list[str], missing: dict[str, str]
) -> list[str]:
    """All that is printed: the twins at which ours is worst, and the shapes last."""
    said = [f"{name}: {why}" for name, why in missing.items()]
    if of_twins:
        worst = sorted(of_twins, key=lambda row: math.inf if row["ratio"] is None else row["ratio"])[:WORST]
        said += [*table(worst, algos), *failures(of_twins), verdict("twins", of_twins, algos[0], missing), ""]
    if shapes:
        said += [*table(shapes, algos), *failures(shapes), verdict("shapes", shapes, algos[0], missing)]
    return said


def verdict(what: str, rows: list[dict[str, Any]], name: str, missing: Collection[str] = ()) -> str:
    found, absent = over(rows), [peer for peer in missing if peer in PEERS]
    if not found["judged"]:
        return f"{what}: none of {found['rows']} has both {name} and a peer"
    return (
        f"{what}: best peer / {name} {found['geometric_mean']:.2f} (geometric mean of {found['judged']} of "
        f"{found['rows']}), at least {found['least']:.2f}; slower than the best peer at {found['slower']}"
        + (f"; without {', '.join(absent)}" if absent else "")
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
