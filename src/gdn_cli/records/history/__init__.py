"""The history: a copy of every document that this user measured, and queries over them.

A run is one document. A series is one algo of it in one tier, with the values that
tables need, so that a query does not read a hundred thousand records.
"""

from __future__ import annotations

from .documents import EXPORTED, Place, Row, Series
from .query import Filter, Group, Overview, most_measured, overview, timeline
from .store import SHORT, History, Kept, default

__all__ = [
    "EXPORTED",
    "SHORT",
    "Filter",
    "Group",
    "History",
    "Kept",
    "Overview",
    "Place",
    "Row",
    "Series",
    "default",
    "most_measured",
    "overview",
    "timeline",
]
