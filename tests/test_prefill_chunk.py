"""cuda-chunk's kernels on a CPU (emulated/): fragments, swizzles, the inverse, the ends of sequences, against float64."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import helpers
import numpy as np
import oracle
import pytest
import torch

from gdn_cli import machine

HERE = helpers.TESTS / "emulated"
FOLDER = helpers.OURS / "gdn_prefill" / "cuda-chunk"

DRIVER = """
#include "prepare.cuh"
#include "split.cuh"
using namespace gdn;
template <int WARPS, int STAGES>
void state(const Prefill& p) {
  emulated::launch({uint32_t(D / 16 / WARPS), uint32_t(p.HV), uint32_t(p.N)}, WARPS * 32, state_shared<WARPS, STAGES>(), 1,
                   [&] { gdn_prefill_state<WARPS, STAGES>(p); });
}
template <int STAGES>
void split(const Prefill& p) {
  emulated::launch({D / 16, uint32_t(p.HV), uint32_t(p.N)}, SPLIT_THREADS, split_shared<STAGES>(), 1,
                   [&] { gdn_prefill_split<STAGES>(p); });
}
extern "C" int prefill(int warps, int mode, void** t, float scale, int H, int HV, int N, int T) {
  using bf = __nv_bfloat16;
  const Prefill p{(bf*)t[0], (bf*)t[1], (bf*)t[2], (float*)t[3], (float*)t[4], (bf*)t[5], (float*)t[6], (bf*)t[7],
                  (int64_t*)t[8], (bf*)t[9], (float*)t[10], (char*)t[11], scale, H, HV, N};
  emulated::mode = mode;
  emulated::launch({uint32_t(T / CHUNK + N), uint32_t(H), 1}, PREPARE_THREADS, sizeof(PrepareShared), 1,
                   [&] { gdn_prefill_prepare(p); });
  if (warps == 0) split<3>(p);
  else if (warps == 1) state<1, 3>(p);
  else if (warps == 2) state<2, 2>(p);
  else if (warps == 4) state<4, 3>(p);
  else if (warps == 8) state<8, 2>(p);
  else return 1;
  return 0;
}
extern "C" int prepared_bytes() { return sizeof(Prepared); }
"""


def without(source: str, *functions: str) -> str:
    """The source without these functions, which emulated/ has."""
    for name in functions:
        source, n = re.subn(rf"__device__ __forceinline__ [\w:]+ {name}\(.*?\n}}\n", "", source, flags=re.S)
        assert n == 1, name
    return source


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if machine.cxx() is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("chunk")
    for file in ("prepare.cuh", "state.cuh", "split.cuh"):
        shutil.copy(FOLDER / file, folder)
    chunk = without((FOLDER / "chunk.cuh").read_text(), "mma", "transposed")
    assert "asm" not in chunk
    (folder / "chunk.cuh").write_text(chunk.replace('#include "ptx.cuh"', '#include "bf16.cuh"'))
    import test_emulated

    decode = test_emulated.without_ptx((helpers.OURS / "gdn_decode" / "cuda-v5" / "decode.cuh").read_text())
    (folder / "decode.cuh").write_text(decode)
    (folder / "driver.cpp").write_text(DRIVER)
    command = [machine.cxx(), "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-I", HERE, "-o", "driver.so", "driver.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "driver.so"))


def inputs(lengths, H, HV, *, seed=0, state_scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    T, N = sum(lengths), len(lengths)
    q, k = (torch.nn.functional.normalize(torch.randn(T, H, 128, generator=draw), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(T, HV, 128, generator=draw).bfloat16()
    state = torch.randn(N, HV, 128, 128, generator=draw) * state_scale
    A_log, dt_bias = (torch.randn(HV, generator=draw) for _ in range(2))
    a, b = (torch.randn(T, HV, generator=draw).bfloat16() for _ in range(2))
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    return [q, k, v, state, A_log, a, dt_bias, b, cu]


def prefill(library, warps, given, scale=0.1, mode=0, in_place=False):
    q, k, v, state, A_log, a, dt_bias, b, cu = given
    T, N, H, HV = q.shape[0], len(cu) - 1, q.shape[1], v.shape[1]
    output, state = torch.full_like(v, float("nan")), state.clone()
    new_state = state if in_place else torch.full_like(state, float("nan"))
    prepared = torch.full(((T // 64 + N) * HV, library.prepared_bytes()), 255, dtype=torch.uint8)
    pointers = [q, k, v, state, A_log, a, dt_bias, b, cu, output, new_state, prepared]
    table = (ctypes.c_void_p * len(pointers))(*(x.data_ptr() for x in pointers))
    assert library.prefill(warps, mode, table, ctypes.c_float(scale), H, HV, N, T) == 0
    return output, new_state


def error(x, right):
    return float(np.linalg.norm(x.double().numpy() - right) / np.linalg.norm(right))


@pytest.mark.parametrize("warps", [0, 1, 2, 4, 8])
def test_one_chunk(library, warps):
    given = inputs([64], 1, 1)
    output, new_state = prefill(library, warps, given)
    right_output, right_state = oracle.gdn_prefill(*given, 0.1)
    assert error(output, right_output) < 6e-3 and error(new_state, right_state) < 4e-3


@pytest.mark.parametrize("lengths", [[1], [15], [16], [17], [63], [65], [128], [129, 0, 3, 64, 70, 0]])
def test_lengths(library, lengths):
    given = inputs(lengths, 1, 2)
    right_output, right_state = oracle.gdn_prefill(*given, 0.1)
    for warps, mode in ((8, 1), (0, 2), (0, 1)):
        output, new_state = prefill(library, warps, given, mode=mode)
        assert error(output, right_output) < 6e-3 and error(new_state, right_state) < 4e-3
