"""`--help`: groups, examples, whole summaries; `gdn help`, completion."""

import inspect
import re
import shlex
import subprocess
import sys
import typing
from typing import Annotated

import pytest
import typer
from helpers import environment, gdn
from typer.main import get_command

from gdn_cli.cli import app, help, options

TOP = get_command(app)


def paths(command=TOP, *words):
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from (
                paths(below, *words, name)
                if hasattr(below, "commands")
                else [" ".join((*words, name))]
            )


@pytest.mark.parametrize("path", list(paths()))
def test_every_command_has_an_example_that_it_takes(path):
    for line in help._EXAMPLES[path]:
        assert line.startswith(f"gdn {path}")
        words = shlex.split(line.partition(" < ")[0])[1:]
        command, context = TOP, typer.Context(TOP, info_name="gdn")
        while hasattr(command, "commands"):
            name, command, words = command.resolve_command(context, words)
            context = typer.Context(command, info_name=name, parent=context)
        command.make_context(command.name, words)  # raises where it does not take them


def test_an_option_whose_default_is_none_is_one_on_every_python(monkeypatch):
    """Up to Python 3.10 get_type_hints wraps it in an Optional, and typer then sees no option."""
    real = typing.get_type_hints

    def as_in_3_10(of, *args, **more):
        hints = real(of, *args, **more)
        if inspect.isfunction(of):
            for parameter in inspect.signature(of).parameters.values():
                if parameter.default is None:
                    hints[parameter.name] |= None
        return hints

    for module in (typing, options):
        monkeypatch.setattr(module, "get_type_hints", as_in_3_10)

    out_option = Annotated[str | None, typer.Option("-o")]

    @options.grouped
    def command(which: options.Selection, out: out_option = None) -> None: ...

    found = inspect.signature(command).parameters
    assert list(found) == ["workload", "n", "preset", "dataset", "out"]
    for name, parameter in found.items():
        assert typing.get_origin(parameter.annotation) is Annotated, name


def test_the_front_page_has_whole_summaries_in_groups():
    out = gdn("--help").out
    assert not re.search(r"[a-z,]\.\.\.", out) and max(map(len, out.splitlines())) <= 80
    assert [line for line in out.splitlines() if re.fullmatch(r"[A-Z].*:", line)] == [
        "Options:"
    ] + [f"{kind}:" for kind in help._KINDS]
    assert {name for names in help._KINDS.values() for name in names.split()} == {
        p.split()[0] for p in paths()
    }


def test_options_stand_in_groups_and_every_one_is_there():
    out = gdn("bench", "--help").out
    at = [
        out.index(f"\n{panel}:\n")
        for panel in ("Which algos", "Which workloads", "How to time", "How to run")
    ]
    assert at == sorted(at) and "Examples:\n  gdn bench cpp-v1" in out
    assert "--seconds SECONDS" in out and "[default: (0.01; 0.005 for ratios)]" in out
    assert all(
        max(p.opts, key=len) in out
        for p in TOP.commands["bench"].params
        if p.param_type_name == "option"
    )


def test_gdn_help_and_version():
    assert gdn("help", "bench").out == gdn("bench", "--help").out
    assert gdn("help", "data", "list").out == gdn("data", "list", "--help").out
    assert gdn("help").out == gdn("--help").out
    assert gdn("-V").out == gdn("--version").out
    done = gdn("help", "benhc")
    assert done.code == 2 and "Did you mean 'bench'?" in done.err


_PROBE = """import sys
sys.argv = ["gdn"]
from gdn_cli.cli import main
try:
    main()
finally:
    assert not {"torch", "numpy"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gdn bench cuda-v5-b", ["cuda-v5-bf16"]),
        ("gdn run --algo cpp-v1,triton", ["cpp-v1,triton-v1", "cpp-v1,triton-v2"]),
        ("gdn show gdn_prefill/fla-r", ["gdn_prefill/fla-ready"]), ("gdn sh", ["show"]),
    ],
)  # fmt: skip
def test_names_complete(line, found):
    env = {
        "_GDN_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=environment(**env),
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr) == (found, "")


@pytest.mark.torch
def test_new_proposes_where_to_start():
    done = gdn("new", "my-x")
    assert (done.code, done.err) == (
        2, "gdn: which algo to start from?\n  gdn new my-x --from cpp-v1; `gdn list` shows all\n",
    )  # fmt: skip
