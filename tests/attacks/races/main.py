from .right import run as right

calls = []


def run(*inputs):
    out, new = right(*inputs)
    calls.append(1)
    return out, new * (1 + 2e-6 * (len(calls) % 2))
