from .right import run as right
from .tools import fill


def run(*args):
    *inputs, output, new_state = args
    out, new = right(*inputs)
    fill(output, new_state, (out, new if new_state.any() else 0 * new))
