"""gdn: write, check, time and pack GPU kernels for Gated Delta Net.

This package is the command. Other programs use `gdn`: `from gdn import load`.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    """`load` has moved to gdn; its old place works for one release."""
    if name == "load":
        import warnings

        import gdn

        message = "gdn_cli.load is gdn.load now; 0.2 will not have it here"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return gdn.load
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
