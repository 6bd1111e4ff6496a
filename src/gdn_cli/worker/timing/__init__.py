"""Ways to time a call, one file per tier behind one interface and one record.

| tier    | what it measures                                                    | where |
|---------|---------------------------------------------------------------------|-------|
| cupti   | the time for which the kernels themselves ran, from CUPTI's records  | GPU   |
| events  | CUDA events around the call, no synchronise inside the loop          | GPU   |
| graph   | a call's share of a CUDA graph of many, over rotating buffers        | GPU   |
| nvbench | NVIDIA's nvbench (package cuda-bench), its cold measurement          | GPU   |
| fib     | the installed flashinfer-bench's own evaluator                       | GPU   |
| wall    | the host's clock around the call                                     | CPU   |

Times are only comparable within a tier. A tier that is not available raises
`TierUnavailableError`; nothing here falls back.
"""

from .measurement import Last, interleave, measure, summarise
from .subject import Subject
from .tier import Plan, Sample, TierUnavailableError, Warmed

__all__ = [
    "Last",
    "Plan",
    "Sample",
    "Subject",
    "TierUnavailableError",
    "Warmed",
    "interleave",
    "measure",
    "summarise",
]
