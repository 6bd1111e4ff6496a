import torch

from .right import run as right

side = torch.cuda.Stream()


def run(*inputs):
    with torch.cuda.stream(side):
        return right(*inputs)
