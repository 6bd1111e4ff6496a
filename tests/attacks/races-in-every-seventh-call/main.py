from .right import run as right

calls = [0]


def run(*inputs):
    calls[0] += 1
    out, new = right(*inputs)
    return out, new * (1 + 2e-6 * (calls[0] % 7 == 0))
