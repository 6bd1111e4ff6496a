"""The emulator's detector of races (races.cpp): on barriers that are there or are not,
and on prefill's kernels.

compute-sanitizer's racecheck reports the intra-chunk kernel where a CTA has several
chunks, one of them short: accesses on both sides of a barrier that all threads reach
(docs/profiling.md). Here they are checked by other means.
"""

import pytest
from emulator import emulation
from rungs import test_prefill_chunk as chunk
from rungs import test_prefill_pool as pool

WRITES, READS = "words[i] = i;", "const uint32_t other = words[from];"
STEPS = """
#include "mma_bf16.cuh"
using namespace flashcore;
// Thread i of 128 writes word i, does `step` and reads another's: of the lane beside it, or of another warp.
template <typename Step>
void run(bool near, const Step& step) {
  emulated::launch({1, 1, 1}, 128, 2048, 1, [&] {
    uint32_t* const words = reinterpret_cast<uint32_t*>(emulated::me->cta->base + 1024);
    const uint32_t i = threadIdx.x, from = near ? i ^ 1 : 127 - i;
    if (i == 0) mbarrier_init(1024, 128);
    __syncthreads();
    WRITES
    step();
    READS
    if (other == 128) emulated::fail("a word that nobody wrote");
  });
}
const std::function<void()> steps[] = {
  [] {},
  [] { __syncthreads(); },
  [] { gdn::named_barrier_sync<128>(1); },
  [] { gdn::named_barrier_sync<64>(1 + threadIdx.x / 64); },  // not of those that read each other's
  [] { mbarrier_arrive(1024), mbarrier_wait(1024, 0); },
  [] { mbarrier_arrive(1024); if (threadIdx.x < 64) mbarrier_wait(1024, 0); },
  [] { __syncwarp(); },
  [] { __shfl_xor_sync(~0u, 1.f, 1); },  // orders no memory
};
extern "C" void try_step(int which, int near, int mode) { emulated::mode = mode, run(near, steps[which]); }
"""
(
    NOTHING,
    SYNCTHREADS,
    NAMED,
    NAMED_HALVES,
    MBARRIER,
    MBARRIER_HALF,
    SYNCWARP,
    SHUFFLE,
) = range(8)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    (folder / "driver.cpp").write_text(
        STEPS.replace("WRITES", WRITES).replace("READS", READS)
    )
    return folder, emulation.compiled(folder, races=True)


@pytest.mark.parametrize("mode", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("step", "near", "ordered"),
    [
        (NOTHING, False, False),
        (SYNCTHREADS, False, True),
        (NAMED, False, True),
        (NAMED_HALVES, False, False),
        (MBARRIER, False, True),
        (MBARRIER_HALF, False, False),
        (NOTHING, True, False),
        (SYNCWARP, True, True),
        (SYNCWARP, False, False),
        (SHUFFLE, True, False),
    ],
)
def test_what_orders_two_accesses(steps, step, near, ordered, mode):
    folder, library = steps
    library.try_step(step, near, mode)
    found = emulation.races_in(library, folder)
    assert {frozenset(pair) for pair in found} == (
        set() if ordered else {frozenset((WRITES, READS))}
    )


# Races that change no result. Rows of K past a sequence's end are cleared by both
# consumer warpgroups, while the maker of M may read them: those columns of M are
# masked. And all lanes of a warp write the same number.
CLEARED = "if (i / 8 >= count) reinterpret_cast<uint4*>(tile)[i] = {0, 0, 0, 0};"
PRODUCT = "emulated::races::access(numbers, 16, false);"
HARMLESS = {
    frozenset((CLEARED,)),
    frozenset((CLEARED, PRODUCT)),
    frozenset(("s.current[0][thread_again() / 32] = tile.what;",)),
    frozenset(("if constexpr (POOL) s.current[1][thread_again() / 32] = tile.state;",)),
}


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    return folder, pool.chunked_of(folder, races=True)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    return folder, pool.recurrent_of(folder, races=True)


# Where two warps share 16 rows, the upper half of a warp's lanes loads its partner's
# outputs, and stores nothing.
UNUSED = frozenset((
    "uint4 o = *reinterpret_cast<const uint4*>(tile + L::V_AT + token * L::V_ROW + (warp * ROWS + half * 8) * 2);",
    "*reinterpret_cast<Token*>(tile + v_at + token * L::V_ROW + of_warp * 2) = to_token<Token>(y[n][i]);",
))  # fmt: skip


@pytest.mark.parametrize("how", [0, 1, 2])
@pytest.mark.slow
def test_prefill_of_short_sequences(recurrent, how):
    folder, library = recurrent
    args = pool.slow([20, 0, 33, 1], [3, 1, 2, 4], 5, 1, 2)
    assert pool.faults((library, how), args, mode=4) == []
    assert {frozenset(pair) for pair in emulation.races_in(library, folder)} <= (
        {UNUSED} if how == 0 else set()
    )


@pytest.mark.slow  # with the detector all of prefill compiles for half a minute
@pytest.mark.parametrize("mode", [0, 4])
@pytest.mark.parametrize(
    ("how", "ctas"),
    [
        *((how, ctas) for how in (pool.ONE, pool.TWO, -3) for ctas in (1 << 30, 3)),
        *(
            (how, 1 << 30)
            for how in (pool.SPLIT, pool.SYNC, pool.QUARTER, pool.HALF, chunk.TMA - 3)
        ),
    ],
)
def test_prefill_from_a_pool(chunked, how, ctas, mode):
    """Full chunks and short ones, one and several for a CTA of the intra-chunk kernel
    (`ctas`), also sorted.
    """
    folder, library = chunked
    library.fit(ctas)
    args = pool.slow([150, 24, 70], [3, 1, 2], 4, 1, 2)
    assert pool.faults((library, how), args, mode=mode) == []
    assert {frozenset(pair) for pair in emulation.races_in(library, folder)} <= HARMLESS
