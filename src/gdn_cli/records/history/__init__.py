"""The history: this user's benches, and queries over them.

A run is one document of the runs folder. A series is one algo of it in one tier.
"""

from __future__ import annotations

from .documents import Place, Series
from .folder import forget, keep, read
from .query import Filter, Group, Overview, overview, timeline

__all__ = [
    "Filter",
    "Group",
    "Overview",
    "Place",
    "Series",
    "forget",
    "keep",
    "overview",
    "read",
    "timeline",
]
