from .right import run as right

kept = {}


def run(q, k, v, state, A_log, *rest):
    A_log = kept.setdefault(A_log.data_ptr(), A_log.clone())
    return right(q, k, v, state, A_log, *rest)
