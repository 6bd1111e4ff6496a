"""The worker's tensors in a runner: copies of their storages, and results that the
worker still needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ...parsing import Json
from ..messages import Form, Result
from . import calls, shared_memory


class Storage(NamedTuple):
    """Memory that the worker sees too, and the bytes on the device."""

    region: shared_memory.Region
    block: Tensor
    begin: int  # where the block begins in its own storage


class Tensors:
    """The commands about tensors."""

    def __init__(self, device: str) -> None:
        self.device = device  # "cuda" or "cpu"
        self.storages: dict[int, Storage] = {}
        # the same object for the same form: some kernels check a tensor's identity
        self.tensors: dict[Form, Tensor] = {}
        self.results: dict[int, Tensor] = {}
        self.count = 0

    def share(self, descriptor: int, storage: int, nbytes: int, place: int) -> None:
        """Add a storage of the worker's: it gets a copy here, whose bytes travel
        through this memory. With a negative `place` it only receives a result.
        """
        region = shared_memory.Region(nbytes, descriptor)
        region.close()
        if place < 0:
            self.storages[storage] = Storage(region, region.bytes, 0)
            return
        room, begin = shared_memory.room(nbytes, self.device, place)
        self.storages[storage] = Storage(region, room[begin : begin + nbytes], begin)

    def forget(self) -> None:
        """Drop all storages and results."""
        self.storages.clear()
        self.tensors.clear()
        self.results.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def push(self, storages: list[int]) -> None:
        for number in storages:
            region, block, _ = self.storages[number]
            block.data.copy_(region.bytes)
        self._settle()

    def pull(
        self, storages: list[int], results: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Copy to the worker: whole storages, and results, each into its own storage."""
        for number in storages:
            region, block, _ = self.storages[number]
            region.bytes.copy_(block)
        for number, storage in results:
            x = self.results[number]
            if x.numel():
                self.storages[storage].region.like(x).copy_(x)
        self._settle()

    def _drop(self, dropped: Sequence[tuple[int, int]]) -> None:
        for result, storage in dropped:
            self.results.pop(result, None)
            self.storages.pop(storage, None)

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _formed(self, message: Json) -> Json:
        """A command's arguments, with forms replaced by tensors."""
        for name in calls.VALUES & message.keys():
            message[name] = [
                self._tensor(msgspec.convert(x, Form)) if isinstance(x, dict) else x
                for x in message[name]
            ]
        return message

    def _tensor(self, form: Form) -> Tensor:
        if form not in self.tensors:
            block = None
            begin = 0
            if form.storage is not None:
                _, block, begin = self.storages[form.storage]
            self.tensors[form] = shared_memory.formed(form, block, begin, self.device)
        return self.tensors[form]

    def _described(self, results: Sequence) -> list[Result]:
        """The returned values, each with a number by which the worker can ask for its bytes."""
        descriptions = []
        for x in results:
            result = Result(form=calls.described(x), odd=calls.odd(x))
            if isinstance(x, Tensor):
                self.count += 1
                self.results[self.count] = x
                result.number = self.count
                result.address = 0 if result.odd else x.data_ptr()
            descriptions.append(result)
        return descriptions
