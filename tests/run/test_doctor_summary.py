"""The one line of `gdn doctor` that says what can be done here."""

from __future__ import annotations

import pytest

from gdn_cli.run import doctor


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("", "ready for algos on the CPU and GPU"),
        ("matplotlib", "ready for algos on the CPU and GPU"),
        ("GPU nvcc", "ready for algos on the CPU; a GPU's need GPU, nvcc"),
        ("GPU ninja", "not ready: ninja"),
    ],
)
def test_what_is_missing_decides(missing, says):
    findings = [doctor.finding("missing", what, "-", "") for what in missing.split()]
    findings.append(doctor.finding("ok", "torch", "2.9", ""))
    assert doctor.summary(findings) == says
