"""`gdn compare my-v1@HEAD my-v1`: an algo as git has it."""

from __future__ import annotations

import subprocess

import helpers
import pytest

from gdn_cli.catalog import registry
from gdn_cli.errors import UsageError
from gdn_cli.run import revision

TUNE = """
[tune]
file = "tuned.py"
size = ["batch_size"]
constants.rows = [1, 2]
"""
NAMES = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(folder, *args):
    subprocess.run(
        ["git", "-C", folder, *NAMES, *args], check=True, capture_output=True
    )


@pytest.fixture
def mine(tmp_path):
    """A repository: an empty commit, one with `mine`, which shares a file, and one in which
    `mine` and that file changed.
    """
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "--allow-empty", "-m", "empty")
    shared = helpers.write_algo(tmp_path, "shared", {"main.py": "", "more.py": "ONE"})
    own = helpers.write_algo(
        tmp_path, "mine", "first", shares=["gdn_decode/shared/more.py"], extra=TUNE
    )
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (own / "main.py").write_text("second")
    (shared / "more.py").write_text("TWO")
    git(tmp_path, "commit", "-am", "second")
    return tmp_path


def find(folder, name):
    return revision.find(registry.load(str(folder)), name, None)


@pytest.mark.parametrize(
    ("name", "texts"),
    [("mine@HEAD", ["second", "TWO"]), ("gdn_decode/mine@HEAD~1", ["first", "ONE"])],
)
def test_an_algo_is_packed_with_what_it_shared_then(mine, name, texts):
    algo = find(mine, name)
    assert algo.name == name.removeprefix("gdn_decode/")
    assert [source["content"] for source in algo.solution["sources"]] == texts
    assert algo.folder is None and "~" not in algo.solution["name"]


@pytest.mark.slow
def test_what_has_no_folder_is_not_tuned(mine, gdn):
    done = gdn("tune", "--algo", "mine@HEAD", "--algos", mine, "--json")
    assert done.code == 2 and "mine@HEAD is a packed solution" in done.err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine@HEAD~2", "gdn_decode/mine is not in HEAD~2"),
        ("mine@nope", "unknown revision 'nope'"),
        ("mine@", "unknown revision ''"),
        ("mine@--all", "unknown revision '--all'"),
        ("nope@HEAD", "unknown algo 'nope'"),
    ],
)
def test_what_git_has_not_is_refused_in_a_line(mine, name, says):
    with pytest.raises(UsageError, match=says) as e:
        find(mine, name)
    assert e.value.hint and "\n" not in e.value.message


def test_a_folder_that_is_in_no_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    helpers.write_algo(tmp_path, "mine", "first")
    with pytest.raises(UsageError, match="not a git repository"):
        find(tmp_path, "mine@HEAD")


def test_without_a_change_nothing_is_timed(mine, gdn):
    args = "compare", "mine@HEAD", "mine", "--algos", mine, "--json=summary"
    done = gdn(*args)
    says = "mine@HEAD and mine have the same sources: nothing was timed"
    assert (done.code, done.json["warnings"], done.json["lines"]) == (0, [says], [])
