"""Verify's kernel for outputs alone in CTAs that stay, on a CPU: each has a run of tiles of
one head or of several, against a step in float64.
"""

import ctypes
import math
import shutil
import signal
import subprocess
import sys

import helpers
import pytest
import torch
from emulator import emulation
from emulator.test_mtp import ARGUMENTS, DTYPES, FAR, OUTPUTS, Problem, check

# rows, warps of a row, groups of rows: 16, 1, 2 and 8 tiles of a head
CUTS = [(8, 1, 1), (16, 1, 8), (16, 2, 4), (8, 4, 2)]
EVERY_CUT = pytest.mark.parametrize("cut", range(len(CUTS)), ids=map(str, CUTS))
# of all tiles: a run for each CTA that ends in a head's middle, a head or more, all
CTAS = pytest.mark.parametrize("ctas", [1, 3, 7, 1000])
DRIVER = (
    f"""
#include "mtp_persistent.cuh"
{ARGUMENTS}"""
    + """
template <typename Token, typename T, int TOKENS, int ROWS, int SPLIT, int GROUPS>
int launch(const gdn::MtpArguments& p, uint32_t heads, uint32_t ctas) {
  using S = gdn::Shape<T, TOKENS, false, ROWS, SPLIT, GROUPS>;
  using Memory = gdn::PersistentMemory<T, TOKENS, ROWS, SPLIT, GROUPS>;
  const gdn::PersistentArguments run = gdn::runs_of(p, heads * S::TILES, ctas);
  emulated::launch({gdn::ctas_of(run, heads * S::TILES), 1, 1}, S::THREADS, sizeof(Memory), 1,
                   [&] { gdn::gdn_mtp_persistent<false, T, Token, TOKENS, ROWS, SPLIT, GROUPS, 1>(run); });
  return 0;
}
template <typename Token, typename T>
int run(int cut, const Call& c, uint32_t ctas) {
  gdn::MtpArguments p{};
  fill(p, c);
  int i = 0;
#define CUT(r, s, g)                                                                                  \\
  if (i++ == cut) {                                                                                   \\
    if (c.tokens <= 4) return launch<Token, T, 4, r, s, g>(p, c.B * c.HV, ctas);                      \\
    return launch<Token, T, 8, 16, s == 1 ? 2 : s, r * g >= 32 ? 2 : 1>(p, c.B * c.HV, ctas);         \\
  }
  @CUTS@
  return 1;
}
extern "C" int verify_run(int dtype, int cut, const Call* c, int ctas) {
  using bf = __nv_bfloat16;
  if (c->half_tokens) return run<__half, float>(cut, *c, ctas);
  return dtype == 0 ? run<bf, float>(cut, *c, ctas) : run<bf, bf>(cut, *c, ctas);
}
"""
)
KERNEL = emulation.CUDA / "gdn" / "mtp_persistent.cuh"


def library_in(folder, kernel=KERNEL, **how):
    for file in ("decode.cuh", "mtp.cuh"):
        shutil.copy(emulation.CUDA / "gdn" / file, folder)
    return emulation.library(folder, DRIVER, kernel, **how)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return library_in(tmp_path_factory.mktemp("persistent"), cuts=CUTS)


class Run(Problem):
    """A call's tensors. `ctas`: how many CTAs the GPU has room for."""

    ctas = 3

    def call(self, library, cut, mode, **how):
        given = ctypes.byref(self.arguments(mode, **how))
        dtype = DTYPES.index(self.pool.dtype)
        assert library.verify_run(dtype, cut, given, self.ctas) == 0


@CTAS
@EVERY_CUT
@pytest.mark.parametrize("T", [1, 4, 7])
def test_outputs_of_runs(library, cut, ctas, T):
    for dtype in DTYPES[:2]:
        problem = Run(1, 2, 3, T, dtype)
        problem.ctas = ctas
        check(library, problem, cut, OUTPUTS)


@CTAS
def test_sequences_of_different_lengths(library, ctas):
    for lengths in ([3, 1, 4, 2], [1, 8, 0, 5]):
        problem = Run(1, 2, len(lengths), max(lengths), lengths=lengths)
        problem.ctas = ctas
        check(library, problem, 1, OUTPUTS)


@CTAS
@EVERY_CUT
def test_padding_between_rows_is_zeros(library, cut, ctas):
    problem = Run(1, 2, 8, 3)
    problem.ctas = ctas
    counts = [0, 1, 4, 3, -1, 2, 1, 2**31 - 1]
    problem.accepted = torch.tensor(counts, dtype=torch.int32)
    problem.slots[1, 0], problem.slots[6, 0] = len(problem.pool), -1
    check(library, problem, cut, OUTPUTS)


def test_rows_with_gaps_and_one_slot_for_each(library):
    for wide in (False, True):
        problem = Run(2, 4, 3, 4, gap=1)
        column = problem.slots[:, 1]
        problem.slots = column.contiguous().long() if wide else column
        problem.accepted = None
        check(library, problem, 0, OUTPUTS)


def test_numbers_of_64_bits_are_none_by_their_low_words(library):
    problem = Run(1, 1, 2 * len(FAR) + 1, 2)
    problem.slots = problem.slots.long()
    problem.accepted = torch.ones(problem.B, dtype=torch.int64)
    for i, far in enumerate(FAR):
        problem.slots[i, i % 2] = far
        problem.accepted[len(FAR) + i] = 2**32 + 1 if i % 2 else -(2**32) + 1
    check(library, problem, 0, OUTPUTS)


def test_tokens_of_float16(library):
    check(library, Run(1, 2, 3, 4, tokens=torch.float16), 2, OUTPUTS)


def test_a_nan_in_another_row_or_a_later_token_stays_there(library):
    problem, clean = Run(1, 1, 3, 4), Run(1, 1, 3, 4)
    problem.k[6] = math.nan  # the third of the second row
    for each in (problem, clean):
        each.ctas = 1
        each.call(library, 1, OUTPUTS)
    there = [i for i in range(12) if i not in (6, 7)]
    assert torch.equal(problem.output[there], clean.output[there])
    assert problem.output[6].isnan().all()


@EVERY_CUT
@pytest.mark.parametrize("mode", [1, 2, 4, 6])  # emulated::Mode
def test_the_same_bits_in_every_order_of_warps(library, mode, cut):
    expected, problem = Run(1, 2, 3, 4), Run(1, 2, 3, 4)
    expected.call(library, cut, OUTPUTS)
    order = ctypes.c_int.in_dll(library, "_ZN8emulated4modeE")
    order.value = mode
    try:
        problem.call(library, cut, OUTPUTS)
    finally:
        order.value = 0
    assert torch.equal(problem.output, expected.output)


def races_of(library, folder):
    problem = Run(1, 1, 5, 2)
    problem.ctas = 1
    problem.call(library, 0, OUTPUTS)
    return emulation.races_in(library, folder)


def test_no_race_in_a_run_of_several_heads(tmp_path):
    library = library_in(tmp_path, cuts=[(16, 2, 2)], races=True)
    assert races_of(library, tmp_path) == set()


# taken out of the kernel: a race, or the emulator ends the process
WAITS = [
    "barrier(memory.vectors[at]).wait(phase)",
    "barrier(memory.coefficients[at]).wait(phase)",
    "barrier(memory.unused[at]).wait(i / HEADS_AHEAD - 1)",
    "named_barrier_sync<SPLIT * 32>(1 + group)",
]
CALL = """
import ctypes, pathlib, sys
sys.path[:0] = [{tests!r}]
from emulator.test_mtp_persistent import races_of
sys.exit(bool(races_of(ctypes.CDLL({library!r}), pathlib.Path({folder!r}))))
"""


@pytest.mark.slow  # each compiles the kernel with the detector
@pytest.mark.parametrize("wait", WAITS)
def test_who_does_not_wait_is_found(tmp_path_factory, tmp_path, wait):
    broken = tmp_path_factory.mktemp("broken") / KERNEL.name
    whole = KERNEL.read_text()
    assert whole.count(wait) == 1
    broken.write_text(whole.replace(wait, "(void)0"))
    library = library_in(tmp_path, broken, cuts=[(16, 2, 2)], races=True)
    where = dict(library=library._name, folder=str(tmp_path))
    code = CALL.format(tests=str(helpers.TESTS), **where)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode in (1, -signal.SIGABRT), ended.stderr
