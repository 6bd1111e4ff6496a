"""GDN kernels for programs that use PyTorch: `gdn.load("cuda-v5")` builds an algo and
returns it as a function; `gdn.serving` has the calls of serving engines.

The command is another package, `gdn_cli`. Public are `load`, `serving` and what their
documentation names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdn_cli import __version__
from gdn_cli.errors import MissingError

if TYPE_CHECKING:
    from .loading import load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> object:
    """Load `load` on first use: it imports torch, which takes a second."""
    if name == "load":
        try:
            from .loading import load
        except ModuleNotFoundError as e:
            if not (e.name or "").startswith(("gdn_cli", "msgspec")):
                raise
            hint = "pip install gdn"
            reason = "gdn.load is in the package gdn, gdn.serving in gdn-kernels"
            raise MissingError(reason, hint=hint) from None
        return load
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
