import torch

from .right import run as right
from .tools import fill

side = torch.cuda.Stream()


def run(*args):
    *inputs, output, new_state = args
    with torch.cuda.stream(side):
        fill(output, new_state, right(*inputs))
