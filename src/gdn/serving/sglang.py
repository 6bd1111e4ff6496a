"""SGLang 0.5.22 and 0.5.23 on our kernels: `install()` and `uninstall()`. `python -m
gdn.serving.sglang` checks the version here. As an installed plug-in it starts with GDN_SERVE=1. Its
HookRegistry puts our functions around its own. Slots below 0 are padding. A batch of decodes of
Qwen3.5 is one call of layer_decode in each layer.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from gdn_cli.errors import GdnError

from .. import tensor_checks
from . import (
    BUFFER,
    LAST,
    NORM_EPSILON,
    OUTPUTS,
    chunk_prefill,
    layer_decode,
    packed_decode,
    run_verify,
)
from .client import Client, Hook

__all__ = ["check", "fallbacks", "install", "layer", "prefill", "uninstall", "update"]


def update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """SGLang's fused_sigmoid_gating_delta_rule_update: T = 1 to 8 tokens for each of N sequences.

    q, k, v                     [1, N T, H or HV, 128] bfloat16 with cu_seqlens, else
      [N, T, ...]; tokens may lie apart
    a, b                        [N T, HV] or [1, N T, HV], else [N, T, HV], bfloat16
    initial_state_source        the pool [slots, HV, V, K]
    initial_state_indices       [N] int32 or int64
    cu_seqlens                  [N + 1]: only its length is read, as SGLang gives all
      sequences of a call T tokens
    disable_state_update        the slots stay as they are; otherwise they get the last state
    intermediate_states_buffer  [rows, >= T, HV, V, K] of the pool's dtype: the state
      after each token; it wants
                                disable_state_update
    intermediate_state_indices  [N]: the buffer's row of each sequence

    ValueError for trees of drafts, KDA, rings (ReplaySSM), other gates. Returns the output, like v.
    """
    softplus = softplus_beta, softplus_threshold
    other_gates = is_kda or lower_bound is not None or softplus != (1.0, 20.0)
    if other_gates or match_cutedsl_decode:
        raise ValueError(
            "update: only with scalar gates of softplus beta 1 and threshold 20, without a lower"
            " bound"
        )
    if cache_ring or retrieve_parent_token is not None:
        raise ValueError("update: only for a chain of drafts, without rings")
    states = intermediate_states_buffer
    if states is not None and not disable_state_update:
        raise ValueError("update: intermediate states only with disable_state_update")
    mode = OUTPUTS if disable_state_update else LAST
    if states is not None:
        mode = BUFFER
    tensor_checks.tensor("v", v)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    run_verify(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        initial_state_source,
        initial_state_indices,
        None,
        None,
        scale,
        out,
        states,
        intermediate_state_indices,
        mode,
        0,
        NORM_EPSILON if use_qk_l2norm_in_kernel else -1.0,
    )
    return out


def layer(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """SGLang's layer of Qwen3.5 for a batch of decodes: its projections, and layer_decode between
    them.

    hidden_states  [rows, hidden]
    forward_batch  SGLang's batch, of decodes alone

    ValueError for ReplaySSM's rings, and where rows have no sequence. Returns [rows, hidden].
    """
    backend = _attention_backend()
    attn = self.attn
    cache = backend.req_to_token_pool.mamba2_layer_cache(attn.layer_id)
    slots = backend.forward_metadata.mamba_cache_indices
    if cache.replayssm_d is not None:
        raise ValueError("layer: without ReplaySSM's rings")
    if slots.shape[0] != hidden_states.shape[0]:
        raise ValueError("layer: only with a sequence for each row")
    rows, gates = self._forward_input_proj(hidden_states)
    heads, channels = attn.num_v_heads, attn.q_dim + attn.k_dim + attn.v_dim
    out, state, conv_state = layer_decode(
        rows[:, :channels],
        cache.conv[0],
        attn.conv_weights,
        attn.bias,
        gates[:, heads:],
        gates[:, :heads],
        attn.A_log,
        attn.dt_bias,
        cache.temporal,
        slots,
        rows[:, channels:].unflatten(1, (heads, attn.head_v_dim)),
        self.norm.weight,
        None,
        attn.head_k_dim**-0.5,
        self.norm.eps,
        self.norm.activation,
        first_slot=0,
    )
    backend._track_mamba_state_decode(
        forward_batch, conv_state, state, slots, attn.layer_id
    )
    projected: Tensor = self.out_proj(out.flatten(1))[0]
    return projected


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, None]:
    """SGLang's chunk_gated_delta_rule of packed prompts, on states in its pool.

    q, k                   [1, total, H, 128] bfloat16 or float16
    v                      [1, total, HV, 128] like q
    g, beta                [1, total, HV]: the decay's log in float32; float32 or like q
    initial_state          the pool [slots, HV, V, K], written
    initial_state_indices  [N] int32 or int64
    cu_seqlens             [N + 1]

    GdnError where SGLang wants the states within prompts, for its radix cache; ValueError for
    prompts that leave the pool as it is. Returns the output like v, None and None.
    """
    if initial_state is None or initial_state_indices is None or not inplace_update:
        raise ValueError("prefill: only in place of the states in a pool")
    if cu_seqlens is None or head_first:
        raise ValueError("prefill: only of packed prompts")
    if _wants_states_within():
        reason = "the radix cache wants the states within prompts"
        raise GdnError(f"prefill: {reason}", hint="its strategy no_buffer does not")
    tensor_checks.tensor("v", v)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    chunk_prefill(
        q,
        k,
        v,
        g,
        beta,
        None,
        None,
        initial_state,
        initial_state_indices,
        cu_seqlens,
        scale=scale,
        out=out,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        first_slot=0,
    )
    return out, None, None


def _wants_states_within() -> bool:
    metadata = _attention_backend().forward_metadata
    within = metadata.track_ssm_h_src if metadata.has_mamba_track_mask else None
    return within is not None and within.numel() > 0


def _attention_backend() -> Any:
    """That of linear attention: its pools, and which slots a batch has. GdnError."""
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    backend = context.get_attn_backend()
    linear = getattr(backend, "linear_attn_backend", backend)
    if not hasattr(linear, "forward_metadata"):  # as of two batches that overlap
        raise GdnError(f"{type(linear).__name__} does not say what a batch is")
    return linear


def _around_layer(
    own: Any, self: Any, hidden_states: Tensor, forward_batch: Any
) -> Tensor:
    call = functools.partial(_layer, own)
    if not forward_batch.forward_mode.is_decode():
        call = own
    out: Tensor = call(self, hidden_states, forward_batch)
    return out


def _registry() -> Any:
    return importlib.import_module("sglang.srt.plugins.hook_registry")


def _register(path: str, around: Any) -> None:
    registry = _registry()
    registry.HookRegistry.register(path, around, registry.HookType.AROUND)


def _put_layer() -> None:
    _register(f"{_MODEL}.{_LAYER}", _around_layer)


_MODEL, _LAYER = "sglang.srt.models.qwen3_5", "Qwen3_5GatedDeltaNet.forward"
_OPS = "sglang.kernels.ops.attention"
_DECODE = "fused_recurrent_gated_delta_rule_packed_decode"
_PREFILL = "chunk_gated_delta_rule"
_VERIFY = "fused_sigmoid_gating_recurrent"
_UPDATE = "fused_sigmoid_gating_delta_rule_update"


def _hook(
    module: str, name: str, ours: Any, falls_back: str, *, traced: bool = True
) -> Hook:
    """traced: whether torch.compile may look into it, as into SGLang's own."""

    def put() -> None:
        path = CLIENT.place(f"{_OPS}.{module}:{name}").replace(":", ".")
        around = CLIENT.guarded(name, ours)
        _register(path, around if traced else torch.compiler.disable(around))

    return Hook(name, {f"{_OPS}.{module}:{name}": (ours,)}, put, falls_back)


CLIENT = Client(
    "sglang",
    "sglang",
    ("0.5.22", "0.5.23"),
    [
        _hook(
            "fla.fused_recurrent",
            _DECODE,
            functools.partial(packed_decode, first_slot=0),
            "heads other than K = V = 128",
        ),
        _hook(
            f"linear.{_VERIFY}",
            _UPDATE,
            update,
            "the same; KDA, trees of drafts, ReplaySSM's rings, more than 8 tokens",
        ),
        _hook(
            "fla.chunk",
            _PREFILL,
            prefill,
            "the same; where the radix cache wants the states within prompts (extra_buffer)",
            traced=False,
        ),
        Hook(
            f"layer ({_LAYER})",
            {f"{_MODEL}:{_LAYER}": (layer,)},
            _put_layer,
            "heads other than K = V = 128, more than 8 value heads for one of q, GPUs before 9.0",
        ),
    ],
    moved={"0.5.22": {f"{_OPS}.linear.{_VERIFY}": f"{_OPS}.fla.{_VERIFY}"}},
)
_layer = CLIENT.guarded(_LAYER, layer)


def install() -> list[str]:
    """Client.install, and the registry applies its hooks, as SGLang does after its plug-ins."""
    names = CLIENT.install()
    _registry().HookRegistry.apply_hooks()
    return names


check = CLIENT.check
uninstall = CLIENT.uninstall
fallbacks = CLIENT.fallbacks

if __name__ == "__main__":
    raise SystemExit(CLIENT.main())
