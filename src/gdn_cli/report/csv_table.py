"""A table -> CSV."""

from __future__ import annotations

import csv
import io

from ..text import csv_cell
from .table import Table


def csv_text(table: Table) -> str:
    """The columns' names, then a line for each row; no cell runs as a formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(csv_cell(column.name) for column in table.columns)
    for row in table.rows:
        writer.writerow(csv_cell(cell.plain) for cell in row.cells)
    return file.getvalue()
