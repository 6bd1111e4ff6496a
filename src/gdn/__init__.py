"""GDN kernels for programs that use PyTorch: `gdn.load("cuda-v5")` builds an algo and
returns it as a function; `gdn.serving` has the calls of serving engines.

The command is another package, `gdn_cli`. Public are `load`, `serving` and what their
documentation names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdn_cli import __version__

if TYPE_CHECKING:
    from .loading import load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> object:
    """Load `load` on first use: it imports torch, which takes a second."""
    if name == "load":
        from .loading import load

        return load
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
