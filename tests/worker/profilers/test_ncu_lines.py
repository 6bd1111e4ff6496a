"""Lines that another build lends: only to code that is the same, one instruction for one."""

from __future__ import annotations

import pytest

from gdn_cli.worker.profilers import Ask, Reply, Run, disassembly, ncu_lines, sass
from gdn_cli.worker.profilers.ncu_reader import Instruction, Launch, Line, hot_lines

SOURCE = "int a;\nfloat x = p[i];\n\nif (x > 0)   y = x;\n"
ASK = Ask(
    {"spec": {"language": "cuda"}, "sources": [{"path": "k.cu", "content": SOURCE}]}
)
# as nvdisasm prints them, with the innermost frame in front
BUILT = [
    ("LDG.E R4, desc[UR4][R2.64]", (("/build/k.cu", 2),)),
    (
        "FSETP.GT.AND P0, PT, R4.reuse, RZ, PT",
        (("/usr/include/math.h", 9), ("/build/k.cu", 4)),
    ),
    ("@P0 BRA `(.L_x_1)", (("/build/k.cu", 4),)),
    ("EXIT", ()),
]
RAN = [
    "LDG.E R4, desc[UR4][R2.64]",
    "FSETP.GT.AND P0, PT, R4, RZ, PT",
    "@P0 BRA `(.L_x_0) 0x7f6741781e50",
    "EXIT",
    "BRA 0x7f67",
]


@pytest.fixture
def lend(monkeypatch, tmp_path):
    """lend(instructions that ran) -> the launch with lines."""
    built = [
        disassembly.Instruction(16 * i, text, frames)
        for i, (text, frames) in enumerate(BUILT)
    ]
    monkeypatch.setattr(
        sass,
        "code",
        lambda binary, arch, folder: [disassembly.Kernel("k", tuple(built), {})],
    )

    def lend(texts):
        ran = tuple(
            Instruction(16 * i, text, {"wait": 10 - i}) for i, text in enumerate(texts)
        )
        run = Run(ncu_lines.NAME, params={"arch": "sm_90"})
        reply = Reply(run, "done", answer={"binary": "k.so"})
        (launch,) = ncu_lines.lent(ASK, tmp_path, reply, [Launch("k()", {}, ran)])
        assert [(i.offset, i.text, i.reasons) for i in launch.code] == [
            (i.offset, i.text, i.reasons) for i in ran
        ]
        return launch

    return lend


def test_equal_code_gets_the_lines_of_the_sources(lend):
    launch = lend(RAN)
    assert [i.line for i in launch.code] == [
        Line("k.cu", 2, "float x = p[i];"),
        # inlined from a header: the line that called it
        Line("k.cu", 4, "if (x > 0) y = x;"),
        Line("k.cu", 4, "if (x > 0) y = x;"),
        None,
        None,
    ]
    # samples 10, 9, 8, 7, 6: line 4 has 17 of 40
    assert [(hot.where, hot.samples, hot.share) for hot in hot_lines(launch)] == [
        ("k.cu:4", 17, 42.5), ("k.cu:2", 10, 25.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "at, text",
    [(0, "LDG.E.64 R4, desc[UR4][R2.64]"), (2, "@!P0 BRA `(.L_x_0) 0x7f6741781e50")],
)
def test_other_code_gets_none(lend, at, text):
    assert {i.line for i in lend([*RAN[:at], text, *RAN[at + 1 :]]).code} == {None}


def test_a_build_that_failed_costs_nothing(tmp_path):
    failed = Reply(
        Run(ncu_lines.NAME, params={"arch": "sm_90"}), "done", answer={"failed": {}}
    )
    launches = [Launch("k()", {})]
    assert (
        ncu_lines.lent(ASK, tmp_path, failed, launches)
        is launches
        is ncu_lines.lent(ASK, tmp_path, None, launches)
    )
