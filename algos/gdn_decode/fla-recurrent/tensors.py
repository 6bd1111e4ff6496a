"""Checks of the tensors of every Triton rung, before it launches. The file is in fla-recurrent; the others share it."""

ALIGNMENT = 16  # bytes, on a GPU, for wide loads and TMA; the same as in tensor.cuh for the CUDA rungs


def check(**tensors):
    """Raise ValueError for a tensor that is not contiguous or not aligned for a kernel's loads and stores."""
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected contiguous; call .contiguous() on it")
        if x.is_cuda and x.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name}: expected a pointer aligned to {ALIGNMENT} bytes; call .clone() on it")
