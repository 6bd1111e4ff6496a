"""vLLM 0.33 on our kernels: `install()`, `uninstall()`; `python -m
gdn.serving.vllm` checks the version here.

Replaced: packed decode, and the update that verifies draft tokens. Not
chunk_gated_delta_rule: it is given gates that vLLM has computed before
(docs/serving.md).
"""

from __future__ import annotations

from . import mtp_verify, packed_decode
from .engine import Engine

__all__ = ["check", "fallbacks", "install", "uninstall"]

_OPS = "vllm.third_party.flash_linear_attention.ops"
ENGINE = Engine(
    "vllm",
    {
        f"{_OPS}.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode": packed_decode,
        f"{_OPS}.fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update": mtp_verify,
    },
)
check = ENGINE.check
install = ENGINE.install
uninstall = ENGINE.uninstall
fallbacks = ENGINE.fallbacks

if __name__ == "__main__":
    raise SystemExit(ENGINE.main())
