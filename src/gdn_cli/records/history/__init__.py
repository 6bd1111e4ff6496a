"""Every bench that this user ran: a copy of each document, and what can be asked of them.

A run is one document. A series is one algo of it in one tier, with what the tables need worked out, so that nothing
has to read a hundred thousand records to answer.
"""

from __future__ import annotations

from .documents import EXPORTED, Place, Row, Series
from .query import Filter, Group, Overview, most_measured, overview, timeline
from .store import SHORT, History, Kept, default

__all__ = [
    "EXPORTED", "SHORT", "Filter", "Group", "History", "Kept", "Overview", "Place", "Row", "Series",
    "default", "most_measured", "overview", "timeline",
]  # fmt: skip
