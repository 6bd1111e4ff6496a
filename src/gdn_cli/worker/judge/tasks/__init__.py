"""What a worker can be asked to do. Each task is a generator that yields records as
soon as they are made.

An algo's code runs in a runner (executor/), never here. Only a profiler's target runs it
itself, and it does not judge.
"""

from .comparison import compare
from .floors import floors
from .official import official
from .survey import Target, profile
from .trial import algo

__all__ = ["Target", "algo", "compare", "floors", "official", "profile"]
