import os

from .right import run as right

files = []


def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    results = right(q, k, v, state, A_log, a, dt_bias, b, scale)
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return results
