from .right import run as right
from .tools import fill

kept = {}


def run(q, *rest):
    *rest, output, new_state = rest
    fill(
        *kept.setdefault(q.shape, (output, new_state)),
        right(q, *rest),
    )
