"""Foreign text (names, reasons, commits, a worker's output) is only displayed, never
interpreted, in all outputs.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import helpers
import msgspec
import pytest
import reports
from markupsafe import escape

from gdn_cli import text
from gdn_cli.catalog.registry import Broken
from gdn_cli.errors import UsageError
from gdn_cli.machine.inventory import Place
from gdn_cli.report import (
    algos,
    figures,
    html,
    markdown,
    merge,
    pictures,
    screen,
    table,
    terminal,
)
from gdn_cli.report.tables import records
from gdn_cli.schema.output import Progress

REGISTRY = helpers.REGISTRY

# foreign text -> how it is displayed
CORPUS = {
    "\x1b]0;t\x07": r"\x1b]0;t\x07",  # sets the title
    "\x1b]52;c;aGk=\x07": r"\x1b]52;c;aGk=\x07",  # fills the clipboard
    "\x1b[2J": r"\x1b[2J",  # clears the screen
    "\x9b2J": r"\x9b2J",  # the same in one character, for some terminals
    "a\x08\rb\nc\td\x00\x7f": r"a\x08\rb\nc\td\x00\x7f",
    "\u202egpj\u2066x\u2069": r"\u202egpj\u2066x\u2069",
    "a\u200b\ufeff\u2028b": r"a\u200b\ufeff\u2028b",
    "a\U000e0041\ufe0fb": r"a\U000e0041\ufe0fb",
    "\udcff": "\ufffd",
    "x[/red]y[bold]": "x[/red]y[bold]",
    "[link=u]x\\": "[link=u]x\\",
    ":boom:": ":boom:",
}
SGR = re.compile(r"\x1b\[[\d;]*m")


def harmless(out: str) -> bool:
    """Whether it has only visible characters, blanks and new lines."""
    joiners = re.search("[\ufe00-\ufe0f]", out)
    return out.replace("\n", "").isprintable() and not joiners


def bench(evil: str) -> dict:
    """A document in which others' texts are `evil`."""
    document = reports.everything()
    few = (None, {"batch_size": 1}, {"batch_size": 8})
    records = []
    for record in document["records"]:
        if (record["workload"] or {}).get("axes") in few:
            record |= {"reason": record.get("reason") and evil, "tuned_for": evil}
            record["algo"] = record["algo"].replace("cuda-v4", evil)
            records.append(record)
    next(r for r in records if r["status"] != "passed")["tail"] = [evil]
    return document | {"records": records, "commit": evil}


def show_bench(evil: str) -> None:
    name = Path("/x") / evil.replace("\0", "")
    terminal.show(reports.typed(bench(evil)), REGISTRY, False, name)


def show_list(evil: str) -> None:
    fields = {key: evil for key in ("name", "language", "summary")}
    algo = SimpleNamespace(op="gdn_decode", modes=[evil], setup=None, **fields)
    broken = [Broken(evil, evil, UsageError(f"{evil}: {evil}"))]
    algos.show_list([(algo, Place(None, evil, evil))], broken, {})


SCREENS = {
    "list": show_list,
    "bench": show_bench,
    "pack --prove": lambda evil: terminal.show_proof(
        [{"state": "failed", "step": evil, "detail": evil}]
    ),
    "a line": lambda evil: screen.put(f"{evil}: {evil}"),
    "stderr": screen.say,
}


def printed(show, evil: str, monkeypatch, colour: bool) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1" if colour else "")
    with monkeypatch.context() as patch:
        out = io.StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", out)
        show(evil)
    return out.getvalue()


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("name", SCREENS)
def test_a_terminal_shows_text_and_obeys_none(name, colour, monkeypatch):
    for evil, seen in CORPUS.items():
        out = printed(SCREENS[name], evil, monkeypatch, colour)
        bare = SGR.sub("", out)
        assert harmless(bare) and seen in bare, evil
        assert colour or out == bare


def test_visible_text_stays_as_it_is():
    for fine in ("cuda-v4", "±5 %", "1.5 µs", "Ω/日本語", "a b", r"C:\x", "😀"):
        assert text.shown(fine) == fine == text.shown(fine, lines=True)
    assert text.shown("a\r\nb\n\tc\x1b", lines=True) == "a\nb\n\tc\\x1b"
    assert text.whole("é😀\ud800x\x1b") == "é😀\ufffdx\x1b"


# --- files


def book(evil: str):
    content = json.loads(json.dumps(bench(evil)))
    return merge.gather([reports.source(evil, content)], REGISTRY)


@pytest.mark.parametrize("evil", CORPUS, ids=ascii)
def test_markdown_and_csv_hold_text(evil):
    page = markdown.markdown(book(evil), markdown.PARTS, title=evil)
    seen = CORPUS[evil]
    assert harmless(page) and page.encode()
    assert seen in re.sub(r"\\([\\`*_{}\[\]()#+\-.!|$~])", r"\1", page)
    content = io.StringIO(table.csv_text(records.every_record(book(evil))), newline="")
    rows = list(csv.DictReader(content))
    assert seen in {row["algo"] for row in rows}
    assert all(harmless("".join(row.values())) for row in rows)


@pytest.mark.parametrize(
    "evil",
    ["\x1b]0;t\x07\n\u202e\udcff[/]$x_{y}$", '"><svg onload=x>]]></style>'],
    ids=ascii,
)
def test_pages_and_figures_hold_text(evil):
    page = html.page(book(evil), evil)
    assert harmless(page) and page.encode() and str(escape(text.shown(evil))) in page
    assert "<svg onload" not in page and "</style><" not in page
    figure, heading = figures.one(book(evil), "latency")
    assert pictures.png(figure, [evil, *heading]).startswith(b"\x89PNG")
    drawn = ElementTree.fromstring(pictures.svg(figure))
    assert any(text.shown(evil)[:8] in "".join(e.itertext()) for e in drawn.iter())


@pytest.mark.parametrize(
    ("value", "cell"),
    [("=cmd()", "'=cmd()"), ("+1+1", "'+1+1"), ("@SUM(A1)", "'@SUM(A1)"), ("-", "'-"),
     ("\t=1", r"'\t=1"), ("\r=1", r"'\r=1"), ("\uff1d1", "'\uff1d1"), ("-1.5", "-1.5"),
     ("+2e-3", "+2e-3"), ("-1.5x", "'-1.5x"), ("a=b", "a=b"), (None, ""), (-1.5, -1.5)],
)  # fmt: skip
def test_a_cell_is_never_a_formula(value, cell):
    assert text.csv_cell(value) == cell


@pytest.mark.parametrize(
    ("name", "code"),
    [("a|b", r"`a\|b`"), ("a`b", r"a\`b"), ("a`|\\", r"a\`\|\\"), (r"a\|b", r"a\\\|b"),
     ("a\nb", r"`a\nb`"), ("<b>", "`<b>`"), ("", "")],
)  # fmt: skip
def test_names_in_markdown(name, code):
    assert text.markdown_code(name) == code


def test_text_in_markdown():
    plain = "[x](u) <b> a_b _c_ **d** ~~e~~ | `f` $g$ &lt; <!-- -->"
    assert text.markdown(plain) == (
        r"\[x\](u) &lt;b> a_b \_c\_ \*\*d\*\* \~\~e\~\~ \| \`f\` \$g\$ &amp;lt; &lt;!-- -->"
    )


# --- the process


def raw(*args: str, **env: str) -> tuple[int, bytes]:
    """(exit code, both streams) of a gdn whose output may not be UTF-8."""
    command = [sys.executable, "-m", "gdn_cli", *args]
    env = helpers.environment(**env)
    done = subprocess.run(command, env=env, capture_output=True, timeout=600)
    assert b"Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


# C: an ASCII terminal, where every other character is an escape as well
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_folders_of_odd_names_are_broken_and_break_nothing(
    encoding, tmp_path, write_algo
):
    bad = os.fsdecode(b"bad\xff")
    for name in ("x[red]y", "t\x1b]0;title\x07", "n\nl", bad, "fine"):
        write_algo(tmp_path, name, "from .right import run\n")
    args = ["list", "--algos", str(tmp_path), "--op", "gdn_decode"]
    code, out = raw(*args, COLUMNS="400", PYTHONIOENCODING=encoding)
    lines = out.decode(encoding)
    assert code == 0 and harmless(lines) and "\nfine " in lines
    shown = "bad\ufffd" if encoding == "utf-8" else r"bad\ufffd"
    for name in ("x[red]y", r"t\x1b]0;title\x07", r"n\nl", shown):
        assert f"broken gdn_decode/{name}:" in lines
    broken = json.loads(raw(*args, "--json", PYTHONIOENCODING=encoding)[1])["broken"]
    assert bad in {b["algo"] for b in broken}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "--algo", "\x1b]0;x\x07\udcff"], r"algo '\x1b]0;x\x07" + "\ufffd'"),
        (["run", "--\x1b]0;x\x07"], r"No such option: --\x1b]0;x\x07"),
        (["\x1b[2J"], r"No such command '\x1b[2J'"),
        (["report", "\udcff\x1b.json"], "gdn: \ufffd\\x1b.json: cannot be read"),
    ],
)
def test_wrong_usage_is_shown_and_not_obeyed(args, says):
    code, out = raw(*args)
    assert code == 2 and says in out.decode() and harmless(out.decode())


def test_whatever_is_written_past_the_gates_meets_the_last_one():
    """A library's warning, a bug's traceback, a print: of the process's own streams, in
    any encoding.
    """
    script = (
        "from gdn_cli import text; import sys, warnings\n"
        "text.guard(); text.guard()\n"
        "print('out \\x1b[2J\\udcff\\u20ac\\n\\tx'); sys.stdout.writelines(['a\\x07', 'b\\n'])\n"
        "warnings.warn('w \\x1b[2J')\n"
        "assert not hasattr(sys.stdout, 'buffer') and text.unguarded(sys.stdout).buffer\n"
        "raise ValueError('bug \\x1b]0;t\\x07')\n"
    )
    env = helpers.environment(PYTHONIOENCODING="latin-1", PYTHONWARNINGS="default")
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True)
    assert done.stdout.decode("latin-1") == "out \\x1b[2J\\ufffd\\u20ac\n\tx\na\\x07b\n"
    err = done.stderr.decode("latin-1")
    assert harmless(err) and r"w \x1b[2J" in err
    assert err.endswith("ValueError: bug \\x1b]0;t\\x07\n")


def test_a_foreign_progress_display_keeps_its_colours_and_no_more():
    spinner = "\x1b[?25l\x1b[32m✓\x1b[0m Created\r\x1b[2K\x1b[1A"
    assert text.display(spinner) == spinner
    assert text.display("\x1b]8;id=1;https://e/\x1b\\app\x1b]8;;\x1b\\") == "app"
    assert text.display("\x1b]0;t\x07\x1b[2J") == r"\x1b]0;t\x07\x1b[2J"


def test_a_progress_bar_names_an_algo_as_it_is(monkeypatch):
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    with screen.progress() as progress:
        progress("x[/red]\x1b]0;t\x07\n", 1, 2)
    shown = out.getvalue()
    assert r"x[/red]\x1b]0;t\x07\n" in shown and not {"\x1b]", "\x07"} & {*shown}


def test_without_a_terminal_a_line_says_from_time_to_time_how_far_it_is(monkeypatch):
    lines, more = [], threading.Event()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(screen, "_STILL_S", 0.001)
    monkeypatch.setattr(screen, "say", lambda line: (lines.append(line), more.set()))
    with screen.progress() as progress:
        progress("x", 1, 2)
        assert more.wait(60)
        progress("x", 2, 2, True)
    kinds = {re.sub(r" after .*", "", line) for line in lines}
    assert kinds == {"x: 1 of 2", "x: done, 2 of 2"}


def test_with_json_each_step_is_a_line_of_json(monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with screen.progress("bench", json=True) as progress:
        progress("x", 0, 2, False, "compiling")
        progress("x", 2, 2)
        progress("x", 2, 2, True)
    lines = [
        msgspec.json.decode(line, type=Progress)
        for line in err.getvalue().split("\n")[:-1]
    ]
    steps = [(each.phase, each.algo, each.done, each.total) for each in lines]
    assert steps == [("compiling", "x", 0, 2), ("bench", "x", 2, 2)]
    assert 0 <= lines[0].seconds <= lines[1].seconds
