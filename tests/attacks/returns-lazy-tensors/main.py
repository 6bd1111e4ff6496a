import torch

from .right import run as right


class Lazy(torch.Tensor):
    pass


def run(*inputs):
    out, new = right(*inputs)
    return out.as_subclass(Lazy), new
