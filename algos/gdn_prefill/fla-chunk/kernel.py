"""The gated delta rule in chunks, in Triton: two launches, any sequence lengths, nothing read on the host.

With S0 the [V, K] state before a chunk of C tokens and G_t the sum of log g up to token t in it (pt-chunk derives this):

    T = (I + A)^-1 diag(beta)                      A_ts = beta_t e^(G_t - G_s) k_t . k_s      for s < t
    D = T (V - diag(e^G) K S0^T)
    O = scale diag(e^G) Q S0^T + M D               M_ts = scale e^(G_t - G_s) q_t . k_s       for s <= t
    S = e^(G_C) S0 + D^T diag(e^(G_C - G)) K

`prepare` computes T, M and G: one program per chunk and value head, all in parallel. `advance` does the rest, chunk after
chunk: one independent program per sequence, value head and tile of BV rows of S. It works on transposes, D^T [BV, C] and
S [BV, K]: the result of one product is then in the registers where the next product needs it, and with 16 rows per warp
no warp waits for another one from chunk to chunk.

Changed from pt-chunk: T instead of (I + A)^-1 K, so half of the scratch memory; the outputs are computed together with
the states, so only the last state is stored.

Chunks: the first one of sequence n has the number cu_seqlens[n] // C + n, which leaves enough numbers for each sequence,
T // C + N in all; a program finds its sequence by counting those that begin at or before its number. The values of
cu_seqlens are clamped to 0 to T: wrong ones give a wrong result, but no access outside the tensors.

Numbers: every decay is e^(G_t - G_s) with s <= t, at most 1. log g is clamped to at least -64, since e^-64 is
negligible and the differences of the sums keep their digits. The inverse is in float32: forward substitution in its 16 x 16 diagonal blocks,
then blocks of 32 and of 64 by products of three parts (tf32x3). K, Q, T, M and copies of S, D and V - diag(e^G) K S0^T go
to the matrix unit in bfloat16, sums and the state are float32. The keys must be normalised; then no entry of (I + A)^-1
is above 1.

Memory: T^T and M, bfloat16, [HV, T, C] each: a row for each token, 16 KiB for a full chunk of 64 tokens and head. G is stored
in `output`: each program of `advance` reads it from the columns that it then overwrites.

Grids: ((T // C + N) * HV,) and (N * HV * V / BV,), the tile fastest.
Provenance: the WY form is arXiv 2406.06484's, with decay arXiv 2412.06464's. Written here.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .tensors import check
from .tuned import TUNED

BLOCK = tl.constexpr(32)  # the inverse is assembled from blocks of this size
LEAST_LOG_G = tl.constexpr(-64.0)


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)), where log1p(e) = 2 atanh(z), z = e / (2 + e) <= 1/3: eight terms give f32."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = 1.0 / 15
    for n in tl.static_range(6, -1, -1):
        s = s * (z * z) + 1.0 / (2 * n + 1)
    return tl.maximum(x, 0.0) + 2.0 * z * s


@triton.jit
def sequence_of(slot, cu_seqlens, N, C: tl.constexpr):
    """The sequence whose chunks have the number `slot`: the last one with cu_seqlens[n] // C + n <= slot."""
    n = 0
    i = 0
    while i < N:
        o = i + tl.arange(0, 256)
        first = tl.load(cu_seqlens + o, mask=o < N, other=0) // C + o
        n += tl.sum(((first <= slot) & (o < N)).to(tl.int32), axis=0)
        i += 256
    return tl.maximum(n - 1, 0)


@triton.jit
def borders(cu_seqlens, i_n, T):
    """(first token, number of tokens) of sequence i_n, within 0 to T."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1), begin), T)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def gates(a, b, b_A, b_dt, valid):
    """(log g, beta) of tokens; both 0 after the last token: no decay, no update."""
    x = tl.load(a, mask=valid, other=0.0).to(tl.float32) + b_dt
    log_g = tl.maximum(-b_A * softplus(x), LEAST_LOG_G)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b, mask=valid, other=0.0).to(tl.float32)))
    return tl.where(valid, log_g, 0.0), tl.where(valid, beta, 0.0)


@triton.jit
def decays(b_Gt, b_Gs):
    """e^(G_t - G_s) [t, s]; entries with s > t are not used, but are at most 1 as well."""
    return tl.exp(tl.minimum(b_Gt[:, None] - b_Gs[None, :], 0.0))


@triton.jit
def product(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def rounded(x, UNIT: tl.constexpr):
    """x rounded to bfloat16, as the type that the products take."""
    if UNIT == tl.float32:  # Triton's interpreter truncates instead of rounding, and multiplies the bits of bfloat16
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(UNIT)


@triton.jit
def columns(p, count, C: tl.constexpr):
    """[C, 16]: row c is column c % 16 of the inverse of I + A's 16 x 16 block on the diagonal that has row c.

    p: `count` rows of C // 2 floats, of which the first 16 are A's row within its block.
    """
    o_c = tl.arange(0, C)
    o_j = tl.arange(0, 16)
    b_x = tl.where(o_c[:, None] % 16 == o_j[None, :], 1.0, 0.0)
    for i in tl.range(1, 16, loop_unroll_factor=5, num_stages=1):
        row = o_c // 16 * 16 + i
        b_r = tl.load(p + row[:, None] * (C // 2) + o_j[None, :], mask=(row < count)[:, None], other=0.0)
        b_x = tl.where(o_j[None, :] == i, b_x - tl.sum(b_r * b_x, axis=1)[:, None], b_x)
    return b_x


@triton.jit
def inverse(b_x, b_A):
    """[(I + A)^-1]^T [32, 32], of A and the two columns() [32, 16] of its diagonal."""
    o_t = tl.arange(0, BLOCK)
    same = o_t[:, None] // 16 == o_t[None, :] // 16
    b_x = tl.reshape(tl.broadcast_to(b_x[:, None, :], (BLOCK, BLOCK // 16, 16)), (BLOCK, BLOCK))
    b_x = tl.where(same, b_x, 0.0)  # D^-1, transposed
    b_l = tl.where(same, 0.0, b_A)  # (D + L)^-1 = D^-1 - D^-1 L D^-1 for two blocks
    return b_x - product(product(b_x, tl.trans(b_l)), b_x)


@triton.jit
def keep_diagonal(p, b_A, is_row, C: tl.constexpr):
    """Write the 16 x 16 blocks on the diagonal of A [32, 32] to the first 16 floats of 32 rows of C // 2."""
    o_t = tl.arange(0, BLOCK)
    same = o_t[:, None] // 16 == o_t[None, :] // 16
    tl.store(p + o_t[:, None] * (C // 2) + o_t[None, :] % 16, b_A, mask=same & is_row)


@triton.jit(do_not_specialize=["T", "N"])
def gdn_prefill_prepare(
    q, k, A_log, a, dt_bias, b, cu_seqlens, scale, solved, masked, output, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    i_hv = tl.program_id(0) % HV
    slot = tl.program_id(0) // HV
    i_n = sequence_of(slot, cu_seqlens, N, C)
    begin, length = borders(cu_seqlens, i_n, T)
    first = (slot - (begin // C).to(tl.int32) - i_n) * C  # of the chunk, in its sequence
    if (first < 0) | (first >= length):
        return
    i_t = begin + first
    left = length - first

    o_t = tl.arange(0, BLOCK)
    o_k = tl.arange(0, K)
    lower = o_t[:, None] > o_t[None, :]
    below = o_t[:, None] >= o_t[None, :]
    b_A = tl.exp(tl.load(A_log + i_hv))
    b_dt = tl.load(dt_bias + i_hv)
    p_k = k + (i_t * H + i_hv // (HV // H)) * K + o_t[:, None] * (H * K) + o_k[None, :]
    p_q = q + (i_t * H + i_hv // (HV // H)) * K + o_t[:, None] * (H * K) + o_k[None, :]
    p_t = solved + (i_hv.to(tl.int64) * T + i_t) * C  # rows: s, columns: t
    p_m = masked + (i_hv.to(tl.int64) * T + i_t) * C  # rows: t, columns: s
    p_g = output.to(tl.pointer_type(tl.float32), bitcast=True) + (i_t * HV + i_hv) * (V // 2) + o_t * (HV * V // 2)
    p_a = i_t * HV + i_hv + o_t * HV
    p_x = p_t.to(tl.pointer_type(tl.float32), bitcast=True)
    o_c = o_t[:, None] * C + o_t[None, :]

    is_0 = o_t < left
    row_0 = is_0[:, None]
    b_g0, b_b0 = gates(a + p_a, b + p_a, b_A, b_dt, is_0)
    b_G0 = tl.cumsum(b_g0, axis=0)
    for i in tl.static_range(V // BV):
        tl.store(p_g + i * (BV // 2), b_G0, mask=is_0)
    b_k0 = tl.load(p_k, mask=row_0, other=0.0).to(UNIT)
    b_q0 = tl.load(p_q, mask=row_0, other=0.0).to(UNIT)
    b_d = decays(b_G0, b_G0)
    b_A0 = tl.where(lower, b_b0[:, None] * b_d * tl.dot(b_k0, tl.trans(b_k0)), 0.0)
    b_m = tl.where(below, scale * b_d * tl.dot(b_q0, tl.trans(b_k0)), 0.0)
    tl.store(p_m + o_c, rounded(b_m, UNIT), mask=row_0)
    keep_diagonal(p_x, b_A0, row_0, C)
    if C == 2 * BLOCK:
        is_1 = o_t + BLOCK < left
        row_1 = is_1[:, None]
        b_g1, b_b1 = gates(a + p_a + BLOCK * HV, b + p_a + BLOCK * HV, b_A, b_dt, is_1)
        b_G1 = tl.cumsum(b_g1, axis=0) + tl.sum(b_g0, axis=0)
        for i in tl.static_range(V // BV):
            tl.store(p_g + BLOCK * (HV * V // 2) + i * (BV // 2), b_G1, mask=is_1)
        b_k1 = tl.load(p_k + BLOCK * H * K, mask=row_1, other=0.0).to(UNIT)
        b_q1 = tl.load(p_q + BLOCK * H * K, mask=row_1, other=0.0).to(UNIT)
        b_d = decays(b_G1, b_G1)
        b_A1 = tl.where(lower, b_b1[:, None] * b_d * tl.dot(b_k1, tl.trans(b_k1)), 0.0)
        b_m = tl.where(below, scale * b_d * tl.dot(b_q1, tl.trans(b_k1)), 0.0)
        tl.store(p_m + BLOCK * C + BLOCK + o_c, rounded(b_m, UNIT), mask=row_1)
        keep_diagonal(p_x + BLOCK * (C // 2), b_A1, row_1, C)
        b_d = decays(b_G1, b_G0)
        b_A10 = b_b1[:, None] * b_d * tl.dot(b_k1, tl.trans(b_k0))
        b_m = scale * b_d * tl.dot(b_q1, tl.trans(b_k0))
        tl.store(p_m + BLOCK * C + o_c, rounded(b_m, UNIT), mask=row_1)
        tl.store(p_m + BLOCK + o_c, tl.zeros((BLOCK, BLOCK), masked.dtype.element_ty), mask=row_0)
    tl.debug_barrier()  # all warps have written their part of A's diagonal
    b_x = columns(p_x, left, C)
    tl.debug_barrier()  # and have read all of it, before T^T overwrites it
    if C == 2 * BLOCK:
        b_x0, b_x1 = tl.split(tl.permute(tl.reshape(b_x, (2, BLOCK, 16)), (1, 2, 0)))
        b_x0, b_x1 = inverse(b_x0, b_A0), inverse(b_x1, b_A1)
        b_x10 = product(product(b_x0, tl.trans(b_A10)), b_x1)
        tl.store(p_t + o_c, rounded(b_b0[:, None] * b_x0, UNIT), mask=row_0)
        tl.store(p_t + BLOCK + o_c, rounded(-b_b0[:, None] * b_x10, UNIT), mask=row_0)
        tl.store(p_t + BLOCK * C + o_c, tl.zeros((BLOCK, BLOCK), solved.dtype.element_ty), mask=row_1)
        tl.store(p_t + BLOCK * C + BLOCK + o_c, rounded(b_b1[:, None] * b_x1, UNIT), mask=row_1)
    else:
        tl.store(p_t + o_c, rounded(b_b0[:, None] * inverse(b_x, b_A0), UNIT), mask=row_0)


@triton.jit(do_not_specialize=["T"])
def gdn_prefill_advance(
    q, k, v, state, cu_seqlens, scale, solved, masked, output, new_state, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    i_v = tl.program_id(0) % (V // BV)
    i_s = tl.program_id(0) // (V // BV)  # sequence * HV + value head
    i_hv = i_s % HV
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)
    o_t = tl.arange(0, C)
    o_s = i_s.to(tl.int64) * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_s = tl.load(state + o_s)  # [BV, K]
    begin, length = borders(cu_seqlens, i_s // HV, T)
    p_k = k + i_hv // (HV // H) * K + o_t[:, None] * (H * K) + o_k[None, :]
    p_q = q + i_hv // (HV // H) * K + o_t[:, None] * (H * K) + o_k[None, :]
    p_v = v + i_hv * V + o_t[:, None] * (HV * V) + o_v[None, :]
    p_o = output + i_hv * V + o_t[:, None] * (HV * V) + o_v[None, :]
    p_t = solved + i_hv.to(tl.int64) * T * C + o_t[:, None] * C + o_t[None, :]
    p_m = masked + i_hv.to(tl.int64) * T * C + o_t[:, None] * C + o_t[None, :]
    p_g = output.to(tl.pointer_type(tl.float32), bitcast=True)
    p_g += i_hv * (V // 2) + i_v * (BV // 2) + o_t * (HV * V // 2)
    for i in tl.range(0, tl.cdiv(length, C) if STEPS < 0 else STEPS, num_stages=STAGES):
        i_t = begin + i * C
        valid = o_t < length - i * C
        is_row = valid[:, None]
        # Changes of layout come first: ptxas moves no load from shared memory past a store to it.
        b_v = tl.trans(tl.load(p_v + i_t * (HV * V), mask=is_row, other=0.0)).to(tl.float32)  # [BV, C]
        b_G = tl.load(p_g + i_t * (HV * V // 2), mask=valid, other=0.0)  # [C]
        b_end = tl.min(b_G, axis=0)  # of the last token: G never rises, and is 0 after the last token
        b_in = tl.exp(b_G)[None, :]
        b_out = tl.exp(b_end - b_G)[None, :]

        b_k = tl.load(p_k + i_t * (H * K), mask=is_row, other=0.0).to(UNIT)  # [C, K]
        b_h = rounded(b_s, UNIT)
        b_r = b_v - b_in * tl.dot(b_h, tl.trans(b_k))  # [BV, C]
        b_t = tl.load(p_t + i_t * C, mask=is_row, other=0.0).to(UNIT)  # [C, C], T^T
        b_d = tl.dot(rounded(b_r, UNIT), b_t)
        b_q = tl.load(p_q + i_t * (H * K), mask=is_row, other=0.0).to(UNIT)  # [C, K]
        b_o = scale * b_in * tl.dot(b_h, tl.trans(b_q))
        b_m = tl.load(p_m + i_t * C, mask=is_row, other=0.0).to(UNIT)  # [C, C]
        b_o = tl.dot(rounded(b_d, UNIT), tl.trans(b_m), b_o)
        b_s = tl.dot(rounded(b_out * b_d, UNIT), b_k, tl.exp(b_end) * b_s)
        tl.store(p_o + i_t * (HV * V), tl.trans(rounded(b_o, UNIT)).to(tl.bfloat16), mask=is_row)
    tl.store(new_state + o_s, b_s)


@functools.lru_cache
def _sms(device: torch.device) -> int:
    """Number of SMs of the device; under Triton's interpreter a number far from any GPU's: few programs are quick there."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else -1000


@functools.lru_cache
def _constants(size: int, sms: int) -> dict:
    """The row of TUNED for this size (sequences * value heads), of the GPU whose number of SMs is nearest."""
    gpu = min(TUNED, key=lambda row: abs(row["sms"] - sms))
    return next(r for r in TUNED if (r["gpu"], r["sms"]) == (gpu["gpu"], gpu["sms"]) and size <= r["up_to"])


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale, output, new_state):
    """Write the outputs of all tokens and each sequence's last state.

    q, k        [T, H, 128]        bfloat16
    v           [T, HV, 128]       bfloat16; HV is a multiple of H
    state       [N, HV, 128, 128]  float32, k-last
    A_log       [HV]               float32
    a, b        [T, HV]            bfloat16
    dt_bias     [HV]               float32
    cu_seqlens  [N + 1]            int64, on the device; an empty sequence keeps its state
    scale       float; None or 0 means 1 / sqrt(128)

    output     [T, HV, 128]       bfloat16, written; it must not share memory with an input
    new_state  [N, HV, 128, 128]  float32, written; it may be state
    """
    (T, H, K), (N, HV, V, _) = q.shape, state.shape
    if (V, K) != (128, 128) or HV % H:
        raise ValueError(f"expected K = V = 128 and HV a multiple of H, got K={K}, V={V}, HV={HV}, H={H}")
    check(q=q, k=k, v=v, state=state, A_log=A_log, a=a, dt_bias=dt_bias, b=b, cu_seqlens=cu_seqlens, output=output,
          new_state=new_state)  # fmt: skip
    if state.dtype != torch.float32 or new_state.dtype != torch.float32:
        raise ValueError(f"state and new_state: expected float32, got {state.dtype} and {new_state.dtype}")
    if N == 0:
        return
    c = _constants(N * HV, _sms(state.device))
    C, BV = c["chunk"], c["rows"]
    scale = float(scale or K**-0.5)
    solved, masked = torch.empty((2, HV, T, C), dtype=k.dtype, device=k.device)
    unit = tl.bfloat16 if k.is_cuda else tl.float32
    if T > 0:
        gdn_prefill_prepare[((T // C + N) * HV,)](
            q, k, A_log, a, dt_bias, b, cu_seqlens, scale, solved, masked, output, T, N,
            H=H, HV=HV, K=K, V=V, C=C, BV=BV, UNIT=unit, num_warps=c["prepare_warps"],
        )  # fmt: skip
    # The interpreter of triton 3.6 with numpy 2.4 cannot loop up to a number loaded on the device: for it the longest
    # sequence's chunks are counted here, which needs no wait; steps after a sequence's end change nothing.
    steps = -1 if k.is_cuda else triton.cdiv(int(cu_seqlens.diff().clamp(0, T).max()), C)
    gdn_prefill_advance[(N * HV * (V // BV),)](
        q, k, v, state, cu_seqlens, scale, solved, masked, output, new_state, T,
        H=H, HV=HV, K=K, V=V, C=C, BV=BV, STAGES=c["stages"], UNIT=unit, STEPS=steps, num_warps=c["num_warps"],
    )  # fmt: skip
