"""The tables of README files against the records and the formulas that they are made from."""

from __future__ import annotations

import shutil

import helpers
import pytest

from gdn_cli.timing import floor

pytestmark = pytest.mark.records
ROOT = helpers.TESTS.parent
REGISTRY = helpers.REGISTRY


def test_our_readme_is_what_its_records_say(gdn, tmp_path):
    """The figures may differ by a version of matplotlib; the text may not."""
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- gdn report results/") >= 4
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    assert gdn("report", "--update", tmp_path / "README.md").code == 0
    assert (tmp_path / "README.md").read_text() == text, "run `gdn report --update README.md`"


def test_the_bytes_that_decode_bf16_moves():
    text = (helpers.OURS / "gdn_decode_bf16" / "README.md").read_text()
    for batch_size in (1, 8, 64, 256):
        ops = (REGISTRY.ops[name] for name in ("gdn_decode_bf16", "gdn_decode"))
        narrow, wide = (round(floor.bytes_moved(op, {"batch_size": batch_size}) / 1024, 1) for op in ops)
        assert f"| {batch_size} | {narrow} | {wide} |" in text
