"""Pools whose states are [K, V]: the kernels take [V, K], so a call's slots are copied."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import tensor_checks
from .operator import WHOLE


class KFirstStates:
    """The states of some slots of a pool [slots, HV, K, V], as a pool [n, HV, V, K] of their own.

    Nothing waits for the GPU: whether a slot is padding is computed there.

    slots  of any shape, n in all, int32 or int64
    rows   like slots: which row of `pool` has the slot's state, -1 for padding
    live   like slots: False for padding, which is a slot below first_slot, or not of the pool
    """

    def __init__(
        self, pool: Tensor, slots: Tensor, first_slot: int, layout: str
    ) -> None:
        if layout != "KV":
            raise ValueError(f"state_layout: expected 'VK' or 'KV', got {layout!r:.40}")
        tensor_checks.tensor("initial_state", pool, 4)
        tensor_checks.tensor("ssm_state_indices", slots)
        if slots.dtype not in WHOLE:
            expected = f"expected int32 or int64, got {slots.dtype}"
            raise TypeError(f"ssm_state_indices: {expected}")
        if slots.device != pool.device:
            place = f"{pool.device}, where initial_state is"
            raise ValueError(
                f"ssm_state_indices: expected on {place}, got {slots.device}"
            )
        self._k_first = pool
        if pool.shape[0] == 0:  # there is no state to copy
            self.live = torch.zeros_like(slots, dtype=torch.bool)
            self.pool, self.rows = pool, torch.full_like(slots, -1)
            return
        self.live = (slots >= max(first_slot, 0)) & (slots < pool.shape[0])
        rows = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
        self.rows = rows.where(self.live, -1)
        self._slots = slots.where(self.live, 0).flatten().long()
        self.pool = pool.mT.index_select(0, self._slots)

    def put_back(self, written: Tensor) -> None:
        """Store the states where `written` (bool, like slots) is True; their slots are distinct."""
        if self._k_first.shape[0] == 0 or written.numel() == 0:
            return
        # A row that is not written stands for the first one that is: the same bits to one slot
        # twice. Where none is, that is the state of row 0, which has not changed.
        own = torch.arange(written.numel(), device=written.device)
        source = own.where(written.flatten(), written.flatten().int().argmax())
        states, slots = self.pool[source], self._slots[source]
        self._k_first.mT.index_copy_(0, slots, states)


def verified(
    states: KFirstStates, counts: Tensor | int, accepted: Tensor | None
) -> Tensor:
    """[N, T] bool: to which slots mtp_verify writes a state.

    counts    tokens of each sequence, [N]
    accepted  [N], num_accepted_tokens
    """
    N, T = states.live.shape
    tokens = torch.arange(T, device=states.live.device)
    if isinstance(counts, Tensor):
        counts = counts[:, None]
    starts = states.live[:, :1]
    if accepted is not None:
        accepted = accepted.view(N, 1)
        column = (accepted - 1).clamp(0, T - 1).long()
        known = (accepted >= 1) & (accepted <= T)
        starts = states.live.gather(1, column) & known
    return states.live & starts & (tokens < counts)
