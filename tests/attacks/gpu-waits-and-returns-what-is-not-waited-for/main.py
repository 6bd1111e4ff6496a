import torch

from .right import run as right

side = torch.cuda.Stream()


def run(*inputs):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        return right(*inputs)
