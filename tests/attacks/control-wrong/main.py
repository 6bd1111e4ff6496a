import torch


def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    return torch.zeros_like(v), torch.zeros_like(state)
