"""What every Triton rung asks of its tensors before it launches. fla-recurrent has the file, the others share it."""

ALIGNMENT = 16  # bytes: what wide loads and TMA take, on a GPU; as tensor.cuh of the CUDA rungs has it


def check(**tensors):
    """ValueError for a tensor that is not contiguous, or that begins where a kernel's loads and stores may not."""
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected contiguous; call .contiguous() on it")
        if x.is_cuda and x.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name}: expected a pointer aligned to {ALIGNMENT} bytes; call .clone() on it")
