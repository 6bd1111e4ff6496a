"""Commands in README and docs: the command line takes them, and the algos that they
name are there.
"""

from __future__ import annotations

import re
import shlex

import helpers
import pytest
import typer
from typer.main import get_command

from gdn_cli.cli import app, help

ROOT = helpers.TESTS.parent
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = (
    {algo.name for algo in helpers.REGISTRY.algos}
    | {algo.full_name for algo in helpers.REGISTRY.algos}
    | {"all"}
)
STAND_IN = re.compile(
    r"(my|base|old|solution|baseline|main)\b.*|NAME.*|[A-Z]|\.\.\.|\$.*|.*\.json(:ALGO)?"
)


def commands(text: str) -> list[str]:
    """The texts in code blocks and between backticks that begin with `gdn` and one of
    its commands.
    """
    indented = re.findall(r"^ {4,}(?:- run: |srun .*)?(gdn [^|\n]+)", text, re.M)
    inline = re.findall(
        r"`(?:\w+=\S+ )?(gdn [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)
    )
    found = [
        re.split(r" {2,}#| > | < | \d?> ", command)[0].strip()
        for command in (*indented, *inline)
    ]
    return [command for command in found if not command.startswith("gdn report ARGS")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_line_takes_what_a_page_shows(page):
    top = typer.Context(get_command(app), info_name="gdn")
    for line in commands(page.read_text(encoding="utf-8")):
        plain = line.replace("...", "NAME").replace(
            "--json=summary", "--json --summary"
        )
        words = shlex.split(plain)[1:]
        if not words[0].isalpha():  # gdn --help
            continue
        command, context = top.command, top
        while hasattr(command, "commands") and words:
            name, command, words = command.resolve_command(context, words)
            context = typer.Context(command, info_name=name, parent=context)
        try:
            options, _, _ = command.make_parser(context).parse_args(list(words))
        except typer.BadParameter as e:
            if type(e).__name__ == "MissingParameter":  # a command's name in a sentence
                continue
            pytest.fail(f"{page.name}: {line}: {e.format_message()}")
        except help.Unreadable as e:
            pytest.fail(f"{page.name}: {line}: {e.format_message()}")
        named = [
            options[key]
            for key in ("algo", "source", "from_")
            if isinstance(options.get(key), str)
        ]
        if context.info_name in ("compare", "profile"):
            named += [
                word
                for value in options.values()
                if isinstance(value, tuple)
                for word in value
            ]
        for name in ",".join(named).split(","):
            assert not name or name in NAMES or STAND_IN.fullmatch(name), (
                f"{page.name}: {line}: no algo {name}"
            )


def test_readme_shows_the_whole_loop():
    shown = [line.split()[1] for line in commands(PAGES[0].read_text(encoding="utf-8"))]
    loop = ["new", "run", "bench", "compare", "profile", "tune", "pack"]
    at = shown.index("new")
    assert shown[at : at + len(loop)] == loop
