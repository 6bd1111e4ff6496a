import torch

from .right import run as right
from .tools import fill


def run(*args):
    *inputs, output, new_state = args
    with torch.cuda.stream(torch.cuda.default_stream()):
        fill(output, new_state, right(*inputs))
