"""Which row of a tuned.h a kernel takes (ffi/tuned_row.cuh), on a CPU."""

import ctypes

import pytest
from emulator import emulation

DRIVER = """
#include <cstdint>
#include <cstdlib>
#include <limits>
struct Row { int sms; int64_t length_up_to, up_to; };
constexpr int64_t ENDLESS = std::numeric_limits<int64_t>::max();
constexpr Row TUNED[] = {{132, 100, 48}, {132, 100, ENDLESS}, {132, ENDLESS, 66}, {132, ENDLESS, ENDLESS},
                         {20, ENDLESS, ENDLESS}};
constexpr Row UNTUNED[] = {{0, ENDLESS, 48}, {0, ENDLESS, ENDLESS}};
namespace gdn {
@ROWS@
extern "C" int of_size(int sms, int64_t size) { return gdn::chosen(TUNED, sms, size); }
extern "C" int of_length(int sms, int64_t length, int64_t size) { return gdn::chosen(TUNED, sms, length, size); }
extern "C" int untuned(int sms, int64_t size) { return gdn::chosen(UNTUNED, sms, size); }
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    source = (emulation.CUDA / "ffi" / "tuned_row.cuh").read_text()
    folder = tmp_path_factory.mktemp("rows")
    (folder / "driver.cpp").write_text(
        DRIVER.replace("@ROWS@", source[source.index("// The row of a table") :])
    )
    return emulation.compiled(folder)


def test_the_row_for_as_much_work_per_sm(rows):
    def chosen(function, sms, *sizes):
        return function(sms, *map(ctypes.c_int64, sizes))

    for sms, size, row in (
        (132, 48, 0),
        (132, 49, 1),
        (148, 53, 0),
        (148, 54, 1),
        (148, 2**31, 1),
        (78, 28, 0),
        (78, 29, 1),
    ):
        # 48 / 132 = 53.8 / 148 = 28.4 / 78
        assert chosen(rows.of_size, sms, size) == row, (sms, size)
    for sms, length, size, row in (
        (148, 100, 53, 0),
        (148, 101, 74, 2),
        (148, 101, 75, 3),
        (30, 7, 9999, 4),
    ):
        assert chosen(rows.of_length, sms, length, size) == row, (sms, length, size)
    for sms, size, row in ((148, 48, 0), (148, 49, 1)):
        assert chosen(rows.untuned, sms, size) == row, (sms, size)
