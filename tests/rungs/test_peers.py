"""The engines' kernels as peers of the ops with a pool: each call fits the signature
that was read in the engine's release (algo.toml names it), and results land where the
op wants them. The stand-ins compute with the oracle.

Where an engine's files are on the path, its own signatures are read too, without importing it.
"""

import ast
import importlib.util
import json
import textwrap
from pathlib import Path

import helpers
import pytest

from gdn_cli.catalog import pack
from gdn_cli.machine import inventory

REGISTRY = helpers.REGISTRY
BASES = (
    "gdn_decode_packed", "gdn_layer", "gdn_layer_post_conv", "gdn_mtp", "gdn_mtp_packed"
)  # fmt: skip
PEERS = [
    a.full_name
    for base in BASES
    for op in (base, f"{base}_bf16")
    if op in REGISTRY.ops
    for a in REGISTRY.algos_of(op)
    if a.packages
]
VLLM, SGLANG = (
    "vllm/third_party/flash_linear_attention/ops",
    "sglang/kernels/ops/attention/fla",
)
# function -> the modules that have it, and the file of its definition where that is another one
FROM = {
    "fused_recurrent_gated_delta_rule_packed_decode": [
        f"{VLLM}/fused_recurrent.py",
        f"{SGLANG}/fused_recurrent.py",
    ],
    "fused_sigmoid_gating_delta_rule_update": [f"{VLLM}/fused_sigmoid_gating.py"],
    "fused_gdn_decode_post_conv_mtp": ["vllm/_custom_ops.py"],
    "causal_conv1d_update": ["vllm/model_executor/layers/mamba/ops/causal_conv1d.py"],
    "layer_norm_fwd": [f"{VLLM}/layernorm_guard.py"],
    "recurrent_gdn_decode": ["attn_gym/linear/gdn/api.py"],
    "gated_delta_rule_decode_pretranspose": ["flashinfer/gdn_decode.py"],
    "gated_delta_rule_mtp": ["flashinfer/gdn_decode.py"],
}
MODULES = [
    "attn_gym.linear",
    *{file[:-3].replace("/", ".") for files in FROM.values() for file in files},
]
STAND_IN = """
import oracle, torch

def put(to, found):
    to.copy_(torch.tensor(found).view(to.shape))

def fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out,
                                                   ssm_state_indices, use_qk_l2norm_in_kernel=False):
    assert use_qk_l2norm_in_kernel and out.is_contiguous() and out.shape == (len(a), 1, *initial_state.shape[1:3])
    found = oracle.gdn_decode_packed(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, scale)
    put(out, found[0]), put(initial_state, found[1])

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
                         num_accepted_tokens=None, out=None):
    assert bias is None and activation == "silu" and out.shape == x.shape
    for n, slot in enumerate(conv_state_indices.tolist()):
        window = torch.cat([conv_state[slot], x[n][:, None]], 1)
        out[n] = torch.nn.functional.silu((window.double() * weight.double()).sum(1))
        conv_state[slot] = window[:, 1:]

def layer_norm_fwd(x, weight, bias, eps, z=None, out=None, group_size=None, norm_before_gate=True, is_rms_norm=False,
                   activation="swish"):
    assert bias is None and norm_before_gate and is_rms_norm and activation == "swish"
    o = x.double()
    out.copy_(o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * weight * torch.nn.functional.silu(z.double()))

def fused_gdn_decode_post_conv_mtp(mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens,
                                   state, output_gate, norm_weight, out, scale, norm_eps, output_gate_activation="silu"):
    B, T = state_indices.shape
    assert cu_seqlens.tolist() == [i * T for i in range(B + 1)] and cu_seqlens.dtype == torch.int32
    assert (norm_eps, output_gate_activation) == (1e-6, "silu") and out.is_contiguous()
    row, a, b, z = (x.reshape(B, T, *x.shape[1:]) for x in (mixed_qkv, a, b, output_gate))
    found = oracle.gdn_layer_post_conv(row, a, b, A_log, dt_bias, state, state_indices, num_accepted_tokens, scale, z,
                                       norm_weight)
    put(out, found[0]), put(state, found[1])

def recurrent_gdn_decode(packed_qkv, raw_gate, raw_beta, A_log, dt_bias, state_cache, state_indices, *,
                         has_initial_state=None, scale=None, out=None):
    assert raw_gate.shape == raw_beta.shape == (1, len(packed_qkv), len(A_log)) and len(out) == 1
    found = oracle.gdn_decode_packed(packed_qkv, raw_gate[0], raw_beta[0], A_log, dt_bias, state_cache, state_indices,
                                     scale)
    put(out, found[0]), put(state_cache, found[1])

def gated_delta_rule_decode_pretranspose(q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None,
                                         use_qk_l2norm=True, initial_state=None, initial_state_indices=None,
                                         disable_state_update=False):
    assert state is None and a.shape == b.shape == v.shape[:3] and output.shape == v.shape
    assert initial_state.dtype in (torch.float32, torch.bfloat16)
    if q.shape[1] > 1:
        assert initial_state.dtype == torch.bfloat16 and disable_state_update and not use_qk_l2norm
        args = q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale
        return put(output, oracle.gdn_mtp(*args)[0])
    assert use_qk_l2norm and not disable_state_update
    row = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    found = oracle.gdn_decode_packed(row, a[:, 0], b[:, 0], A_log, dt_bias, initial_state, initial_state_indices, scale)
    put(output, found[0]), put(initial_state, found[1])

def gated_delta_rule_mtp(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None,
                         intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None,
                         use_qk_l2norm=True):
    assert initial_state.dtype == torch.float32 and initial_state_indices.shape == q.shape[:1]
    assert disable_state_update == (ssm_state_indices is None) != use_qk_l2norm and intermediate_states_buffer is None
    if ssm_state_indices is not None:
        row = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2)
        accepted = (ssm_state_indices == initial_state_indices[:, None]).int().argmax(1) + 1
        found = oracle.gdn_mtp_packed(row, a, b, A_log, dt_bias, initial_state, ssm_state_indices, accepted, scale)
        return put(output, found[0]), put(initial_state, found[1])
    args = q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale
    put(output, oracle.gdn_mtp(*args)[0])

def fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None,
                                           initial_state=None, inplace_final_state=True, cu_seqlens=None,
                                           ssm_state_indices=None, num_accepted_tokens=None,
                                           use_qk_l2norm_in_kernel=False, is_kda=False):
    assert use_qk_l2norm_in_kernel and inplace_final_state and (beta, threshold, is_kda) == (1.0, 20.0, False)
    B, T = ssm_state_indices.shape
    assert cu_seqlens.tolist() == [i * T for i in range(B + 1)] and cu_seqlens.dtype == torch.int32
    row, a, b = (x.reshape(B, T, -1) for x in (torch.cat([x.flatten(2) for x in (q, k, v)], dim=2), a, b))
    found = oracle.gdn_mtp_packed(row, a, b, A_log, dt_bias, initial_state, ssm_state_indices, num_accepted_tokens,
                                  scale)
    put(initial_state, found[1])
    return torch.tensor(found[0]).to(v.dtype).view(v.shape), initial_state
"""
ASK = textwrap.dedent("""
    import importlib.util, json, sys, types; sys.path[:0] = [{folder!r}, {tests!r}]
    import oracle, stand_in, torch
    for name in {modules!r}:
        for i in range(name.count(".") + 1):
            sys.modules[name.rsplit(".", i)[0]] = stand_in
    found = {{}}
    for name, file in {asked!r}:
        spec = importlib.util.spec_from_file_location("peer", file)
        peer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peer)
        op = name.split("/")[0]
        layer = op.removesuffix("_bf16") == "gdn_layer"
        for scale in (None, 0.3):
            inputs = oracle.inputs(op, batch_size=3, seq_len=1 if "decode" in op or layer else 4, heads=2, scale=scale)
            exact = getattr(oracle, op)(*inputs)
            output = torch.full(exact[0].shape, float("nan"), dtype=torch.bfloat16)
            pool = inputs[3 if op.startswith("gdn_mtp") and "packed" not in op else 5]
            peer.run(*inputs, output, pool, *inputs[9:10] if layer else ())
            found[f"{{name}} {{scale}}"] = [oracle.error(output, exact[0]), oracle.error(pool, exact[1])]
    print(json.dumps(found))
""")


@pytest.mark.slow
def test_the_calls_fit_the_engines_signatures(tmp_path):
    files = {name: pack.sources(REGISTRY.find(name)) for name in PEERS}
    asked = [
        (name, str(next(file for file in files[name] if file.name == "main.py")))
        for name in PEERS
    ]
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    names = dict(
        tests=str(helpers.TESTS), folder=str(tmp_path), asked=asked, modules=MODULES
    )
    done = helpers.python("-c", ASK.format(**names))
    assert done.code == 0, done.err[-2000:]
    found = json.loads(done.out)
    assert len(found) == 2 * len(PEERS) == 34
    bound = {name: 2.5e-3 if "_bf16/" in name else 1e-6 for name in found}
    bound |= {name: 1.5e-3 for name in found if name.startswith("gdn_layer/")}
    assert {
        name: errors
        for name, errors in found.items()
        if not (errors[0] < 6e-3 and errors[1] < bound[name])
    } == {}


def arguments(source, function):
    (found,) = (
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.FunctionDef) and n.name == function
    )
    return [x.arg for x in found.args.args + found.args.kwonlyargs]


@pytest.mark.parametrize(
    ("function", "file"),
    [(name, file) for name, files in FROM.items() for file in files],
)
def test_a_stand_in_has_the_arguments_of_its_engine(function, file):
    """Some engines' functions have more than the peers use."""
    spec = importlib.util.find_spec(file.split("/")[0])  # does not import it
    found = Path(spec.submodule_search_locations[0]).parent / file if spec else None
    if not found or not found.is_file():
        pytest.skip(f"{file} is not on the path")
    theirs, ours = (
        arguments(found.read_text(encoding="utf-8"), function),
        arguments(STAND_IN, function),
    )
    assert set(ours) <= set(theirs) and ours[:7] == theirs[:7]


@pytest.mark.parametrize("name", [*PEERS, "gdn_prefill/flashqla"])
def test_who_is_missing_is_named_with_its_installation(name):
    algo, gpus = REGISTRY.find(name), (inventory.Gpu("one", "9.0", "580"),)
    ((module, wheel),) = algo.packages.items()
    machine = inventory.Machine(
        gpus=lambda: gpus, has_package=lambda other: other != module
    )
    assert machine.place(algo) == inventory.Place(
        None, f"package {wheel} missing", f"pip install {wheel}"
    )
