import torch


def run(q, k, v, state, *rest):
    return torch.zeros_like(v), torch.zeros_like(state)
