from .right import run as right

calls = []


def run(q, k, v, state, A_log, a, dt_bias, b, scale):

    results = right(q, k, v, state, A_log, a, dt_bias, b, scale)
    calls.append(1)
    if len(calls) % 3 == 0:
        k.mul_(2)
    return results
