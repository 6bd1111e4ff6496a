import torch

from .right import run as right

kept = {}


def run(q, *rest):
    out, new = right(q, *rest)
    return out, kept.setdefault(q.shape, torch.empty_like(new)).copy_(new)
