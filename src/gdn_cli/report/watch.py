"""`gdn watch`: a line for each save."""

from __future__ import annotations

from ..schema.output import Saved
from ..schema.statuses import Status
from .screen import console, print_line, styled


def show_saved(saved: Saved) -> None:
    """Print "12:03:11 right at B=1, SAME: 1.04x the last good (0.99 to 1.09)"."""
    if saved.status is Status.PASSED:
        word, style, text = "right", "green", f" at {saved.size}{_compared(saved)}"
    else:
        first, *more = (saved.reason or "no reason is known").strip().splitlines()
        rest = f" (and {len(more)} more: gdn run)" if more else ""
        wrong = [f"; first wrong {words}" for words in saved.first_wrong.values()]
        text = f": {first}{rest}{''.join(wrong[:1])}"
        word, style = saved.status.words, "red"
    print_line(console(), styled(saved.time, " ", (word, style), text), 9, whole=True)


def _compared(saved: Saved) -> str:
    if saved.ratio is None:
        return ""
    interval = f"({saved.low:.2f} to {saved.high:.2f})"
    return f", {saved.verdict}: {saved.ratio:.2f}x the last good {interval}"
