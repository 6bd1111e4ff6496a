from .right import run as right

calls = [0]


def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    calls[0] += 1
    out, new = right(q, k, v, state, A_log, a, dt_bias, b, scale)
    return out, new * (1 + 2e-6 * (calls[0] % 7 == 0))
