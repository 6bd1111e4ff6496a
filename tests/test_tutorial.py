"""docs/tutorial.md: its edits apply, and its commands do what it says."""

from __future__ import annotations

import re

import helpers
import pytest

ROOT = helpers.TESTS.parent
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
# a command, the file that the next edits are of, or an edit
STEP = re.compile(
    r"^    gdn (?P<command>[^#\n]+)(?:# exits with (?P<code>\d))?$"
    r"|`(?P<file>mine/\S+\.cpp)`"
    r"|^```diff\n(?P<edit>.*?)```",
    re.MULTILINE | re.DOTALL,
)


def apply(edit: str, text: str) -> str:
    """The text after an edit, each of whose lines begins with - or +."""
    lines = edit.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == "-")
    after = "".join(line[1:] for line in lines if line[0] == "+")
    assert text.count(before) == 1, before
    return text.replace(before, after)


@pytest.mark.slow
def test_the_tutorial_from_its_first_command_to_the_packed_file(gdn, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path, commands, env = None, [], {}
    for step in STEP.finditer(TEXT):
        if step["file"]:
            path = tmp_path / step["file"]
        elif step["edit"]:
            path.write_text(apply(step["edit"], path.read_text()))
        else:
            words = step["command"].split()
            done = gdn(*words, env=env, cwd=tmp_path)
            assert done.code == int(step["code"] or 0), (words, done.out, done.err)
            commands.append(words[0])
            env = {"GDN_ALGOS": "mine"}  # as the tutorial says
            if step["code"]:
                assert "first wrong at [0, 0, 0, 0]: expected 0.006047" in done.out
    assert commands == "new run run bench profile new run compare pack".split()
    assert (tmp_path / "solution.json").is_file()


def test_the_snippet_of_the_recurrence_is_the_reference_s():
    torch = pytest.importorskip("torch")
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
    torch.manual_seed(0)
    names: dict = {}
    exec(code, names)
    q, k, v = (names[name].double() for name in "qkv")
    # from a zero state: S = beta v k^T
    expected = 0.5 * v * (k @ q) / 128**0.5
    torch.testing.assert_close(names["o"].double(), expected, rtol=1e-5, atol=1e-6)
