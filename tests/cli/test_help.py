"""`--help`: groups, examples, whole summaries."""

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

from gdn_cli.cli import _COMMANDS, app, options

TOP = get_command(app)


def commands(command=TOP, *words):
    for name, below in getattr(command, "commands", {}).items():
        if hasattr(below, "commands"):
            yield from commands(below, *words, name)
        elif not below.hidden:
            yield " ".join((*words, name)), below


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_every_command_has_an_example_that_it_takes(path, command):
    assert command.examples
    for line in command.examples:
        assert line.startswith(f"gdn {path}")
        words = shlex.split(line.partition(" < ")[0])[1 + len(path.split()) :]
        command.make_context(path, words)  # raises where it does not take them


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

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["workload", "n", "preset", "dataset", "out"]
    for name, parameter in parameters.items():
        assert typing.get_origin(parameter.annotation) is Annotated, name


def test_the_front_page_has_whole_summaries_in_groups():
    out = gdn("--help").out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and not re.search(r"[a-z,]\.\.\.", out)
    headings = [line for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert headings == [f"{heading}:" for heading in ("Options", *_COMMANDS)]


def test_options_stand_in_groups_and_every_one_is_there():
    out = gdn("bench", "--help").out
    headings = re.findall(r"^(\w.*):\n", out, re.M)
    assert headings == [
        "Arguments", "Which algos", "Which workloads", "How to time", "How to run",
        "On another machine", "What comes out", "Options", "Examples",
    ]  # fmt: skip
    assert "Examples:\n  gdn bench cpp-v1" in out
    assert "[default: the preset's; x>=0.01]" in out
    for parameter in TOP.commands["bench"].params:
        assert parameter.param_type_name == "argument" or parameter.opts[0] in out


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_no_bracket_of_click_or_typer_is_seen(path, command):
    out = gdn(*path.split(), "--help").out
    assert not re.search(r"\[\]|\{|\[default: \(| / --no-", out)


def test_version():
    assert gdn("-V").out == gdn("--version").out


_PROBE = """import sys
sys.argv = ["gdn"]
from gdn_cli.cli import main
try:
    main()
finally:
    assert not {"torch", "numpy"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("gdn bench cuda-v5-b", ["cuda-v5-bf16"]),
        ("gdn run --algo cpp-v1,triton", ["cpp-v1,triton-v1", "cpp-v1,triton-v2"]),
        ("gdn show gdn_prefill/fla-r", ["gdn_prefill/fla-ready"]),
        ("gdn sh", ["show"]),
        ("gdn bench --op gdn_prefill_packed_b", ["gdn_prefill_packed_bf16"]),
        ("gdn run --preset co", ["contest"]),
        ("gdn bench --tier cupti,w", ["cupti,wall"]),
        ("gdn profile --tool san", ["sanitizer"]),
        ("gdn bench --l2 w", ["warm"]),
        ("gdn run --device a", ["auto"]),
        ("gdn bench --engine s", ["slurm"]),
        ("gdn history --forget 2026", ["20261127-bench"]),
    ],
)
@pytest.mark.sampled(3)
def test_names_complete(line, completions, tmp_path):
    run = tmp_path / "runs" / "20261127-bench.json"
    run.parent.mkdir()
    run.touch()
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=environment(_GDN_COMPLETE="complete_bash", GDN_HOME=str(tmp_path), **words),
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr) == (completions, "")
