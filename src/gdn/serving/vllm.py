"""vLLM 0.32 and 0.33 on our kernels: `install()`, `uninstall()`; `python -m gdn.serving.vllm`
checks the version here. As an installed plug-in it starts with GDN_SERVE=1.

Decodes, drafts and prompts are a layer's, registered out of tree (PluggableLayer.register_oot): a
batch of decodes is one call of layer_decode, a prompt goes from the convolution to chunk_prefill,
drafts to layer_post_conv, and states stay in vLLM's pool. Prompts in a batch with drafts are a
CustomOp's. For the update that verifies drafts beside others vLLM has no hook: the name in the
layer's module is set.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from gdn_cli.errors import GdnError

from . import _decode as _decode_library
from . import _layer as _layer_library
from . import _layer_decode as _layer_decode_library
from . import (
    chunk_prefill,
    layer_decode,
    layer_post_conv,
    mtp_verify,
    packed_decode,
    prefill_library,
)
from .batched import HEAD, refuse_heads, rows
from .client import Client, Hook, no_way_back

__all__ = ["check", "fallbacks", "install", "uninstall"]

_LAYERS = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_DECODE = "fused_recurrent_gated_delta_rule_packed_decode"
_UPDATE = "fused_sigmoid_gating_delta_rule_update"
_DRAFTS = "fused_gdn_decode_post_conv_mtp"
_taken: set[tuple[Any, ...]] = set()  # pools and rows that chunk_prefill takes


def decode_layer(
    self: Any,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    core_attn_out: Tensor,
    attn_metadata: Any,
) -> None:
    """vLLM's layer in a batch of decodes alone, where whole_layer is not used: the convolution,
    then packed_decode."""
    layers = importlib.import_module(_LAYERS)
    count = attn_metadata.num_actual_tokens
    slots = attn_metadata.non_spec_state_indices_tensor[:count]
    state, *weights = _convolution(self, layers)
    convolved = layers.causal_conv1d_update(
        mixed_qkv[:count],
        state,
        *weights,
        self.activation,
        conv_state_indices=slots,
        validate_data=False,
    )
    _decode_rows(self, layers, convolved, b[:count], a[:count], core_attn_out, slots)


def fused_layer(
    self: Any, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
) -> None:
    """vLLM's layer where the norm and the gate are its own, before it looks at the batch."""
    if _metadata(self) is None:
        _load(self)
    own = importlib.import_module(_LAYERS).QwenGatedDeltaNetAttention
    own._forward_core_fused_norm_packed(self, mixed_qkvz, ba, core_attn_out)


def whole_layer(
    self: Any,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    output_gate: Tensor,
    core_attn_out: Tensor,
) -> None:
    """vLLM's layer in a batch of decodes alone, with the norm and the gate: layer_decode.

    mixed_qkv      [tokens, 2 H K + HV V] bfloat16, before the convolution
    b, a           [tokens, HV] bfloat16, before the gates
    output_gate    [tokens, HV, V] bfloat16
    core_attn_out  [tokens, HV, V] bfloat16, written: with the norm and the gate
    """
    metadata = _metadata(self)
    count = metadata.num_actual_tokens
    state, weight, bias = _convolution(self, importlib.import_module(_LAYERS))
    layer_decode(
        mixed_qkv[:count],
        state,
        weight,
        bias,
        a[:count],
        b[:count],
        self.A_log,
        self.dt_bias,
        self.kv_cache[1],
        metadata.non_spec_state_indices_tensor[:count],
        output_gate[:count],
        self.norm.weight,
        core_attn_out[:count],
        self.head_k_dim**-0.5,
        self.layer_norm_epsilon,
        self.norm.activation,
    )


def drafts_layer(
    self: Any,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    output_gate: Tensor,
    core_attn_out: Tensor,
    attn_metadata: Any,
) -> None:
    """vLLM's layer in a batch of drafts alone, after the convolution: layer_post_conv.

    mixed_qkv      [tokens, 2 H K + HV V] bfloat16
    b, a           [tokens, HV] bfloat16, before the gates
    output_gate    [tokens, HV, V] bfloat16
    core_attn_out  [tokens, HV, V] bfloat16, written: with the norm and the gate
    """
    layers = importlib.import_module(_LAYERS)
    count = attn_metadata.num_spec_decodes
    _drafts(
        _own_drafts(layers),
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=self.A_log,
        dt_bias=self.dt_bias,
        state_indices=attn_metadata.spec_state_indices_tensor[:count],
        cu_seqlens=attn_metadata.spec_query_start_loc[: count + 1],
        num_accepted_tokens=attn_metadata.num_accepted_tokens[:count],
        state=self.kv_cache[1],
        output_gate=output_gate,
        norm_weight=self.norm.weight,
        out=core_attn_out,
        scale=self.head_k_dim**-0.5,
        norm_eps=self.layer_norm_epsilon,
        output_gate_activation=self.norm.activation,
    )


def _own_drafts(layers: Any) -> Any:
    if hasattr(layers, "fused_mtp_decode_impl"):
        return layers.fused_mtp_decode_impl()
    return getattr(importlib.import_module("vllm._custom_ops"), _DRAFTS)  # 0.32


def drafts(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float = HEAD**-0.5,
    norm_eps: float = 1e-5,
    output_gate_activation: str = "silu",
) -> Tensor:
    """layer_post_conv with vLLM's defaults: its fused_gdn_decode_post_conv_mtp."""
    return layer_post_conv(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state_indices,
        cu_seqlens,
        num_accepted_tokens,
        state,
        output_gate,
        norm_weight,
        out,
        scale,
        norm_eps,
        output_gate_activation,
    )[0]


def prompts_layer(
    self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
) -> None:
    """vLLM's layer in a batch with prompts: the convolution of all tokens, packed_decode of the
    decodes, which come first, and chunk_prefill of the prompts. GdnError or ValueError before
    anything is changed if it is not for us.

    mixed_qkv      [tokens, 2 H K + HV V] bfloat16 or float16
    b, a           [tokens, HV] like it, before the gates
    core_attn_out  [tokens, HV, V] like it, written
    """
    layers = importlib.import_module(_LAYERS)
    metadata = _metadata(self)
    _refuse(self, metadata, mixed_qkv)
    count, total = metadata.num_decodes, metadata.num_actual_tokens
    slots = metadata.non_spec_state_indices_tensor
    plan: Any = getattr(metadata, "flashinfer_checkpoint_plan", None)  # 0.32 has none
    kept = _checkpoints(self, plan)
    state, *weights = _convolution(self, layers)
    convolved = layers.causal_conv1d_fn(
        mixed_qkv[:total].T,
        *weights,
        state,
        metadata.non_spec_query_start_loc,
        cache_indices=slots,
        has_initial_state=metadata.has_initial_state,
        activation=self.activation,
        metadata=metadata,
    ).T
    with no_way_back():
        if count:
            decodes = convolved[:count], b[:count], a[:count], core_attn_out
            _decode_rows(self, layers, *decodes, slots[:count])
        q, k, v = _heads(self, convolved[count:])
        chunk_prefill(
            q,
            k,
            v,
            a[count:total],
            b[count:total],
            self.A_log,
            self.dt_bias,
            self.kv_cache[1],
            metadata.prefill_state_indices,
            metadata.prefill_query_start_loc,
            metadata.prefill_has_initial_state,
            out=core_attn_out[count:total],
            **kept,
        )
        if kept:
            self._checkpoint_exporter.export(
                metadata.checkpoint,
                raw_qkv=mixed_qkv[:total],
                conv_state=state,
                recurrent_checkpoint=kept["checkpoints"],
                recurrent_state=self.kv_cache[1],
                cu_seqlens=metadata.non_spec_query_start_loc,
                recurrent_rows=plan.rows,
            )


def _checkpoints(self: Any, plan: Any) -> dict[str, Any]:
    """Of chunk_prefill, for the states within prompts that vLLM's prefix cache keeps. They take the
    pool's dtype, so vLLM's buffer, of float32, is large enough."""
    if plan is None:
        return {}
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    shape, _ = self._checkpoint_buffer_spec
    buffer = shape, self.kv_cache[1].dtype
    (states,) = workspace.current_workspace_manager().get_simultaneous(buffer)
    return {
        "checkpoints_every": plan.every_n_tokens,
        "checkpoints": states[: plan.num_checkpoints],
        "checkpoint_starts": plan.cu_starts,
    }


def _convolution(self: Any, layers: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Its states [slots, channels, width - 1], weight [channels, width] and bias."""
    state = self.kv_cache[0]
    if not layers.is_conv_state_dim_first():
        state = state.transpose(-1, -2)
    return state, self.conv1d.weight.flatten(1), self.conv1d.bias


def _decode_rows(
    self: Any,
    layers: Any,
    convolved: Tensor,
    b: Tensor,
    a: Tensor,
    core_attn_out: Tensor,
    slots: Tensor,
) -> None:
    """A token of each sequence: the first rows of core_attn_out."""
    out = core_attn_out[: slots.shape[0]].unsqueeze(1)
    gates = a, b, self.A_log, self.dt_bias
    scale = self.head_k_dim**-0.5
    pool = self.kv_cache[1]
    _decode(getattr(layers, _DECODE), convolved, *gates, scale, pool, out, slots, True)


def _heads(self: Any, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [tokens, H, K], v [tokens, HV, V], in rows of all three."""
    sizes = [x // self.tp_size for x in (self.key_dim, self.key_dim, self.value_dim)]
    q, k, v = packed.split(sizes, dim=-1)
    heads = -1, HEAD
    return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)


def _metadata(self: Any) -> Any:
    """What vLLM says of the batch; None while it measures its memory."""
    context = importlib.import_module("vllm.forward_context").get_forward_context()
    batch = context.attn_metadata
    return batch.get(self.prefix) if isinstance(batch, dict) else None


def _refuse(self: Any, metadata: Any, mixed_qkv: Tensor) -> None:
    refuse_heads(self)
    if metadata.num_decode_tokens != metadata.num_decodes:
        raise GdnError("decodes of more than one token are beside prompts")
    pool = self.kv_cache[1]
    layout = pool.dtype, pool.shape[1:], pool.stride(), pool.data_ptr() % 32
    kind = *layout, mixed_qkv.dtype, mixed_qkv.shape[1]
    if kind not in _taken:
        _try_prefill(self, mixed_qkv.new_empty(1, mixed_qkv.shape[1]), pool)
        _taken.add(kind)


def _try_prefill(self: Any, packed: Tensor, pool: Tensor) -> None:
    """A call of no sequence: everything is checked, and nothing launched."""
    zero = torch.zeros(1, dtype=torch.int32, device=pool.device)
    gates = packed.new_empty(1, pool.shape[1])
    q, k, v = _heads(self, packed)
    chunk_prefill(
        q,
        k,
        v,
        gates,
        gates,
        self.A_log,
        self.dt_bias,
        pool,
        zero[:0],
        zero,
    )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """ChunkGatedDeltaRule's forward: gates g (log) and beta are given, [1, total, HV].

    initial_state  [N, HV, V, K], gathered for this call by vLLM, so it takes the final states
    """
    if cu_seqlens is None or core_attn_out is not None:
        raise ValueError("prefill: only with cu_seqlens, and without core_attn_out")
    out, state = chunk_prefill(
        q,
        k,
        v,
        g,
        beta,
        None,
        None,
        initial_state,
        rows(initial_state, initial_state.shape[0]),
        cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        first_slot=0,
    )
    return out.unsqueeze(0), state if output_final_state else None


def layer(
    self: Any,
    config: Any,
    vllm_config: Any,
    prefix: str = "",
    gqa_interleaved_layout: bool = False,
    reduce_results: bool = True,
) -> None:
    """vLLM's layer as it is made. Its flag of drafts brings each batch to _forward_core_fused_norm,
    with the gate beside the tokens."""
    own = importlib.import_module(_LAYERS).QwenGatedDeltaNetAttention
    own.__init__(
        self, config, vllm_config, prefix, gqa_interleaved_layout, reduce_results
    )
    if CLIENT.active and self.speculative_config is None:
        self.enable_fused_gdn_spec_decode = _is_for_layer_decode(self, vllm_config)


def _is_for_layer_decode(self: Any, vllm_config: Any) -> bool:
    """Qwen3-Next's projection has the heads' q, k, v and gate interleaved: it is taken apart."""
    heads = self.head_k_dim, self.head_v_dim, self.conv_kernel_size
    dtypes = vllm_config.model_config.dtype, self.get_state_dtype()[0]
    return (
        heads == (HEAD, HEAD, 4)
        and dtypes == (torch.bfloat16, torch.bfloat16)
        and not self.gqa_interleaved_layout
        and self.num_v_heads <= 8 * self.num_k_heads
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (9, 0)
    )


def _put_layer() -> None:
    own = importlib.import_module(_LAYERS).QwenGatedDeltaNetAttention

    def forward_core_fused_norm(self: Any, *batch: Tensor, **named: Tensor) -> None:
        call = own._forward_core_fused_norm
        if _decodes_alone(self, _metadata(self)):
            call = functools.partial(_whole, call)
        call(self, *batch, **named)

    def forward_core(
        self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
    ) -> None:
        metadata = _metadata(self)
        if metadata is None:
            _load(self)
        prompts = metadata is not None and metadata.num_prefills > 0
        call = own._forward_core
        if prompts and metadata.spec_sequence_masks is None:
            call = functools.partial(_prompts, call)
        call(self, mixed_qkv, b, a, core_attn_out)

    methods = {
        "__module__": __name__,
        "__init__": layer,
        "_forward_core_fused_norm": forward_core_fused_norm,
        "_forward_core_decode_non_spec": decode_layer,
        "_forward_core": forward_core,
        "_forward_core_fused_norm_packed": fused_layer,
        "_forward_core_decode_spec_post_conv_fused_norm": drafts_layer,
    }
    ours = type(f"Gdn{own.__name__}", (own,), methods)
    _registry().PluggableLayer.register_oot(name=own.__name__)(ours)


def _decodes_alone(self: Any, metadata: Any) -> bool:
    return (
        metadata is not None
        and self.enable_packed_recurrent_decode
        and metadata.spec_sequence_masks is None
        and metadata.num_prefills == 0
        and metadata.num_decodes > 0
    )


def _load(self: Any) -> None:
    """Load the libraries, or compile them, while vLLM starts and not at the first prompt."""
    if not CLIENT.active:
        return
    kind = self.get_state_dtype()[1], self.A_log.is_cuda
    drafts = self.speculative_config is not None
    tokens = self.get_state_dtype()[0]  # the convolution's state is of their dtype
    libraries = [_decode_library, prefill_library(tokens)]
    if self.enable_fused_gdn_spec_decode:
        libraries += [_layer_decode_library, *([_layer_library] if drafts else [])]
    for library in libraries:
        with contextlib.suppress(GdnError):  # a call will say it
            library[kind]


def _put_prefill() -> None:
    own = importlib.import_module(_LAYERS).ChunkGatedDeltaRule

    def init(self: Any) -> None:
        own.__init__(self)
        self._forward_method = functools.partial(_prefill, self._forward_method)

    ours = type(f"Gdn{own.__name__}", (own,), {"__init__": init})
    _registry().CustomOp.register_oot(name=own.__name__)(ours)


def _put_update() -> None:
    layers = importlib.import_module(_LAYERS)
    own = getattr(layers, _UPDATE)
    ours = functools.wraps(own)(functools.partial(_update, own))
    setattr(layers, _UPDATE, ours)


def _registry() -> Any:
    return importlib.import_module("vllm.model_executor.custom_op")


CLIENT = Client(
    "vllm",
    "vllm",
    ("0.32.", "0.33."),
    [
        Hook(
            "decode, drafts and prompts (QwenGatedDeltaNetAttention)",
            {
                f"{_LAYERS}:QwenGatedDeltaNetAttention._forward_core": (prompts_layer,),
                f"{_LAYERS}:QwenGatedDeltaNetAttention._forward_core_decode_non_spec": (
                    decode_layer,
                ),
                f"{_LAYERS}:{_DECODE}": (packed_decode,),
                f"{_LAYERS}:QwenGatedDeltaNetAttention.__init__": (layer,),
                f"{_LAYERS}:QwenGatedDeltaNetAttention._forward_core_fused_norm": (
                    whole_layer,
                ),
                f"{_LAYERS}:QwenGatedDeltaNetAttention._forward_core_fused_norm_packed": (
                    fused_layer,
                ),
                f"{_LAYERS}:QwenGatedDeltaNetAttention."
                "_forward_core_decode_spec_post_conv_fused_norm": (drafts_layer,),
                f"vllm._custom_ops:{_DRAFTS}": (drafts,),
            },
            _put_layer,
            "heads other than K = V = 128; prompts beside drafts whose states"
            " within are kept by FlashInfer for prefix caching",
        ),
        Hook(
            "prompts beside drafts (ChunkGatedDeltaRule)",
            {f"{_LAYERS}:ChunkGatedDeltaRule.forward_native": (prefill,)},
            _put_prefill,
            "the same",
        ),
        Hook(
            f"drafts beside others ({_UPDATE})",
            {f"{_LAYERS}:{_UPDATE}": (mtp_verify,)},
            _put_update,
            "the same; more than 8 tokens. VLLM_GDN_DECODE_KERNEL=triton brings drafts here",
        ),
    ],
)
_decode = CLIENT.guarded(_DECODE, packed_decode)
_whole = CLIENT.guarded(
    "QwenGatedDeltaNetAttention._forward_core_fused_norm", whole_layer
)
_prompts = CLIENT.guarded("QwenGatedDeltaNetAttention._forward_core", prompts_layer)
_prefill = CLIENT.guarded("chunk_gated_delta_rule", prefill)
_update = CLIENT.guarded(_UPDATE, mtp_verify)
_drafts = CLIENT.guarded(_DRAFTS, drafts)
check = CLIENT.check
install = CLIENT.install
uninstall = CLIENT.uninstall
fallbacks = CLIENT.fallbacks

if __name__ == "__main__":
    raise SystemExit(CLIENT.main())
