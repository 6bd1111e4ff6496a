"""The kernel of gates alone on a CPU, against float64."""

import ctypes

import pytest
import serving_steps as steps
import torch
from emulator import emulation

DRIVER = """
#include "gates_kernel.cuh"
struct Call {
  void *a, *b, *A_log, *dt_bias, *log_g, *beta;
  int64_t a_row, b_row;
  int32_t rows, HV, type, half_bias;
};
extern "C" void run(const Call* c) {
  gdn::GateArguments p{};
  p.a = c->a, p.b = c->b, p.A_log = (float*)c->A_log, p.dt_bias = c->dt_bias;
  p.log_g = (float*)c->log_g, p.beta = (float*)c->beta, p.a_row = c->a_row, p.b_row = c->b_row;
  p.HV = c->HV, p.elements = c->rows * c->HV, p.by_HV = gdn::Divisor(c->HV);
  p.wide = c->type == 0, p.half_bias = c->half_bias;
  emulated::launch((p.elements + 31) / 32, 32, [&] {
    if (c->type == 2) gdn::gdn_gates<__half>(p);
    else gdn::gdn_gates<__nv_bfloat16>(p);
  });
}
"""
Call = emulation.structure(DRIVER, "Call")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    kernel = emulation.CUDA / "gdn" / "gates_kernel.cuh"
    return emulation.library(
        tmp_path_factory.mktemp("gates"), DRIVER, kernel, flags=("-O0",)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide_bias", [False, True])
@pytest.mark.parametrize(("rows", "HV"), [(1, 1), (7, 6), (16, 4)])
def test_gates(library, dtype, wide_bias, rows, HV):
    """a and b are views of one projection; softplus and sigmoid at both ends."""
    draw = torch.Generator().manual_seed(rows)
    projected = torch.randn(rows, 2 * HV + 3, generator=draw)
    projected[0, 0], projected[-1, HV], projected[-1, HV - 1] = -90.0, -60.0, 90.0
    a, b, _ = projected.to(dtype).split([HV, HV, 3], dim=1)
    A_log, bias = (torch.randn(HV, generator=draw) for _ in range(2))
    bias = bias if wide_bias else bias.to(dtype)
    log_g, beta = torch.full((2, rows + 1, HV), torch.nan)
    call = Call(
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=bias,
        log_g=log_g,
        beta=beta,
        a_row=a.stride(0),
        b_row=b.stride(0),
        rows=rows,
        HV=HV,
        type=DTYPES.index(dtype),
        half_bias=bias.dtype != torch.float32,
    )
    library.run(ctypes.byref(call))
    right = steps.gates(a, b, A_log, bias)
    for found, expected in zip((log_g, beta), right, strict=True):
        close = {"rtol": 5e-6, "atol": 1e-12}
        torch.testing.assert_close(found[:rows].double(), expected, **close)
        assert found[rows].isnan().all()
