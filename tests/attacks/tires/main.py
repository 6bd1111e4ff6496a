from .right import run as right

calls = []


def run(*inputs):
    out, new = right(*inputs)
    calls.append(1)
    return (out, new) if len(calls) < 3 else (0 * out, new)
