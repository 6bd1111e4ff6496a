"""gdn: write, check, time and pack GPU kernels for Gated Delta Net."""

__version__ = "0.1.0"
