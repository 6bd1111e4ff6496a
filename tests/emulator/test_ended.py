"""A CTA of a cluster that ends while another one still accesses its shared memory: the
emulator ends the process.
"""

import subprocess
import sys

import pytest
from emulator import emulation

STEPS = """
#include "cluster.cuh"
#include "wgmma_tokens.cuh"
using namespace gdn;
constexpr uint32_t BARRIER = 1024, DATA = 2048, END = 3072;
// Of two CTAs of 32 threads, number `from` arrives at the other's barrier, or sends it `bytes`.
template <typename Step>
void run(int from, uint32_t bytes, const Step& step, bool waits, bool together) {
  emulated::launch({2, 1, 1}, 32, END, 2, [&] {
    if (threadIdx.x == 0) {
      mbarrier_init(BARRIER, 1);
      if (bytes && cluster_rank() != from) mbarrier_arrive_expect_tx(BARRIER, bytes);
    }
    cluster_sync();
    if (cluster_rank() == from && threadIdx.x == 0) step(from ^ 1);
    if (cluster_rank() != from && waits) mbarrier_wait(BARRIER, 0);
    if (together) cluster_sync();
  });
}
void arrive(int peer) { mbarrier_arrive_at_peer(at_peer(BARRIER, peer)); }
void store(int peer) { store_at_peer(at_peer(DATA, peer), 1, at_peer(BARRIER, peer)); }
void copy(int peer) { copy_to_peer(at_peer(DATA, peer), DATA, 16, at_peer(BARRIER, peer)); }
void (*const steps[])(int) = {arrive, store, copy};
constexpr uint32_t BYTES[] = {0, 4, 16};
extern "C" void send(int which, int from, int waits, int together, int mode) {
  emulated::mode = mode;
  run(from, BYTES[which], steps[which], waits, together);
}
extern "C" void write(int releases, int mode) {
  emulated::mode = mode;
  emulated::launch({2, 1, 1}, 32, END, 2, [&] {
    cluster_sync();
    if (cluster_rank() == 0) *flashcore::peer(emulated::me->cta->base + DATA - BARRIER, 1) = 1;
    if (releases) flashcore::cluster_arrive();
    else flashcore::cluster_arrive_only();
    flashcore::cluster_wait();
  });
}
"""
UNDER_WAY = "emulated: a CTA that ends while accesses to it are under way"
ARRIVAL, STORE, COPY = range(3)
MODES = [0, 2, 4, 6]  # not those in which all lands at once


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended")
    (folder / "driver.cpp").write_text(STEPS)
    (folder / "descriptors.cuh").write_text("")  # of products, of which there are none
    return emulation.compiled(folder)._name


def said(library, call):
    """The last words of a process that makes this call; "" if it ends well."""
    code = f"import ctypes; ctypes.CDLL({library!r}).{call}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return ended.stderr.strip()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("what", [ARRIVAL, STORE, COPY])
def test_what_is_waited_for_has_arrived(steps, what, sender, mode):
    assert said(steps, f"send({what}, {sender}, 1, 1, {mode})") == ""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("what", [ARRIVAL, STORE, COPY])
def test_a_relaxed_barrier_of_the_cluster_waits_for_nothing(steps, what, sender, mode):
    assert said(steps, f"send({what}, {sender}, 0, 1, {mode})") == UNDER_WAY


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("releases", "last"), [(1, ""), (0, UNDER_WAY)])
def test_stores_through_a_pointer_are_released(steps, releases, last, mode):
    assert said(steps, f"write({releases}, {mode})") == last


@pytest.mark.parametrize(("sender", "mode"), [(1, 0), (0, 2)])  # the sender runs first
def test_a_copy_whose_sender_has_ended(steps, sender, mode):
    last = said(steps, f"send({COPY}, {sender}, 1, 0, {mode})")
    assert last == "emulated: a copy from a CTA that has ended"
