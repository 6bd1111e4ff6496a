"""`shares` in algo.toml: files of another algo, packed with this one as if they lay in
its folder.
"""

from __future__ import annotations

import helpers
import pytest

from gdn_cli.catalog import pack, registry

TWICE = "from .half import half\n\n\ndef run(*x):\n    return half(*x)\n"
HALF = "from .right import run as half\n"


def load(folder):
    return registry.load(str(folder))


@pytest.fixture
def folder(tmp_path):
    """`lender` has half.py, `borrower` imports it."""
    helpers.write_algo(
        tmp_path, "lender", {"main.py": "from .right import run\n", "half.py": HALF}
    )
    helpers.write_algo(
        tmp_path,
        "borrower",
        TWICE + "# from .right import\n",
        shares=["gdn_decode/lender/half.py"],
    )
    return tmp_path


def packed(known, name):
    op = known.ops["gdn_decode"]
    return {
        s["path"]: s["content"]
        for s in pack.pack(known.find(name, op.name), op)["sources"]
    }


def test_a_shared_file_is_packed_as_a_sibling(folder):
    files = packed(load(folder), "borrower")
    assert (
        list(files) == ["half.py", "main.py", "right.py"] and files["half.py"] == HALF
    )


def test_it_is_followed_when_it_changes(folder):
    before = pack.source_hash(
        pack.pack(load(folder).find("borrower", None), load(folder).ops["gdn_decode"])
    )
    (folder / "gdn_decode" / "lender" / "half.py").write_text(HALF + "\n# changed\n")
    after = pack.source_hash(
        pack.pack(load(folder).find("borrower", None), load(folder).ops["gdn_decode"])
    )
    assert before != after


def test_a_folder_of_ones_own_may_share_what_ships_with_gdn(tmp_path):
    helpers.write_algo(
        tmp_path, "mine", "from .right import run\n", shares=["_cuda/gdn/decode.cuh"]
    )
    text = (helpers.OURS / "_cuda" / "gdn" / "decode.cuh").read_text(encoding="utf-8")
    assert packed(load(tmp_path), "mine")["decode.cuh"] == text


@pytest.mark.slow
def test_it_runs(folder, gdn):
    done = gdn(
        "run", "--algo", "borrower", "--algos", folder, "-w", "batch_size=1", "--json"
    )
    assert done.code == 0 and {r["status"] for r in done.json["records"]} == {"passed"}


@pytest.mark.parametrize(
    "shares, expected",
    [
        (["gdn_decode/lender/gone.py"], "files of other algos"),
        (["lender/half.py"], "files of other algos"),
        (["gdn_decode/../half.py"], "files of other algos"),
        (
            ["gdn_decode/lender/main.py"],
            "files whose names are not taken in this folder",
        ),
        (
            ["gdn_decode/lender/half.py", "gdn_decode/lender/half.py"],
            "files whose names are not taken",
        ),
    ],
)
def test_invalid_shares_are_refused(tmp_path, shares, expected):
    helpers.write_algo(
        tmp_path, "lender", {"main.py": "from .right import run\n", "half.py": HALF}
    )
    helpers.write_algo(tmp_path, "borrower", TWICE, shares=shares)
    (broken,) = load(tmp_path).broken
    assert (
        broken.name == "borrower"
        and "$.shares" in str(broken.error)
        and expected in str(broken.error)
    )
