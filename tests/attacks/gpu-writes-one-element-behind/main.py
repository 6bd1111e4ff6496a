from .right import run as right
from .tools import fill


def run(*args):
    *inputs, output, new_state = args
    fill(output, new_state, right(*inputs))
    new_state.as_strided(
        (1,), (1,), new_state.storage_offset() + new_state.numel()
    ).zero_()
