"""gdn: write, check, time and pack GPU kernels for Gated Delta Net.

For other programs: `from gdn_cli import load; decode = load("cuda-v4")`, see
gdn_cli.operators.loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operators.loading import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str):
    """Load `load` on first use: it imports torch, which takes a second."""
    if name == "load":
        from .operators.loading import load

        return load
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
