"""vLLM 0.33 on our kernels: `install()`, `uninstall()`; `python -m gdn.serving.vllm` checks the
version here. As an installed plug-in it starts with GDN_SERVE=1.

Decode is a layer registered out of tree (PluggableLayer.register_oot), prefill a CustomOp. For
the update that verifies drafts, and decodes in a batch with prompts, vLLM has no hook: the name
in the layer's module is set.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from . import chunk_prefill, mtp_verify, packed_decode
from .batched import rows
from .client import Client, Hook

__all__ = ["check", "fallbacks", "install", "uninstall"]

_LAYERS = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_DECODE = "fused_recurrent_gated_delta_rule_packed_decode"
_UPDATE = "fused_sigmoid_gating_delta_rule_update"


def decode_layer(
    self: Any,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    core_attn_out: Tensor,
    attn_metadata: Any,
) -> None:
    """vLLM's layer in a batch of decodes alone: the convolution, then packed_decode."""
    layers = importlib.import_module(_LAYERS)
    count = attn_metadata.num_actual_tokens
    slots = attn_metadata.non_spec_state_indices_tensor[:count]
    conv_state, pool = self.kv_cache
    if not layers.is_conv_state_dim_first():
        conv_state = conv_state.transpose(-1, -2)
    conv_weight = self.conv1d.weight.flatten(1)
    convolved = layers.causal_conv1d_update(
        mixed_qkv[:count],
        conv_state,
        conv_weight,
        self.conv1d.bias,
        self.activation,
        conv_state_indices=slots,
        validate_data=False,
    )
    out = core_attn_out[:count].unsqueeze(1)
    gates = a[:count], b[:count], self.A_log, self.dt_bias
    scale = self.head_k_dim**-0.5
    _decode(getattr(layers, _DECODE), convolved, *gates, scale, pool, out, slots, True)


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


def _put_layer() -> None:
    own = importlib.import_module(_LAYERS).QwenGatedDeltaNetAttention
    methods = {"_forward_core_decode_non_spec": decode_layer}
    _registry().PluggableLayer.register_oot(name=own.__name__)(
        type(f"Gdn{own.__name__}", (own,), methods)
    )


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
    ("0.33.",),
    [
        Hook(
            "decode (QwenGatedDeltaNetAttention)",
            {
                f"{_LAYERS}:QwenGatedDeltaNetAttention._forward_core_decode_non_spec": (
                    decode_layer,
                ),
                f"{_LAYERS}:{_DECODE}": (packed_decode,),
            },
            _put_layer,
            "heads other than K = V = 128, tokens that are not bfloat16",
        ),
        Hook(
            "prefill (ChunkGatedDeltaRule)",
            {f"{_LAYERS}:ChunkGatedDeltaRule.forward_native": (prefill,)},
            _put_prefill,
            "the same; FlashInfer's checkpoints of prefix caching are not asked",
        ),
        Hook(
            f"drafts and decodes beside prompts ({_UPDATE})",
            {f"{_LAYERS}:{_UPDATE}": (mtp_verify,)},
            _put_update,
            "the same; more than 8 tokens. VLLM_GDN_DECODE_KERNEL=triton brings drafts here",
        ),
    ],
)
_decode = CLIENT.guarded(_DECODE, packed_decode)
_prefill = CLIENT.guarded("chunk_gated_delta_rule", prefill)
_update = CLIENT.guarded(_UPDATE, mtp_verify)
check = CLIENT.check
install = CLIENT.install
uninstall = CLIENT.uninstall
fallbacks = CLIENT.fallbacks

if __name__ == "__main__":
    raise SystemExit(CLIENT.main())
