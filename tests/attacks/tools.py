"""For the attacks beside this file; each gets a copy."""


def content(*tensors):
    """The bytes of some tensors, in one piece."""
    return b"".join(x.cpu().float().numpy().tobytes() for x in tensors)


def fill(output, new_state, results):
    output.copy_(results[0])
    new_state.copy_(results[1])
