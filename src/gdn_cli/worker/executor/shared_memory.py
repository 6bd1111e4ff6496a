"""Memory that a worker and its runner both map. Of a tensor, the bytes of its whole
storage travel through it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
from torch import Tensor

from ..messages import Form

ALIGN = 4096  # bytes: a copy of a storage begins at the same offset in a page


class Region:
    """Bytes that both processes map. Sealed: neither side can shrink or grow it."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor = _memory(nbytes) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, nbytes)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def like(self, x: Tensor) -> Tensor:
        """The first bytes as a tensor of another one's dtype and shape."""
        return self.bytes.view(x.dtype)[: x.numel()].view(x.shape)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last tensor in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _memory(nbytes: int) -> int:
    descriptor = os.memfd_create("gdn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def all_bytes(x: Tensor) -> Tensor:
    """Every byte of the tensor's storage, including guards around the tensor."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def room(nbytes: int, device: str, place: int) -> tuple[Tensor, int]:
    """New bytes on a device, and the offset at which `nbytes` begin at offset `place` of a page."""
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    # for a sanitizer nothing follows them
    exact = "ASAN_OPTIONS" in os.environ and place % 64 == 0
    if exact or block.data_ptr() % ALIGN == place:
        return block, 0
    block = torch.empty(nbytes + ALIGN, dtype=torch.uint8, device=device)
    return block, (place - block.data_ptr()) % ALIGN


def form(x: Tensor, storage: int | None) -> Form:
    """A tensor's description as it is sent; `storage` is the number of its storage."""
    return Form(
        storage,
        str(x.dtype).removeprefix("torch."),
        tuple(x.shape),
        x.stride(),
        int(x.storage_offset()),
    )


def formed(form: Form, block: Tensor | None, begin: int, device: str) -> Tensor:
    """The tensor that a form describes, in a block in which the storage's bytes begin
    at `begin`.
    """
    dtype = getattr(torch, form.dtype)
    if block is None:
        return torch.empty(form.shape, dtype=dtype, device=device)
    offset = begin // dtype.itemsize + form.offset
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(block.untyped_storage(), offset, form.shape, form.stride)
