"""What a worker can be asked to do. Each task is a generator of records, made as soon as they can be.

An algo's code runs in a runner (runner/), never here; only a profiler's target runs it itself, and gives no verdict.
"""

from .common import BuildFailed
from .comparison import compare
from .floors import floors
from .survey import Target, profile
from .trial import algo

__all__ = ["BuildFailed", "Target", "algo", "compare", "floors", "profile"]
