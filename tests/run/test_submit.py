"""`gdn submit`: what the contest would read of a repository, and what is written, committed and tagged there."""

from __future__ import annotations

import subprocess

import helpers
import pytest

from gdn_cli import errors
from gdn_cli.catalog import pack, submission
from gdn_cli.errors import GdnError, UsageError
from gdn_cli.run import submit

REGISTRY = helpers.REGISTRY
DECODE, PREFILL = "gdn_decode_qk4_v8_d128_k_last", "gdn_prefill_qk4_v8_d128_k_last"


def git(root, *args):
    return subprocess.run(["git", "-C", root, *args], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path):
    git(tmp_path, "init", "-q")
    for key, value in {"user.name": "us", "user.email": "us@example.invalid"}.items():
        git(tmp_path, "config", key, value)
    return tmp_path


def solution(name, op="gdn_decode"):
    return pack.pack(REGISTRY.find(name, op), REGISTRY.ops[op], author="us")


def handed_in(root, name, op="gdn_decode", tag=None, prove=lambda: None):
    return submit.submit(root, solution(name, op), op, tag, REGISTRY, prove)


def read(root):
    return [(e.folder, e.definition, e.faults) for e in submission.entries(root, REGISTRY)]


def test_a_folder_for_each_definition_and_a_tag_for_each_submission(root):
    first = handed_in(root, "cuda-v5")
    assert (first.folder, first.tag) == ("gdn_decode", "gdn_decode-v1")
    assert first.push == f"git -C {root} push origin HEAD gdn_decode-v1"
    second = handed_in(root, "cuda-chunk", "gdn_prefill", "final")
    assert read(root) == [("gdn_decode", DECODE, []), ("gdn_prefill", PREFILL, [])] and second.tag == "final"
    third = handed_in(root, "triton-v2")  # another language: nothing of the first stays
    assert (third.folder, third.tag) == ("gdn_decode", "gdn_decode-v2")
    assert sorted(p.name for p in (root / "gdn_decode" / "solution").iterdir()) == ["triton"]
    sent = {s["path"]: s["content"] for s in solution("triton-v2")["sources"]}
    assert {p.name: p.read_text() for p in (root / "gdn_decode/solution/triton").iterdir()} == sent
    again = handed_in(root, "triton-v2")
    assert again.commit is None and git(root, "rev-parse", "gdn_decode-v3^{}") == git(root, "rev-parse", "HEAD")
    assert git(root, "status", "--porcelain") == "" and len(git(root, "log", "--format=%h").splitlines()) == 3


def test_what_is_not_proved_changes_nothing(root):
    def no():
        raise GdnError("it does not build")

    with pytest.raises(GdnError, match="does not build"):
        handed_in(root, "cuda-v5", prove=no)
    assert list(root.iterdir()) == [root / ".git"] and git(root, "tag") == ""


@pytest.mark.parametrize(
    ("name", "op", "tag", "says"),
    [
        ("cpp-v1", "gdn_decode", None, "the contest takes triton and cuda, not cpp"),
        ("cuda-v5-bf16", "gdn_decode_bf16", None, "is not one of the contest's that gdn knows: .*" + DECODE),
        ("cuda-v5", "gdn_decode", "gdn_decode-v1", "the tag gdn_decode-v1 is there already"),
        ("cuda-v5", "gdn_decode", "a..b", "git takes no such name"),
    ],
)
def test_what_the_contest_does_not_take_is_not_even_proved(name, op, tag, says, root):
    handed_in(root, "cuda-v5")
    with pytest.raises(GdnError, match=says):
        handed_in(root, name, op, tag, prove=lambda: pytest.fail("proved"))


def test_the_users_own_changes_are_not_committed(root):
    handed_in(root, "cuda-v5")
    (root / "gdn_decode" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="has changes that are not committed"):
        handed_in(root, "cuda-v5")
    git(root, "add", ".")
    git(root, "commit", "-qm", "notes")
    (root / "other.txt").write_text("mine")
    handed_in(root, "cuda-v4")
    assert git(root, "status", "--porcelain") == "?? other.txt" and (root / "gdn_decode" / "notes.txt").exists()
    git(root, "add", "other.txt")
    with pytest.raises(UsageError, match="has staged changes"):
        handed_in(root, "cuda-v4")


def test_a_repository_of_one_definition_keeps_it_at_the_top(root):
    submission.write(root, solution("cuda-v4"))
    git(root, "add", ".")
    git(root, "commit", "-qm", "as the kit has it")
    assert handed_in(root, "cuda-v5").folder == "." and read(root) == [(".", DECODE, [])]
    with pytest.raises(UsageError, match="config.toml is of another definition; move it into a folder first"):
        handed_in(root, "cuda-chunk", "gdn_prefill")


def test_the_faults_of_a_repository_are_named(root):
    for folder in ("a", "b", "c/d", "e", "f"):
        (root / folder).mkdir(parents=True)
        submission.write(root / folder, solution("cuda-v5"))
    (root / "b" / "solution" / "cuda" / "kernel.cu").unlink()
    (root / "b" / "solution" / "cuda" / "gates.cuh").write_text("\n")
    (root / "b" / "solution" / "cuda" / "more").mkdir()
    toml = (root / "e" / "config.toml").read_text()
    (root / "e" / "config.toml").write_text(toml.replace("kernel.cu::run", "kernel"))
    (root / "f" / "config.toml").write_text(toml.replace(DECODE, "gdn_decode").replace('"cuda"', '"triton"'))
    found = {folder: faults for folder, _, faults in read(root)}
    assert found["a"] == [] and "c" not in found
    assert found["."] == [
        f"{DECODE} is the definition of several folders: one of them is evaluated",
        "c/d/config.toml is too deep to be found",
    ]
    assert found["b"] == [
        "solution/cuda/ has no kernel.cu, its entry point",
        "solution/cuda/gates.cuh is empty, which flashinfer-bench refuses",
        "solution/cuda/more/ is not packed: subfolders are dropped",
    ]
    assert found["e"] == ["e/config.toml: $.build.entry_point: expected '<file>::<symbol>', got 'kernel'"]
    unknown, lacking = found["f"]
    assert unknown.startswith("definition 'gdn_decode' is not one of") and "no folder solution/triton/" in lacking


def test_the_command_says_what_is_wrong_in_a_line(root, tmp_path_factory):
    empty = helpers.gdn("submit", root)
    assert (empty.code, empty.out.strip()) == (
        errors.FAILED, "no config.toml at the top, nor in a folder: the contest finds nothing here"
    )  # fmt: skip
    submission.write(root, solution("cuda-v5"))
    checked = helpers.gdn("submit", root, "--json")
    assert checked.code == 0 and checked.json["entries"] == [{"folder": ".", "definition": DECODE, "faults": []}]
    for args, says in (
        ((root, "--algo", "cuda-v5"), "whose is it?"),
        ((tmp_path_factory.mktemp("x"),), "is not in a git repository"),
        ((root / "nowhere",), "is not a folder"),
        ((root / "solution",), "is inside the repository"),
    ):
        done = helpers.gdn("submit", *args)
        assert done.code == errors.USAGE and says in done.err and "Traceback" not in done.err
