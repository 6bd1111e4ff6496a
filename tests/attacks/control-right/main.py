from .right import run  # noqa: F401
