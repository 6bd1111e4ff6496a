"""Limits for numbers in files that gdn reads back."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

# a limit on both sides also excludes NaN and the infinities
_LARGEST = sys.float_info.max
# so that ratios of two are finite and not 0
Positive = Annotated[float, Meta(ge=1e-100, le=1e100)]
NotNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
Number = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
Count = Annotated[int, Meta(ge=0)]
# of a logarithm; what is squared must not overflow
Deviation = Annotated[float, Meta(ge=0, le=1e6)]
Degrees = Annotated[int, Meta(gt=0)] | Positive  # of freedom
