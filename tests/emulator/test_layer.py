"""The CUDA kernel of gdn_layer_post_conv on a CPU: heads that are one CTA, and heads that are
clusters of 2 to 8, which add their sums of squares, against a step in float64.
"""

import ctypes
import math
import shutil
import subprocess
import sys

import helpers
import pytest
import serving_steps as steps
import torch
from emulator import emulation
from emulator.test_mtp import (
    ARGUMENTS,
    DTYPES,
    LAST,
    SLOTS,
    Problem,
    check,
    check_order,
)

# rows, warps of a row, groups of rows: 8, 8, 4, 2, 1 and 1 CTAs of a head
CUTS = [(16, 4, 1), (16, 2, 1), (8, 2, 4), (16, 2, 4), (16, 1, 8), (16, 2, 8)]
EVERY_CUT = pytest.mark.parametrize("cut", range(len(CUTS)), ids=map(str, CUTS))
CLUSTERS = pytest.mark.parametrize("cut", [0, 2, 3], ids=str)
DRIVER = (
    f"""
#include "layer_post_conv.cuh"
{ARGUMENTS}"""
    + """
struct Norm {
  void *z, *norm_weight;
  int64_t batch, token;
  float epsilon;
  int32_t weight_bf16, sigmoid, late;
};
template <typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS>
int launch(const gdn::LayerArguments& p, uint32_t heads) {
  using S = gdn::Shape<T, TOKENS, true, ROWS, SPLIT, GROUPS>;
  using Memory = gdn::LayerMemory<T, TOKENS, ROWS, SPLIT, GROUPS>;
  emulated::launch({heads * S::TILES, 1, 1}, S::THREADS, sizeof(Memory), S::TILES,
                   [&] { gdn::gdn_layer_post_conv<T, TOKENS, ROWS, SPLIT, GROUPS, 0, 0, 1>(p); });
  return 0;
}
template <typename T>
int run(int cut, const Call& c, const Norm& n) {
  gdn::LayerArguments p{};
  fill(p, c);
  p.z = (__nv_bfloat16*)n.z, p.norm_weight = n.norm_weight, p.z_batch = n.batch, p.z_token = n.token;
  p.norm_epsilon = n.epsilon, p.weight_bf16 = n.weight_bf16, p.sigmoid = n.sigmoid;
  int i = 0;
#define CUT(r, s, g)                                                                  \\
  if (i++ == cut) {                                                                   \\
    if (c.tokens <= 4) return launch<T, 4, r, s, g>(p, c.B * c.HV);                   \\
    return launch<T, 8, 16, s == 1 ? 2 : s, r == 8 ? g / 2 : g>(p, c.B * c.HV);       \\
  }
  @CUTS@
  return 1;
}
extern "C" int layer(int dtype, int cut, const Call* c, const Norm* n) {
  return dtype == 0 ? run<float>(cut, *c, *n) : run<__nv_bfloat16>(cut, *c, *n);
}
"""
)
Norm = emulation.structure(DRIVER, "Norm")


def folder_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    for file in ("decode.cuh", "mtp.cuh"):
        shutil.copy(emulation.CUDA / "gdn" / file, folder)
    return folder


KERNEL = emulation.CUDA / "gdn" / "layer_post_conv.cuh"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = folder_of(tmp_path_factory)
    return emulation.library(folder, DRIVER, KERNEL, cuts=CUTS, flags=("-O0",))


class Layer(Problem):
    """test_mtp's call with z and a weight."""

    limit = {torch.bfloat16: 4e-3}  # two roundings
    sigmoid = False
    epsilon = 1e-6

    def __init__(self, *args, gap=0, **more):
        super().__init__(*args, gap=gap, **more)
        draw = torch.Generator().manual_seed(self.B + self.T)
        many = len(self.v)
        z = torch.full((many, self.HV * 128 + 3 * gap), math.nan)
        z[:, : self.HV * 128] = torch.randn(many, self.HV * 128, generator=draw)
        self.z = z.bfloat16()[:, : self.HV * 128].unflatten(1, (self.HV, 128))
        self.weight = torch.randn(128, generator=draw)

    def call(self, library, cut, mode, **how):
        token = self.z.stride(0)
        norm = Norm(
            z=self.z,
            norm_weight=self.weight,
            batch=0 if self.one_row else self.T * token,
            token=token,
            epsilon=self.epsilon,
            weight_bf16=self.weight.dtype == torch.bfloat16,
            sigmoid=self.sigmoid,
        )
        given = ctypes.byref(self.arguments(mode, **how)), ctypes.byref(norm)
        assert library.layer(DTYPES.index(self.pool.dtype), cut, *given) == 0

    def right(self, mode, **how):
        output, pool, states = super().right(mode, **how)
        gate = self.z, self.weight, self.sigmoid, self.epsilon
        return steps.gated_norm(output, *gate), pool, states


@EVERY_CUT
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("T", [1, 4, 8])
def test_outputs_are_normalised_and_gated(library, cut, T, dtype):
    check(library, Layer(1, 2, 2, T, dtype), cut, SLOTS)


@EVERY_CUT
def test_a_sigmoid_a_weight_in_bfloat16_and_a_large_epsilon(library, cut):
    problem = Layer(1, 3, 2, 3)
    problem.sigmoid, problem.weight = True, problem.weight.bfloat16()
    problem.epsilon = 0.01  # the mean square of the outputs is about as large
    check(library, problem, cut, SLOTS)


@EVERY_CUT
def test_rows_without_a_slot_are_zeros_and_touch_no_state(library, cut):
    problem = Layer(1, 2, 7, 3)
    counts = [1, 0, 3, 4, 2, 1, 1]
    problem.accepted = torch.tensor(counts, dtype=torch.int32)
    problem.slots[0, 0], problem.slots[2, 1], problem.slots[4, 2] = 0, 0, -1
    problem.slots[5, 0], problem.slots[6, 1] = len(problem.pool), -1
    problem.z[[0, 1]] = math.inf  # 0 times inf is none of the output's business there
    problem.z = problem.z.nan_to_num(posinf=3e38)
    check(library, problem, cut, SLOTS)


@EVERY_CUT
@pytest.mark.parametrize("lengths", [[3, 1, 4, 2], [1, 8, 0, 5]], ids=str)
def test_sequences_of_different_lengths(library, lengths, cut):
    T = max(lengths)
    check(library, Layer(1, 2, len(lengths), T, lengths=lengths), cut, SLOTS)


@CLUSTERS
def test_tokens_that_lie_apart_are_the_same_bits(library, cut):
    dense, strided = Layer(2, 4, 2, 3), Layer(2, 4, 2, 3, gap=1)
    for name in ("q", "k", "v", "a", "b", "z", "pool"):
        getattr(strided, name).copy_(getattr(dense, name))
    for name in ("A_log", "dt_bias", "weight"):
        setattr(strided, name, getattr(dense, name))
    for problem in (dense, strided):
        problem.call(library, cut, SLOTS)
    assert torch.equal(dense.output, strided.output)
    assert torch.equal(dense.pool[1:], strided.pool[1:])


def test_outputs_of_zeros_are_zeros(library):
    problem = Layer(1, 1, 2, 4)
    problem.q[:], problem.k[:] = 0, 0
    check(library, problem, 0, SLOTS)
    assert not problem.output.any()


def test_a_nan_in_a_later_token_does_not_reach_the_earlier_ones(library):
    problem, clean = Layer(1, 1, 1, 4), Layer(1, 1, 1, 4)
    problem.k[2] = math.nan
    for each in (problem, clean):
        each.call(library, 2, SLOTS)
    assert torch.equal(problem.output[:2], clean.output[:2])
    assert problem.output[2].isnan().all()


def test_one_slot_for_each_sequence(library):
    problem = Layer(1, 2, 3, 4)
    problem.slots, problem.accepted = problem.slots[:, 1], None
    check(library, problem, 0, LAST)


@EVERY_CUT
@pytest.mark.parametrize("mode", [1, 2, 3, 4, 6, 8])  # emulated::Mode
def test_the_same_bits_in_every_order_of_warps(library, mode, cut):
    check_order(library, mode, cut, Layer)


@pytest.mark.slow
def test_no_race_in_a_head_of_one_cta(tmp_path_factory):
    folder = folder_of(tmp_path_factory)
    library = emulation.library(
        folder, DRIVER, KERNEL, cuts=CUTS[5:], races=True, flags=("-O0",)
    )
    for T in (2, 8):
        Layer(1, 1, 1, T).call(library, 0, SLOTS)
        assert emulation.races_in(library, folder) == set()


# taken out of the kernel, and what the emulator then says
WITHOUT = {
    "mbarrier_wait(shared_address(&sums.arrived), 0)": "ends while accesses to it are",
    "flashcore::cluster_wait()": "a barrier that nobody has initialised",
}
CALL = """
import ctypes, sys
sys.path[:0] = [{tests!r}]
from emulator.test_layer import SLOTS, Layer
library = ctypes.CDLL({library!r})
# from the last warp on: that CTA's first one then sends before another CTA begins
ctypes.c_int.in_dll(library, "_ZN8emulated4modeE").value = 2
Layer(1, 1, 1, 4).call(library, 0, SLOTS)
"""


@pytest.mark.parametrize("what", WITHOUT)
@pytest.mark.slow
def test_who_does_not_wait_for_its_peers_is_found(tmp_path_factory, tmp_path, what):
    folder = folder_of(tmp_path_factory)
    broken = tmp_path / KERNEL.name
    whole = KERNEL.read_text()
    assert whole.count(what) == 1
    broken.write_text(whole.replace(what, ""))
    library = emulation.library(
        folder, DRIVER, broken, cuts=[(16, 1, 4)], flags=("-O0",)
    )
    code = CALL.format(tests=str(helpers.TESTS), library=library._name)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert WITHOUT[what] in ended.stderr
