"""GDN for serving engines: their own calls, on our kernels. States lie in a pool, are
addressed by slots and updated in place.

    from gdn import serving
    serving.prepare(serving.packed_decode, dtype=torch.bfloat16)  # builds or loads the library
    serving.packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, pool, out, slots,
      use_qk_l2norm_in_kernel=True)

`gdn.serving.vllm`, `.sglang`, `.transformers` and `.fla` put these into an installed client.

All functions run on the current stream of the tensors' device, wait for nothing and
allocate nothing but an output that is not given and, from torch, chunk_prefill's scratch. So a
CUDA graph can capture them once their library is loaded. They may be called from any thread. There
is no backward. The step is that of Gated Delta Networks (arXiv 2412.06464):

    S <- g S;  S <- S + beta (v - S k) k^T;  o = scale S q
    g = exp(-exp(A_log) softplus(a + dt_bias)),  beta = sigmoid(b),  both in float32

Gates that the caller has are taken as well: with None for A_log and dt_bias, a is log g, in
float32, and b is beta, in float32 or the tokens' dtype, of the same shapes. `gates` computes them.

Tokens are bfloat16 or float16: q, k, v, the output, and what has their dtype of a, b and dt_bias.

There is a state S [V, K] for each value head and K = V = 128; HV is any multiple of H.
Slots are below the size of the pool, and those of one call are distinct unless they are
padding: both are up to the caller, as checking them would mean to wait for the GPU. A
slot below `first_slot` is padding: its output is 0, and no state is read or written.

Each function is an operator of torch, torch.ops.gdn.<name>, that declares what it writes to:
torch.compile, torch.export and FakeTensorMode take it.

Errors come before anything is launched: ValueError or TypeError if the arguments do not fit, have
the negative bit, share memory with an output or have lost it, or want a gradient
(NoBackwardError, which is a RuntimeError too). A library says pool, state_indices and output for
initial_state, ssm_state_indices and out. MissingError if this machine or this version has no such
library, GdnError if it does not build, or is not loaded when a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_cli.errors import UsageError

from .. import tensor_checks
from .client import FALLBACKS
from .library import Exported
from .operator import (
    BF16,
    F32,
    POOLS,
    TOKENS,
    WHOLE,
    Fixed,
    Number,
    Operator,
    TensorArgument,
)

__all__ = [
    "chunk_prefill",
    "fallbacks",
    "gates",
    "layer_decode",
    "layer_post_conv",
    "mtp_verify",
    "packed_decode",
    "prepare",
]

# of the norm of q and k, below 0 there is none. It is under the root, as in vLLM, SGLang and
# FlashInfer: x / sqrt(sum(x^2) + 1e-6)
NORM_EPSILON = 1e-6
# mode of mtp_verify in the library: which states are written, and where
OUTPUTS, LAST, SLOTS, BUFFER = range(4)
MOST_TOKENS = 8  # of a sequence in mtp_verify

_decode = Exported(
    "packed_decode",
    "gdn_decode_packed/cuda-v5-packed",
    "gdn_decode_packed/cpp-v1",
    halves="gdn_decode_packed_bf16/cuda-v5-packed-bf16",
)
_verify = Exported("mtp_verify", "gdn_mtp_packed/cuda-v1", "gdn_mtp_packed/cpp-v1")
_layer = Exported(
    "layer_post_conv", "gdn_layer_post_conv/cuda-v1", "gdn_layer_post_conv/cpp-v1"
)
_layer_decode = Exported(
    "layer_decode",
    "gdn_layer/cuda-v1",
    "gdn_layer/cpp-v1",
    halves="gdn_layer_bf16/cuda-v1",
)
_gates = Exported("gates", _decode.cuda, _decode.cpu)

# written in place; what a state is computed with, in the order of all libraries
_GATES = {
    "A_log": TensorArgument((1,), F32, optional=True),
    "dt_bias": TensorArgument((1,), F32 + TOKENS, optional=True),
    "initial_state": TensorArgument((4,), written=True),
}
_NUMBERS = {"first_slot": Number("int"), "epsilon": Number("float")}
# of several tokens of a sequence
_COUNTS = dict.fromkeys(
    ("num_accepted_tokens", "cu_seqlens"), TensorArgument((1,), WHOLE, optional=True)
)
# of a layer's norm with its gate
_NORM = {
    "output_gate": TensorArgument((3,), BF16),
    "norm_weight": TensorArgument((1,), F32 + BF16),
}
_NORM_NUMBERS = {"norm_eps": Number("float"), "sigmoid": Number("int"), **_NUMBERS}
_run_decode = Operator(
    _decode,
    {
        "mixed_qkv": TensorArgument((2,), TOKENS),
        **dict.fromkeys("ab", TensorArgument((2,), TOKENS + F32)),
        **_GATES,
        "ssm_state_indices": TensorArgument((1,), WHOLE),
        "scale": Number("float?"),
        "out": TensorArgument((4,), TOKENS, written=True),
        "new_pool": Fixed("initial_state"),
        "new_indices": Fixed(),
        "has_initial_state": Fixed(),
        **_NUMBERS,
    },
)
run_verify = Operator(
    _verify,
    {
        **dict.fromkeys("qkv", TensorArgument((3, 4), TOKENS)),
        **dict.fromkeys("ab", TensorArgument((2, 3), TOKENS + F32)),
        **_GATES,
        "ssm_state_indices": TensorArgument((1, 2), WHOLE),
        **_COUNTS,
        "scale": Number("float?"),
        "out": TensorArgument((3, 4), TOKENS, written=True),
        # of mode BUFFER: [N, >= T, HV, V, K] of the pool's dtype takes the state after each
        # token, in row states_rows[n] or n
        "states": TensorArgument((5,), POOLS, written=True, optional=True),
        "states_rows": TensorArgument((1,), WHOLE, optional=True),
        "state_mode": Number("int"),  # torch has a name of its own for "mode"
        **_NUMBERS,
    },
)
_OF_LAYER = {
    "mixed_qkv": TensorArgument((2,), BF16),
    **dict.fromkeys("ab", TensorArgument((2,), BF16)),
    "A_log": TensorArgument((1,), F32),
    "dt_bias": TensorArgument((1,), F32 + BF16),
    "initial_state": _GATES["initial_state"],
}
_run_layer = Operator(
    _layer,
    {
        **_OF_LAYER,
        "ssm_state_indices": TensorArgument((2,), WHOLE),
        **_COUNTS,
        **_NORM,
        "scale": Number("float?"),
        "out": TensorArgument((3,), BF16, written=True),
        **_NORM_NUMBERS,
    },
)
_run_layer_decode = Operator(
    _layer_decode,
    {
        **_OF_LAYER,
        "ssm_state_indices": TensorArgument((1,), WHOLE),
        "scale": Number("float?"),
        "conv_weight": TensorArgument((2,), BF16),
        "conv_bias": TensorArgument((1,), BF16, optional=True),
        "conv_state": TensorArgument((3,), BF16, written=True),
        **_NORM,
        "out": TensorArgument((3,), (*BF16, torch.uint8), written=True),
        "out_scale": TensorArgument((2,), F32, written=True, optional=True),
        **_NORM_NUMBERS,
    },
)
_run_gates = Operator(
    _gates,
    {
        **dict.fromkeys("ab", TensorArgument((2,), TOKENS + F32)),
        "A_log": TensorArgument((1,), F32),
        "dt_bias": TensorArgument((1,), F32 + TOKENS),
        **dict.fromkeys(("log_g", "beta"), TensorArgument((2,), F32, written=True)),
    },
    pool="log_g",
)


class _Prefill(NamedTuple):
    """chunk_prefill for tokens of one dtype, and with checkpoints: functions of a library, and
    their operators."""

    function: Exported
    checkpoints: Exported
    run: Operator
    run_checkpoints: Operator


def _prefill_of(
    tokens: torch.dtype, rung: str, suffix: str = "", *, rare: bool = False
) -> _Prefill:
    names = "chunk_prefill", "chunk_prefill_checkpoints"
    cpu = "gdn_prefill_packed/cpp-v1"
    function, checkpoints = (Exported(name, rung, cpu, rare=rare) for name in names)
    arguments: dict[str, TensorArgument | Number | Fixed] = {
        **dict.fromkeys("qkv", TensorArgument((3,), (tokens,))),
        **dict.fromkeys("ab", TensorArgument((2,), (tokens, *F32))),
        **_GATES,
        "ssm_state_indices": TensorArgument((1,), WHOLE),
        "has_initial_state": TensorArgument((1,), (torch.bool,), optional=True),
        "cu_seqlens": TensorArgument((1,), WHOLE),
        "scale": Number("float?"),
        "out": TensorArgument((3,), (tokens,), written=True),
        **_NUMBERS,
    }
    run = Operator(function, arguments, name=names[0] + suffix)
    arguments |= {
        "checkpoints": TensorArgument((4,), POOLS, written=True),
        "checkpoint_starts": TensorArgument((1,), WHOLE),
        "checkpoints_every": Number("int"),
    }
    run_checkpoints = Operator(checkpoints, arguments, name=names[1] + suffix)
    return _Prefill(function, checkpoints, run, run_checkpoints)


_prefill_bf16 = _prefill_of(torch.bfloat16, "gdn_prefill_packed/cuda-chunk-packed")
_prefill_f16 = _prefill_of(
    torch.float16, "gdn_prefill_packed_f16/cuda-chunk-packed-f16", "_f16", rare=True
)


def prefill_library(tokens: torch.dtype) -> Exported:
    """chunk_prefill in the library for tokens of this dtype."""
    return _prefill_for(tokens).function


def _prefill_for(tokens: torch.dtype) -> _Prefill:
    return _prefill_f16 if tokens == torch.float16 else _prefill_bf16


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float,
    initial_state: Tensor,
    out: Tensor | None,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    first_slot: int = 1,
    state_layout: str = "VK",
) -> tuple[Tensor, Tensor]:
    """One token for each of B rows: vLLM 0.33's and SGLang 0.5.23's
    fused_recurrent_gated_delta_rule_packed_decode.

    mixed_qkv          [B, 2 H K + HV V] bfloat16 or float16: q of all heads, k, then v; rows may
      lie apart
    a, b               [B, HV] like mixed_qkv; rows may lie apart
    A_log, dt_bias     [HV] float32; dt_bias also like mixed_qkv. None: a is log g, and b is beta
    scale              of the outputs, 1/sqrt(K) if None or 0
    initial_state      the pool [slots, HV, V, K] float32, bfloat16 or float16; slots
      may lie apart. In place
    out                [B, 1, HV, V] like mixed_qkv, dense; None: a new tensor
    ssm_state_indices  [B] int32 or int64: the slot of each row; may be a column of a table
    use_qk_l2norm_in_kernel
                       divide q and k by their length first, sqrt(sum(x^2) + 1e-6)
    first_slot         slots below it are padding: 1 as in vLLM, 0 as in SGLang
    state_layout       "KV": the states are [K, V], as those of flash-linear-attention and of
                       transformers

    Returns (out, initial_state).
    """
    if out is None:
        try:  # to ask before takes half a microsecond
            out = mixed_qkv.new_empty(mixed_qkv.shape[0], 1, *initial_state.shape[1:3])
        except (AttributeError, IndexError):
            tensor_checks.tensor("mixed_qkv", mixed_qkv, 2)
            tensor_checks.tensor("initial_state", initial_state, 4)
            raise
    pool = _v_first("initial_state", initial_state, state_layout)
    _run_decode(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        ssm_state_indices,
        scale,
        out,
        pool,
        None,
        None,
        first_slot,
        NORM_EPSILON if use_qk_l2norm_in_kernel else -1.0,
    )
    return out, initial_state


def mtp_verify(
    A_log: Tensor | None,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    *,
    out: Tensor | None = None,
    first_slot: int = 1,
    state_layout: str = "VK",
) -> tuple[Tensor, Tensor]:
    """Up to 8 tokens for each of N sequences, as many states: vLLM 0.33's
    fused_sigmoid_gating_delta_rule_update.

    q, k                 [1, total, H, K] bfloat16 or float16 with cu_seqlens, else [N, T, H, K];
      tokens may lie apart
    v                    [1, total, HV, V] or [N, T, HV, V] like q; tokens may lie apart
    a, b                 [total, HV] or [1, total, HV], else [N, T, HV], like q
    A_log, dt_bias, scale, initial_state, state_layout
                         as in packed_decode
    cu_seqlens           [N + 1] int32: where each sequence's tokens begin; 0 to T of them
    ssm_state_indices    [N, T] int32 or int64: the state after token t goes to slot [n,
      t]; [N] for one token each.
                         Rows may lie apart. With cu_seqlens there may be more rows, which are not
                         read, as vLLM has them where prompts follow; of num_accepted_tokens as well
    num_accepted_tokens  [N] int32: the sequence starts from slot [n,
      num_accepted_tokens[n] - 1], a count outside 1..T
                         makes it padding; None: from slot [n, 0]
    out                  like v, dense; None: a new tensor

    Only with beta 1, threshold 20 (the softplus is exact far beyond it), states in
    place and without is_kda, else ValueError. Returns (out, initial_state).
    """
    if beta != 1.0 or threshold != 20.0 or not inplace_final_state or is_kda:
        raise ValueError(
            "mtp_verify: only with beta 1, threshold 20, states in place, and scalar gates"
        )
    if initial_state is None or ssm_state_indices is None:
        raise ValueError(
            "mtp_verify: expected a pool (initial_state) and its slots (ssm_state_indices)"
        )
    tensor_checks.tensor("ssm_state_indices", ssm_state_indices, 1, 2)
    tensor_checks.tensor("q", q, 4)
    if cu_seqlens is not None:
        count = tensor_checks.tensor("cu_seqlens", cu_seqlens, 1).shape[0] - 1
        ssm_state_indices = _first(ssm_state_indices, count)
        if num_accepted_tokens is not None:
            num_accepted_tokens = _first(num_accepted_tokens, count)
    if ssm_state_indices.dim() == 1:
        tokens = q.shape[1]
        if cu_seqlens is not None:
            tokens += 2 - cu_seqlens.shape[0]
        if tokens != 1 or num_accepted_tokens is not None:
            raise ValueError(
                "ssm_state_indices: expected [N, T], or [N] for sequences of one token"
            )
        ssm_state_indices = ssm_state_indices.unsqueeze(1)
    columns = ssm_state_indices.shape[1]
    if columns > MOST_TOKENS:
        expected = f"expected at most {MOST_TOKENS} tokens, got {columns}"
        raise ValueError(f"ssm_state_indices: {expected}")
    if out is None:
        tensor_checks.tensor("v", v)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    pool = _v_first("initial_state", initial_state, state_layout)
    run_verify(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        ssm_state_indices,
        num_accepted_tokens,
        cu_seqlens,
        scale,
        out,
        None,
        None,
        SLOTS,
        first_slot,
        NORM_EPSILON if use_qk_l2norm_in_kernel else -1.0,
    )
    return out, initial_state


def layer_post_conv(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = NORM_EPSILON,
    output_gate_activation: str = "silu",
    *,
    first_slot: int = 1,
) -> tuple[Tensor, Tensor]:
    """What a decode layer does after its convolution, for up to 8 tokens of each of N sequences:
    vLLM 0.33's fused_gdn_decode_post_conv_mtp. mtp_verify with the norm of q and k, then RMSNorm
    (arXiv 1910.07467) of each head's output o, rounded to bfloat16, with a gate:

        o / sqrt(mean(o^2) + norm_eps) * norm_weight * silu(output_gate)

    mixed_qkv            [total, 2 H K + HV V] bfloat16: q of all heads, k, then v; tokens may lie
      apart, as those of a, b and output_gate
    a, b                 [total, HV] bfloat16
    A_log, dt_bias       [HV] float32; dt_bias also bfloat16
    state_indices        [N, T] int32 or int64: the state after token t goes to slot [n, t]
    cu_seqlens           [N + 1] int32: where each sequence's tokens begin; None: total / N each
    num_accepted_tokens  [N] int32 or int64, as in mtp_verify
    state                the pool [slots, HV, V, K] float32 or bfloat16, as in packed_decode
    output_gate          [total, HV, V] bfloat16
    norm_weight          [V] float32 or bfloat16
    out                  [total, HV, V] bfloat16, dense; None: a new tensor
    output_gate_activation
                         "silu" or "swish", which is the same, or "sigmoid" for
                         sigmoid(output_gate)

    Returns (out, state). ValueError for another activation.
    """
    sigmoid = _is_sigmoid(output_gate_activation)
    out = _gated_output(output_gate) if out is None else out
    _run_layer(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        state_indices,
        num_accepted_tokens,
        cu_seqlens,
        output_gate,
        norm_weight,
        scale,
        out,
        norm_eps,
        sigmoid,
        first_slot,
        NORM_EPSILON,
    )
    return out, state


def layer_decode(
    mixed_qkv: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = NORM_EPSILON,
    output_gate_activation: str = "silu",
    *,
    out_scale: Tensor | None = None,
    first_slot: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of a decode layer for each of B rows, in one launch: what engines do by
    causal_conv1d_update with SiLU (arXiv 2312.00752), packed_decode with the norm of q and k, and
    RMSNorm (arXiv 1910.07467) of each head's output o, rounded to bfloat16, with a gate:

        o / sqrt(mean(o^2) + norm_eps) * norm_weight * silu(output_gate)

    mixed_qkv            [B, C] bfloat16, C = 2 H K + HV V, before the convolution; rows may lie
      apart, as those of a, b and output_gate. Not changed
    conv_state           the pool of the last three tokens of each channel [slots, C, 3] bfloat16,
      as many slots as state. A slot is dense, or [3, C] transposed, as vLLM keeps it; slots may
      lie apart. In place
    conv_weight          [C, 4] bfloat16, the token's own tap last
    conv_bias            [C] bfloat16, or None
    a, b                 [B, HV] bfloat16
    A_log, dt_bias       [HV] float32; dt_bias also bfloat16
    state                the pool [slots, HV, V, K] float32 or bfloat16, as in packed_decode
    state_indices        [B] int32 or int64: the slot of each row, in both pools
    output_gate          [B, HV, V] bfloat16
    norm_weight          [V] float32 or bfloat16
    out                  [B, HV, V] bfloat16, dense; None: a new tensor
    output_gate_activation
                         "silu" or "swish", which is the same, or "sigmoid" for
                         sigmoid(output_gate)
    out_scale            [B, HV] float32 of any strides, written: out is float8_e4m3fn, and the
      output is out * out_scale, which is its largest absolute value in a head / 448, at least
      1e-10 / 448. For the product that follows, in blocks of 128

    On a GPU compute capability 9.0 or more, and HV at most 8 H; q, k and v stay in float32 after
    the convolution there, and are rounded to bfloat16 on a CPU, as in engines.

    Returns (out, state, conv_state). ValueError for another activation.
    """
    sigmoid = _is_sigmoid(output_gate_activation)
    out = _gated_output(output_gate, out_scale is not None) if out is None else out
    _run_layer_decode(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        state_indices,
        scale,
        conv_weight,
        conv_bias,
        conv_state,
        output_gate,
        norm_weight,
        out if out_scale is None else _as_bytes(out),
        out_scale,
        norm_eps,
        sigmoid,
        first_slot,
        NORM_EPSILON,
    )
    return out, state, conv_state


def _gated_output(output_gate: Tensor, eight_bits: bool = False) -> Tensor:
    dense = torch.contiguous_format
    tensor_checks.tensor("output_gate", output_gate, 3)
    dtype = torch.float8_e4m3fn if eight_bits else output_gate.dtype
    return torch.empty_like(output_gate, dtype=dtype, memory_format=dense)


def _as_bytes(out: Tensor) -> Tensor:
    """Of float8_e4m3fn, which not every version of DLPack has."""
    if tensor_checks.tensor("out", out).dtype != torch.float8_e4m3fn:
        expected = "expected float8_e4m3fn, as out_scale is given"
        raise TypeError(f"out: {expected}, got {out.dtype}")
    return out.view(torch.uint8)


def _is_sigmoid(activation: str) -> int:
    if activation not in ("silu", "swish", "sigmoid"):  # engines have both names
        expected = f"expected 'silu' or 'sigmoid', got {activation!r:.80}"
        raise ValueError(f"output_gate_activation: {expected}")
    return int(activation == "sigmoid")


def _first(x: Tensor, count: int) -> Tensor:
    """The first `count` rows. A slice takes a microsecond: only if there are more."""
    return x if x.dim() == 0 or x.shape[0] <= count else x[:count]


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    *,
    first_slot: int = 1,
    state_layout: str = "VK",
    checkpoints_every: int | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prompts of N sequences, from the pool and back to it: in one call what engines do
    around chunk_gated_delta_rule (gates, norm, gathering states, zeroing those of new
    sequences, scattering the final ones).

    q, k               [total, H, K] or [1, total, H, K] bfloat16 or float16; tokens may lie apart
    v                  [total, HV, V] or [1, total, HV, V] like q; tokens may lie apart. In float16
      it and the states must stay below 65504
    a, b               [total, HV] or [1, total, HV] like q, before the gates
    A_log, dt_bias, scale, initial_state, use_qk_l2norm_in_kernel, state_layout
                       as in packed_decode
    ssm_state_indices  [N] int32 or int64: the slot of each sequence
    cu_seqlens         [N + 1] int32 or int64: where each sequence's tokens begin
    has_initial_state  [N] bool: False starts from zeros; None: all have one
    out                [total, HV, V] or [1, total, HV, V] like q, dense; None: a new
      one, of 3 axes
    checkpoints_every  tokens, a multiple of 64: keep the state after each so many tokens of a
      sequence, for prefix caches. FlashInfer's checkpoint_every_n_tokens
    checkpoints        takes them, [any, HV, V, K] like initial_state, dense: the one after
      (i + 1) checkpoints_every tokens of sequence n in row checkpoint_starts[n] + i. A row beyond
      its end is left out. Padding has none
    checkpoint_starts  [N] or [N + 1] int32 or int64; side by side (FlashInfer's
      checkpoint_cu_starts) they are 0 and (cu_seqlens.diff() // checkpoints_every).cumsum(0)

    Returns (out, initial_state).
    """
    q, k, v = _flat("q", q, 3), _flat("k", k, 3), _flat("v", v, 3)
    a, b = _flat("a", a, 2), _flat("b", b, 2)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    kept = checkpoints, checkpoint_starts, checkpoints_every
    keeps = any(x is not None for x in kept)
    if keeps:
        _check_checkpoints(*kept)
        kept = _v_first("checkpoints", checkpoints, state_layout), *kept[1:]
    pool = _v_first("initial_state", initial_state, state_layout)
    arguments = (
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        ssm_state_indices,
        has_initial_state,
        cu_seqlens,
        scale,
        _flat("out", out, 3),
        first_slot,
        NORM_EPSILON if use_qk_l2norm_in_kernel else -1.0,
    )
    prefill = _prefill_for(q.dtype)
    if keeps:
        prefill.run_checkpoints(*arguments, *kept)
    else:
        prefill.run(*arguments)
    return out, initial_state


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """What the other functions take with None for A_log and dt_bias, in one launch.

    a, b            [..., HV] bfloat16, float16 or float32, both the same; rows may lie apart, as
      those of one projection's halves do
    A_log, dt_bias  [HV] float32; dt_bias also like a

    Returns (log g, beta), float32, dense, of the shape of a:
    log g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
    """
    for name, x in (("a", a), ("b", b)):
        if tensor_checks.tensor(name, x).dim() < 1:
            raise ValueError(f"{name}: expected [..., HV], got a scalar")
    log_g = a.new_empty(a.shape, dtype=torch.float32)
    beta = torch.empty_like(log_g)
    _run_gates(_rows(a), _rows(b), A_log, dt_bias, _rows(log_g), _rows(beta))
    return log_g, beta


def _rows(x: Tensor) -> Tensor:
    """[..., HV] as [rows, HV], without a copy if rows lie equally far apart."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _v_first(name: str, states: Any, layout: str) -> Tensor:
    """States [..., K, V] as the libraries take them: a view, whose strides say it."""
    if layout == "VK":
        return states  # type: ignore[no-any-return]
    if layout != "KV":
        raise ValueError(f"state_layout: expected 'VK' or 'KV', got {layout!r:.40}")
    return tensor_checks.tensor(name, states, 4).mT


def _check_checkpoints(places: Any, starts: Any, interval: Any) -> None:
    """Three arguments of chunk_prefill, of which one is given."""
    if places is None or starts is None or interval is None:
        names = "checkpoints_every, checkpoints and checkpoint_starts"
        raise ValueError(f"{names}: expected all three, or none")
    tensor_checks.tensor("checkpoints", places, 4)
    number = tensor_checks.number("checkpoints_every", interval, int)
    if not number or number < 64 or number % 64:
        raise ValueError(
            f"checkpoints_every: expected a multiple of 64, got {interval}"
        )


def _flat(name: str, x: Tensor, axes: int) -> Tensor:
    """[1, total, ...], as engines have the tokens of all sequences, as [total, ...]."""
    if tensor_checks.tensor(name, x, axes, axes + 1).dim() == axes:
        return x
    if x.shape[0] != 1:
        raise ValueError(f"{name}: expected [1, total, ...], got {list(x.shape)}")
    return x[0]


def fallbacks() -> dict[str, dict[str, int]]:
    """A counter for metrics: client, its function -> how often this process called the client's
    own function instead of ours. Only of clients whose module is imported."""
    return {client: dict(counts) for client, counts in FALLBACKS.items()}


def prepare(
    *functions: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    device: str = "cuda",
    tokens: torch.dtype = torch.bfloat16,
) -> None:
    """Build or load the libraries of these functions of this module (default: packed_decode,
    mtp_verify, chunk_prefill and gates) for pools of this dtype, and tokens of that one, on "cuda"
    or "cpu": minutes the first time on a machine. Raises UsageError, MissingError or GdnError."""
    prefill = _prefill_for(tokens)
    known: dict[Callable[..., Any], tuple[Exported, ...]] = {
        packed_decode: (_decode,),
        mtp_verify: (_verify,),
        chunk_prefill: (prefill.function, prefill.checkpoints),
        gates: (_gates,),
        layer_post_conv: (_layer,),
        layer_decode: (_layer_decode,),
    }
    for function in functions:
        if function not in list(known):
            *first, last = (function.__name__ for function in known)
            names = f"{', '.join(first)} or {last}"
            raise UsageError(f"prepare: expected {names}, got {function!r:.80}")
    kind = str(device).partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise UsageError(f"prepare: device: expected 'cuda' or 'cpu', got {device}")
    for function in functions or (packed_decode, mtp_verify, chunk_prefill, gates):
        for exported in known[function]:
            exported.failed.clear()
            pool_dtype = torch.float32 if exported is _gates else dtype
            exported[pool_dtype, kind == "cuda"]
