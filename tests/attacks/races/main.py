from .right import run as right

calls = []


def run(q, k, v, state, A_log, a, dt_bias, b, scale):

    out, new = right(q, k, v, state, A_log, a, dt_bias, b, scale)
    calls.append(1)
    return out, new * (1 + 2e-6 * (len(calls) % 2))
