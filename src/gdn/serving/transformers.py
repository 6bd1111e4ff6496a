"""transformers 5.21 to 5.24 on our kernels, by the hooks of the package `kernels`:

    from gdn.serving import transformers as on_gdn
    on_gdn.kernelize(model)

Qwen3.5's whole layer is replaced, which computes the gates in the kernel and updates the state in
the model's own cache. Of other models (Qwen3-Next) the two functions are, for all models of that
kind in the process. `python -m gdn.serving.transformers` checks the versions here.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gdn_cli.errors import GdnError, MissingError, one_line

from . import _decode, prefill_library
from .batched import HEAD, decode, prefill, refuse_heads, step, v_first
from .client import Client, Hook, no_way_back
from .operator import TOKENS

__all__ = ["check", "fallbacks", "kernelize", "mapping"]


def layer(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The forward of Qwen3_5GatedDeltaNet. GdnError before anything is changed if it is not for us.

    The cache has the state as [B, HV, K, V], as transformers has it, in memory [B, HV, V, K] if
    this layer made it: either layer may go on where the other one was.
    """
    cache = kwargs.pop("cache", None) if cache_params is None else cache_params
    _refuse(self, hidden_states, cache, kwargs)
    modeling: Any = sys.modules[type(self).__module__]
    masked = modeling.apply_mask_to_padding_states(hidden_states, attention_mask)
    B, T, _ = masked.shape
    cached: Tensor | None = None
    if cache is not None:
        cached = cache.get_recurrent_state(self.layer_idx, state_idx=0)
    a, b = self.in_proj_a(masked), self.in_proj_b(masked)
    z = self.in_proj_z(masked).reshape(-1, HEAD)
    qkv = self.in_proj_qkv(masked).transpose(1, 2)
    gates = self.A_log.float(), self.dt_bias
    with no_way_back():
        single = cached is not None and T == 1
        mixed = _convolved(self, modeling, qkv, cache, single)
        state = None if cached is None else cached.mT
        in_place = state is not None and _as_ours(state)
        if cached is not None and not in_place:
            state = v_first(cached)
        if state is not None and T == 1:
            out = decode(mixed.reshape(B, -1), a[:, 0], b[:, 0], *gates, state)
        else:
            sizes = [self.key_dim, self.key_dim, self.value_dim]
            tokens = mixed.transpose(1, 2).contiguous().split(sizes, dim=-1)
            q, k, v = (x.unflatten(-1, (-1, HEAD)) for x in tokens)
            out, state = prefill(q, k, v, a, b, *gates, state=state)
        if cache is not None and not in_place:
            cache.update_recurrent_state(state.mT, self.layer_idx)
    normed = self.norm(out.reshape(-1, HEAD), z).reshape(B, T, -1)
    output: Tensor = self.out_proj(normed)
    return output


def layer_5_24(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The same, with the argument's newer name."""
    return layer(self, hidden_states, cache, attention_mask, **kwargs)


def _as_ours(state: Tensor) -> bool:
    """Whether the kernels take it as it is: [V, K] in memory, or the view of [K, V]."""
    dense = state.is_contiguous() or state.mT.is_contiguous()
    return dense and state.dtype == torch.float32


def _refuse(
    self: Any, hidden_states: Tensor, cache: Any, kwargs: dict[str, Any]
) -> None:
    refuse_heads(self)
    if hidden_states.dtype not in TOKENS:
        expected = "expected bfloat16 or float16"
        raise GdnError(f"hidden_states: {expected}, got {hidden_states.dtype}")
    if kwargs.get("cu_seq_lens_q") is not None:
        raise GdnError("cu_seq_lens_q: packed sequences are not for this layer")
    if cache is not None and cache.is_recording_past(self.layer_idx):
        raise GdnError("cache: records its past, as assisted generation has it")
    if hasattr(self.conv1d, "_hf_hook"):
        raise GdnError("conv1d: its weights are moved by accelerate")
    if torch.is_grad_enabled():
        if any(x.requires_grad for x in (hidden_states, *self.parameters())):
            hint = "call the model under torch.no_grad()"
            raise GdnError("a gradient is wanted, and there is no backward", hint=hint)
    for library in (_decode, prefill_library(hidden_states.dtype)):
        library[torch.float32, hidden_states.is_cuda]


def _convolved(
    self: Any, modeling: Any, qkv: Tensor, cache: Any, single: bool
) -> Tensor:
    """q, k, v [B, channels, T] after the convolution, whose state in the cache goes on."""
    weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
    if single:
        state = cache.get_conv_state(self.layer_idx, state_idx=0)
        args = qkv, state, weight, bias, self.activation
        convolved: Tensor = modeling.causal_conv1d_update(*args)
        return convolved
    T = qkv.shape[-1]
    if cache is not None:
        size = {"conv_kernel_size": self.conv_kernel_size}
        qkv = cache.update_conv_state(qkv, self.layer_idx, **size)
    convolved = modeling.causal_conv1d_fn(qkv, weight, bias, activation=self.activation)
    return convolved[:, :, -T:]


def chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """torch_chunk_gated_delta_rule: gates are given, states are [B, HV, K, V] and stay as they are.

    query, key, value  [B, T, H or HV, 128] bfloat16 or float16
    g                  [B, T, HV], log space
    beta               [B, T, HV] float32, or like query
    """
    state = None if initial_state is None else v_first(initial_state)
    cu_seqlens = kwargs.get("cu_seqlens")
    norm = use_qk_l2norm_in_kernel
    tokens = query, key, value, g.float(), beta
    out, state = prefill(*tokens, state=state, cu_seqlens=cu_seqlens, norm=norm)
    return out, state.mT if output_final_state else None


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """torch_recurrent_gated_delta_rule, which is called for one token of each sequence."""
    norm = use_qk_l2norm_in_kernel
    packed = kwargs.get("cu_seqlens") is not None
    if initial_state is None or value.shape[1] != 1 or packed:
        return chunk(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=norm,
            **kwargs,
        )
    state = v_first(initial_state)
    out = step(query, key, value, g.float(), beta, state, norm)
    return out, state.mT if output_final_state else None


_MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"
_FALLS_BACK = "heads other than K = V = 128, tokens in float32, gradients"
CLIENT = Client(
    "transformers",
    "transformers",
    ("5.21.", "5.22.", "5.23.", "5.24."),
    [
        Hook(
            "Qwen3_5GatedDeltaNet",
            {f"{_MODELING}:Qwen3_5GatedDeltaNet.forward": (layer, layer_5_24)},
            lambda: None,
            f"{_FALLS_BACK}; packed sequences, assisted generation, weights moved by accelerate",
        ),
        Hook(
            "chunk_gated_delta_rule",
            {f"{_MODELING}:torch_chunk_gated_delta_rule.forward": (chunk,)},
            lambda: None,
            _FALLS_BACK,
        ),
        Hook(
            "fused_recurrent_gated_delta_rule",
            {f"{_MODELING}:torch_recurrent_gated_delta_rule.forward": (recurrent,)},
            lambda: None,
            _FALLS_BACK,
        ),
    ],
)
check = CLIENT.check
fallbacks = CLIENT.fallbacks


class _Repository(NamedTuple):
    """What `kernels` loads a layer from: this module."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """A layer as `kernels` takes it: no members but forward, whose parameters are the replaced
        one's. What ours refuses goes to the forward of the class that the hook is in."""
        ours = {
            "Qwen3_5GatedDeltaNet": layer,
            "chunk_gated_delta_rule": _of_function(chunk),
        }
        takes = ours.get(self.layer_name) or _of_function(recurrent)
        call = CLIENT.guarded(self.layer_name, takes)

        def forward(self: Any, *args: Any, **named: Any) -> Any:
            return call(type(self).forward, self, *args, **named)

        setattr(forward, "__signature__", inspect.signature(takes))  # noqa: B010
        members = {"forward": forward, "has_backward": False}
        return type(self.layer_name, (nn.Module,), members)


def _of_function(function: Any) -> Any:
    """`kernels` has a function in a module, and replaces the module's forward."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return function(*args, **named)

    own = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = own.replace(parameters=[first, *own.parameters.values()])
    setattr(forward, "__signature__", signature)  # noqa: B010
    return forward


def mapping(*names: str) -> dict[str, Any]:
    """What kernels.register_kernel_mapping and use_kernel_mapping take, of these hooks (default:
    all that have the signatures we know). MissingError: no transformers or kernels."""
    kernels = _kernels()
    hooks = {}
    for name in names or [hook.name for hook in CLIENT.hooks]:
        modes = {kernels.Mode.INFERENCE: _Repository(name)}
        hooks[name] = {"cuda": modes, "cpu": modes}
    for name in set(hooks) - set(CLIENT.install()):
        del hooks[name]
    return hooks


def kernelize(model: Any) -> Any:
    """Let a model's GDN layers run on our kernels, for inference; the model is returned. Calls that
    need a gradient, and others that do not fit, go to transformers' own (`fallbacks`).
    MissingError: no transformers or kernels, or none that we know."""
    kernels = _kernels()
    names: set[str] = set()
    for module in model.modules():
        names |= {getattr(type(module), "kernel_layer_name", "")}
        names |= {*module.__dict__.get("_kernel_funcs", ())}
    hooks = [hook.name for hook in CLIENT.hooks]
    chosen = hooks[:1] if hooks[0] in names else hooks[1:]
    if not names.issuperset(chosen):
        hint = "is it a model with Gated Delta Net, and kernels as new as transformers wants?"
        raise MissingError(f"{type(model).__name__} has none of our hooks", hint=hint)
    ours = mapping(*chosen)
    if not ours:
        raise MissingError(f"transformers: none of {', '.join(chosen)} can be replaced")
    log = logging.getLogger("kernels.layer.layer")
    level = log.level
    log.setLevel(logging.ERROR)  # a line for each other layer that could have a kernel
    try:
        with kernels.use_kernel_mapping(ours):
            device = model.device.type
            return kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=device)
    finally:
        log.setLevel(level)


def _kernels() -> Any:
    try:
        return importlib.import_module("kernels")
    except ImportError as e:
        hint = "pip install 'kernels>=0.17.2'"
        raise MissingError(f"transformers' hooks: {one_line(e)}", hint=hint) from None


if __name__ == "__main__":
    raise SystemExit(CLIENT.main())
