from .right import run as right

calls = []


def run(q, k, v, state, A_log, a, dt_bias, b, scale):

    out, new = right(q, k, v, state, A_log, a, dt_bias, b, scale)
    calls.append(1)
    return (out, new) if len(calls) < 3 else (0 * out, new)
