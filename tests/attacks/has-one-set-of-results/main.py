from .right import run as right
from .tools import fill

kept = {}


def run(q, *rest):
    results = right(q, *rest)
    mine = kept.setdefault(q.shape, results)
    fill(*mine, results)
    return mine
