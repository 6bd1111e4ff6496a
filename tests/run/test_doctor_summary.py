"""The one line of `gdn doctor` that says what can be done here."""

from __future__ import annotations

import pytest

from gdn_cli.run import doctor

ALL = (
    "Python",
    "torch",
    "flashinfer-bench",
    "ninja",
    "C++ compiler",
    "records",
    "builds",
    "GPU",
    "nvcc",
    "triton",
)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ((), "ready for algos on the CPU and GPU"),
        (("matplotlib",), "ready for algos on the CPU and GPU"),
        (
            ("GPU", "nvcc"),
            "ready for algos on the CPU; a GPU's need GPU (none), nvcc (none)",
        ),
        (("GPU", "ninja"), "not ready: ninja (none)"),
    ],
)
def test_what_is_missing_decides(missing, says):
    findings = [
        {
            "state": "missing" if name in missing else "ok",
            "what": name,
            "found": "none",
            "for": "",
            "mend": None,
        }
        for name in (*ALL, "matplotlib")
    ]
    assert doctor.summary(findings) == says
