from .right import run as right


def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    return right(q, k, v, state, A_log, a, dt_bias, b, scale or 1 / 128)
