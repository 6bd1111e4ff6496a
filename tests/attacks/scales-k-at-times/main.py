from .right import run as right

calls = []


def run(q, k, *rest):
    results = right(q, k, *rest)
    calls.append(1)
    if len(calls) % 3 == 0:
        k.mul_(2)
    return results
