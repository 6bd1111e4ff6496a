"""Lines that another build lends: only to code that is the same, one instruction for one."""

from __future__ import annotations

import pytest

from gdn_cli.profilers import Ask, Reply, Run, disassembly, ncu_lines, sass
from gdn_cli.profilers.ncu_report import Instruction, Line, Listing, hot_lines

SOURCE = "int a;\nfloat x = p[i];\n\nif (x > 0)   y = x;\n"
ASK = Ask("ncu", {"spec": {"language": "cuda"}, "sources": [{"path": "k.cu", "content": SOURCE}]}, "cuda")
# as nvdisasm prints them, with the innermost frame in front
BUILT = [
    ("LDG.E R4, desc[UR4][R2.64]", (("/build/k.cu", 2),)),
    ("FSETP.GT.AND P0, PT, R4.reuse, RZ, PT", (("/usr/include/math.h", 9), ("/build/k.cu", 4))),
    ("@P0 BRA `(.L_x_1)", (("/build/k.cu", 4),)),
    ("EXIT", ()),
]
RAN = ["LDG.E R4, desc[UR4][R2.64]", "FSETP.GT.AND P0, PT, R4, RZ, PT", "@P0 BRA 0x7f6741781e50", "EXIT", "BRA 0x7f67"]


@pytest.fixture
def lend(monkeypatch, tmp_path):
    """lend(instructions of the listing) -> address -> line."""
    built = [disassembly.Instruction(16 * i, text, frames) for i, (text, frames) in enumerate(BUILT)]
    monkeypatch.setattr(sass, "code", lambda binary, arch, folder: [disassembly.Kernel("k", tuple(built), {})])

    def lend(texts):
        ran = tuple(Instruction(16 * i, 4096 + 16 * i, text, 10 - i) for i, text in enumerate(texts))
        run = Run(ncu_lines.NAME, params={ncu_lines.NAME: {"arch": "sm_90"}})
        reply = Reply(run, "done", answer={"binary": "k.so"})
        listing = Listing("k()", ran)
        return listing, ncu_lines.lines(ASK, tmp_path, reply, [listing])

    return lend


def test_equal_code_gets_the_lines_of_the_sources(lend):
    listing, lines = lend(RAN)
    assert lines == {
        4096: Line("k.cu", 2, "float x = p[i];"),
        4112: Line("k.cu", 4, "if (x > 0) y = x;"),  # inlined from a header: the line that called it
        4128: Line("k.cu", 4, "if (x > 0) y = x;"),
    }
    # samples 10, 9, 8, 7, 6: line 4 has 17 of 40
    assert [(hot.where, hot.samples, hot.share) for hot in hot_lines(listing, lines)] == [
        ("k.cu:4", 17, 42.5), ("k.cu:2", 10, 25.0)
    ]  # fmt: skip


@pytest.mark.parametrize("at, text", [(0, "LDG.E.64 R4, desc[UR4][R2.64]"), (2, "@!P0 BRA 0x7f6741781e50")])
def test_other_code_gets_none(lend, at, text):
    assert lend([*RAN[:at], text, *RAN[at + 1 :]])[1] == {}


def test_a_build_that_failed_costs_nothing(tmp_path):
    failed = Reply(Run(ncu_lines.NAME, params={ncu_lines.NAME: {"arch": "sm_90"}}), "done", answer={"failed": {}})
    assert ncu_lines.lines(ASK, tmp_path, failed, []) == {} == ncu_lines.lines(ASK, tmp_path, None, [])
