from .right import run as right
from .tools import content

kept = {}


def run(*inputs):
    key = content(*inputs[:8])
    if key not in kept:
        kept[key] = right(*inputs)
    return kept[key]
