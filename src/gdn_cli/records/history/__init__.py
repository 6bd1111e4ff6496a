"""The history: this user's benches, and queries over them.

A run is one document of the runs folder. A series is one algo of it in one tier.
"""

from __future__ import annotations

from .documents import EXPORTED, Place, Row, Series
from .folder import SHORT, History, keep
from .query import Filter, Group, Overview, most_measured, overview, timeline

__all__ = [
    "EXPORTED",
    "SHORT",
    "Filter",
    "Group",
    "History",
    "Overview",
    "Place",
    "Row",
    "Series",
    "keep",
    "most_measured",
    "overview",
    "timeline",
]
