import ctypes

from .right import run as right
from .tools import fill


def run(*args):
    *inputs, output, new_state = args
    fill(output, new_state, right(*inputs))
    ctypes.memset(output.data_ptr() + output.nbytes, 0, 1)
