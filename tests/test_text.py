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
import profiles
import pytest
import reports
from markupsafe import escape
from rich.text import Text

from gdn_cli import text
from gdn_cli.catalog.registry import Broken
from gdn_cli.catalog.tuned_table import Size
from gdn_cli.catalog.workloads import Workload
from gdn_cli.errors import UsageError
from gdn_cli.machine.inventory import Place
from gdn_cli.parsing import to_json
from gdn_cli.profile import differences
from gdn_cli.records import history
from gdn_cli.report import (
    algos,
    figures,
    html,
    markdown,
    merge,
    pictures,
    profile,
    screen,
    table,
    tables,
    terminal,
    tune,
)
from gdn_cli.report import history as shown_history
from gdn_cli.report.book import Book
from gdn_cli.schema.profile_types import Listed
from gdn_cli.schema.record_types import Status, document_of
from gdn_cli.tune.evidence import Evidence, Measured
from gdn_cli.tune.search import LeftOut, Space

REGISTRY = helpers.REGISTRY
OP = REGISTRY.ops["gdn_decode"]

# foreign text -> how it is displayed
CORPUS = {
    "\x1b]0;t\x07": r"\x1b]0;t\x07",  # sets the title
    "\x1b]52;c;aGk=\x07": r"\x1b]52;c;aGk=\x07",  # fills the clipboard
    "\x1b[2J": r"\x1b[2J",  # clears the screen
    "\x1b[31mx": r"\x1b[31mx",
    "\x9b2J": r"\x9b2J",  # the same in one character, for some terminals
    "a\x08\x08b": r"a\x08\x08b",
    "a\rb": r"a\rb",
    "a\nb": r"a\nb",
    "a\tb": r"a\tb",
    "\x00\x7f": r"\x00\x7f",
    "\u202egpj": r"\u202egpj",
    "\u2066x\u2069": r"\u2066x\u2069",
    "a\u200b\ufeffb": r"a\u200b\ufeffb",
    "a\u2028b": r"a\u2028b",
    "a\U000e0041\ufe0fb": r"a\U000e0041\ufe0fb",
    "\udcff": "\ufffd",
    "[/]": "[/]",
    "x[/red]y": "x[/red]y",
    "[bold]x": "[bold]x",
    "[link=u]x": "[link=u]x",
    "x\\": "x\\",
    ":boom:": ":boom:",
}
SGR = re.compile(r"\x1b\[[\d;]*m")


def harmless(out: str) -> bool:
    """Whether it has only visible characters, blanks and new lines."""
    return all(
        c == "\n" or (c.isprintable() and not "\ufe00" <= c <= "\ufe0f") for c in out
    )


def planted(value, evil: str, keys: frozenset[str]):
    """A copy in which every text under one of these keys is `evil`; of algos, cuda-v4
    only, which is not looked up.
    """
    if isinstance(value, list):
        return [planted(v, evil, keys) for v in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, v in value.items():
        if key in keys and isinstance(v, str):
            v = evil
        elif key in keys and isinstance(v, list) and v and isinstance(v[0], str):
            v = [evil, *v]
        elif key in ("algo", "against", "baseline") and v == "cuda-v4":
            v = evil
        found[key] = planted(v, evil, keys)
    return found


RECORD = frozenset(
    "reason note doubts backend how hint commit gpu driver cpu warnings tail uuid source_hash".split()
)
PROFILE = frozenset(
    "algo name title reason why next summary label note notes doubts files folder gpu kernel"
    " warnings".split()
)


def bench(evil: str, command: str = "bench") -> dict:
    found = planted(reports.everything(), evil, RECORD) | {"command": command}
    few = (None, {"batch_size": 1}, {"batch_size": 8})
    found["records"] = [
        r
        for r in found["records"]
        if (r["workload"] or {}).get("axes") in few
        and r["tier"] in (None, "cupti", "graph")
    ]
    failed = [r for r in found["records"] if r["status"] != "passed"]
    failed[0]["tail"] = [evil, f"line {evil}"]
    for r in found["records"]:
        if r.get("timing") and r["tier"] == "graph":
            r["timing"] |= {"note": evil, "how": evil}
        r |= {"mode": "cuda", "tuned_for": evil, "tuned_nearest": r["algo"] == evil}
    return found


def show(evil: str, command: str) -> None:
    found = bench(evil, command)
    if command == "floors":
        found["records"] = [
            r
            for r in found["records"]
            if r["algo"] == "copy" or r["status"] != "passed"
        ]
        for r in found["records"]:
            r["how"] = evil
    terminal.show(
        reports.typed(found), REGISTRY, False, Path("/x") / evil.replace("\0", "")
    )


def listed(evil: str) -> None:
    algo = SimpleNamespace(
        op="gdn_decode",
        name=evil,
        language=evil,
        modes=[evil],
        setup=None,
        summary=evil,
    )
    found = [(algo, Place(None, evil, evil)), (algo, Place("cpu"))]
    algos.show_list(found, [Broken(evil, evil, UsageError(f"{evil}: {evil}"))], False)


def kept(evil: str) -> history.History:
    """A history of this test's own (GDN_HOME) with two runs of an algo that is called so."""
    records = [
        reports.record(evil, 1, 2.0),
        reports.record(evil, 8, None, status="wrong", reason=evil),
    ]
    records[0]["source_hash"] = evil
    head = planted(reports.document([]), evil, RECORD) | {"options": {evil: evil}}
    store = history.History()
    store.keep(
        document_of(head | {"records": records}), Path("/x") / evil.replace("\0", "")
    )
    other = {"cuda": head["environments"]["cuda"] | {"versions": {evil: evil}}}
    later = head | {
        "time": "2026-11-22T14:12:11Z",
        "records": records,
        "environments": other,
    }
    store.keep(document_of(later))
    return store


def timeline(evil: str) -> None:
    shown_history.show_timeline(history.timeline(kept(evil).series()), False)


def forgotten(evil: str) -> None:
    store = kept(evil)
    shown_history.show_forgotten(*store.forget(store.series()[0].run), False)


def profiled(evil: str, between: bool) -> None:
    found = [
        planted(d, evil, PROFILE)
        for d in (profiles.v4(status="wrong", reason="x"), profiles.fla())
    ]
    found[0] |= {"name": f"{evil}1"}
    found[1] |= {"name": f"{evil}2"}
    pair = [profiles.typed(d) for d in found]
    difference = None
    if between:
        plain = to_json(
            differences.difference(
                profiles.typed(profiles.v4()), profiles.typed(profiles.fla())
            )
        )
        plain = planted(plain, evil, PROFILE) | {"a": f"{evil}1", "b": f"{evil}2"}
        difference = msgspec.convert(plain, differences.Difference)
    profile.show_profiles(pair, difference, False)


def profile_list(evil: str) -> None:
    row = Listed(
        evil, "2026", evil, evil, evil, evil, Status.PASSED, 1.0, evil, evil, evil
    )
    other = msgspec.structs.replace(row, status=Status.WRONG, device="other")
    profile.show_profile_list([row, other], False)


def tuned(evil: str, dry_run: bool) -> None:
    constants = {"rows": 1, evil: 2}
    space = Space((evil,), evil, {"rows": (1,), evil: (2,)})
    plan = SimpleNamespace(
        op=OP, algo=SimpleNamespace(name=evil, folder=Path(evil), tune=SimpleNamespace(file=evil)), space=space,
        constants={"c": constants}, excluded=1, label=lambda w: evil,
        sizes={Size(1, 1): [Workload(evil, {"batch_size": 1})]},
    )  # fmt: skip
    measured = Measured(
        uuid=evil, axes={"batch_size": 1}, size=1, chosen=constants, chosen_us=1.0, fastest=constants,
        second=constants, ratio=(1.0, 1.0, 1.0),
    )  # fmt: skip
    result = Evidence(
        gpu=evil, sms=1, versions={}, source_hash="", date="", tier=evil, l2=evil, seconds=1.0, target=0.1,
        preset=None, space=space, doubts=[evil], left_out=[], rows=[constants | {"up_to": 9}], workloads=[measured],
    )  # fmt: skip
    left_out = {"c": LeftOut({evil: 1}, Status.WRONG, evil, evil)}
    state = SimpleNamespace(
        result=result, out=left_out, interrupted=True, written=[evil]
    )
    tune.show_tuning(plan, None if dry_run else state, False)


def doctor(evil: str) -> None:
    terminal.show_doctor(
        [{"state": "bad", "what": evil, "found": evil, "for": evil, "mend": evil}],
        evil,
        False,
    )


def workloads(evil: str) -> None:
    terminal.show_workloads({evil: [Workload(evil, {evil: 1})]}, False)


SCREENS = {
    "list": listed,
    "run": lambda evil: show(evil, "run"),
    "bench": lambda evil: show(evil, "bench"),
    "compare": lambda evil: show(evil, "compare"),
    "floors": lambda evil: show(evil, "floors"),
    "history": lambda evil: shown_history.show_overview(history.overview(kept(evil).series()), False),
    "history --algo": timeline,
    "history --import": lambda evil: shown_history.show_imported([(Path(evil), history.Kept(1))], False),
    "history --export": lambda evil: shown_history.show_exported(1, evil, False),
    "history --forget": forgotten,
    "profile": lambda evil: profiled(evil, False),
    "profile A B": lambda evil: profiled(evil, True),
    "profile --list": profile_list,
    "tune --dry-run": lambda evil: tuned(evil, True),
    "tune": lambda evil: tuned(evil, False),
    "doctor": doctor,
    "pack --prove": lambda evil: terminal.show_proof([{"state": "failed", "step": evil, "detail": evil}]),
    "data list": workloads,
    "a line": lambda evil: screen.put(f"{evil}: {evil}"),
    "stderr": screen.say,
    "a Text of a raw string": lambda evil: screen.console().print(Text(evil.replace("\n", r"\n").replace("\t", r"\t"))),
}  # fmt: skip


def printed(show, evil: str, monkeypatch, colour: bool) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    (
        monkeypatch.setenv("FORCE_COLOR", "1")
        if colour
        else monkeypatch.delenv("FORCE_COLOR", raising=False)
    )
    with monkeypatch.context() as patch:
        out = io.StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", out)
        show(evil)
    return out.getvalue()


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("name", SCREENS)
def test_a_terminal_shows_text_and_obeys_none(name, colour, monkeypatch, tmp_path):
    for i, (evil, seen) in enumerate(CORPUS.items()):
        if name == "a Text of a raw string" and set(evil) & set("\x07\x08\r"):
            continue  # rich itself takes these out of a Text
        monkeypatch.setenv("GDN_HOME", str(tmp_path / str(i)))
        out = printed(SCREENS[name], evil, monkeypatch, colour)
        bare = SGR.sub("", out) if colour else out
        assert harmless(bare), (evil, [c for c in bare if not harmless(c)][:3])
        assert seen in bare, evil
        # none of our own markup is left
        assert "[" in evil or not re.search(
            r"\[/?(dim|bold|red|green|yellow|cyan)?\]", bare
        ), bare


def test_the_colours_are_those_of_gdn_alone(monkeypatch):
    """The same screen with an innocent name has as many: hostile text adds none and
    takes none away.
    """
    for name in ("list", "doctor", "tune"):
        plain = len(SGR.findall(printed(SCREENS[name], "innocent", monkeypatch, True)))
        assert {
            len(SGR.findall(printed(SCREENS[name], e, monkeypatch, True)))
            for e in ("[/]", "[bold]x")
        } == {plain}


def test_several_lines_stay_where_a_compiler_says_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "a.cu(1): error: \x1b[2J\n\ta.cu(2): error: [/]"
    r = {
        "op": "gdn_decode",
        "algo": "a\nb",
        "mode": "cuda",
        "tier": None,
        "workload": None,
        "status": "build_failed",
    }
    found = {
        "schema": 2,
        "command": "run",
        "environments": {},
        "missing": [],
        "records": [r | {"reason": reason}],
    }
    terminal.show(reports.typed(found), REGISTRY, False, Path("x.json"))
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(r"failed a\nb: build failed, a.cu(1): error: \x1b[2J")
    assert lines[at + 1].strip() == "a.cu(2): error: [/]"
    terminal.show_proof([{"state": "failed", "step": "build", "detail": "one\ntwo"}])
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1:] == [
        ["!!", "build", "one"],
        ["two"],
    ]


def test_visible_text_stays_as_it_is():
    for fine in ("cuda-v4", "±5 %", "1.5 µs", "Ω/日本語", "a b", r"C:\x", "😀"):
        assert text.shown(fine) == fine == text.shown(fine, lines=True)
    assert text.shown("a\r\nb\n\tc\x1b", lines=True) == "a\nb\n\tc\\x1b"
    assert text.whole("é😀\ud800x\x1b") == "é😀\ufffdx\x1b"


# --- files


def book(evil: str) -> Book:
    return merge.gather(
        [reports.source(evil, json.loads(json.dumps(bench(evil))))], REGISTRY
    )


@pytest.mark.parametrize("evil", CORPUS, ids=ascii)
def test_markdown_and_csv_hold_text(evil):
    made = markdown.markdown(book(evil), markdown.PARTS, title=evil)
    assert harmless(made) and made.encode()
    seen = CORPUS[evil]
    assert seen in re.sub(r"\\([\\`*_{}\[\]()#+\-.!|$~])", r"\1", made)
    rows = list(
        csv.DictReader(
            io.StringIO(table.csv_text(tables.every_record(book(evil))), newline="")
        )
    )
    assert harmless("".join(v for row in rows for v in row.values())) and seen in {
        row["algo"] for row in rows
    }


@pytest.mark.parametrize(
    "evil",
    ["\x1b]0;t\x07\n\u202e\udcff[/]$x_{y}$", '"><svg onload=x>]]></style>'],
    ids=ascii,
)
def test_pages_and_figures_hold_text(evil):
    found = book(evil)
    made = html.page(found, evil)
    seen = str(escape(text.shown(evil)))
    assert harmless(made) and made.encode() and made.count(seen) > 20
    assert "<svg onload" not in made and "</style><" not in made
    one, heading = figures.one(found, "latency")
    assert pictures.png(one, [evil, *heading]).startswith(b"\x89PNG")
    drawn = ElementTree.fromstring(pictures.svg(one))
    assert any(text.shown(evil)[:8] in "".join(e.itertext()) for e in drawn.iter())


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=cmd()", "'=cmd()"), ("+1+1", "'+1+1"), ("-x", "'-x"), ("@SUM(A1)", "'@SUM(A1)"), ("\t=1", r"'\t=1"),
        ("\r=1", r"'\r=1"), ("\uff1d1", "'\uff1d1"), ("-1.5", "-1.5"), ("+2e-3", "+2e-3"), ("-1.5x", "'-1.5x"),
        ("a=b", "a=b"), ("", ""), (None, ""), (-1.5, -1.5), ("a\nb\x1b", r"a\nb\x1b"), ("-", "'-"),
    ],
)  # fmt: skip
def test_a_cell_is_never_a_formula(value, cell):
    assert text.csv_cell(value) == cell


def test_the_history_s_csv_holds_text(monkeypatch, tmp_path):
    for i, (evil, seen) in enumerate(
        [*CORPUS.items(), ("=cmd()", "'=cmd()"), ("@x", "'@x")]
    ):
        monkeypatch.setenv("GDN_HOME", str(tmp_path / str(i)))
        for suffix in ("csv", "jsonl"):
            shown_history.export(
                kept(evil).rows(history.Filter()), str(tmp_path / f"x.{suffix}")
            )
        content = (tmp_path / "x.csv").read_text(encoding="utf-8")
        assert harmless(content)
        rows = list(csv.DictReader(io.StringIO(content, newline="")))
        assert seen in {row["algo"] for row in rows} and seen in {
            row["commit"] for row in rows
        }
        exact = [
            json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()
        ]
        assert text.whole(evil) in {row["algo"] for row in exact}


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("a|b", r"`a\|b`"), ("a`b", r"a\`b"), ("a`|\\", r"a\`\|\\"), (r"a\|b", r"a\\\|b"), ("a\nb", r"`a\nb`"),
        ("<b>", "`<b>`"), ("", ""), ("[x](javascript:1)", "`[x](javascript:1)`"),
    ],
)  # fmt: skip
def test_names_in_markdown(name, made):
    assert text.markdown_code(name) == made


def test_text_in_markdown():
    assert (
        text.markdown(
            "[x](javascript:1) <b> a_b _c_ **d** ~~e~~ | `f` $g$ &lt; <!-- -->"
        )
        == r"\[x\](javascript:1) &lt;b> a_b \_c\_ \*\*d\*\* \~\~e\~\~ \| \`f\` \$g\$ &amp;lt;"
        r" &lt;!-- -->"
    )


# --- the process

ODD = (
    "x[red]y",
    "[",
    "=cmd()",
    "t\x1b]0;title\x07",
    "n\nl",
    "b\u202ei",
    os.fsdecode(b"bad\xff"),
)


def raw(*args: str, **env: str) -> tuple[int, bytes]:
    """(exit code, both streams) of a gdn whose output may not be UTF-8."""
    done = subprocess.run(
        [sys.executable, "-m", "gdn_cli", *args],
        env=helpers.environment(**env),
        capture_output=True,
        timeout=helpers.PATIENCE_S,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_folders_of_odd_names_are_broken_and_break_nothing(tmp_path, write_algo):
    for name in ODD:
        write_algo(tmp_path, name, "from .right import run\n")
    write_algo(tmp_path, "fine", "from .right import run\n")
    # C: an ASCII terminal, where every other character is an escape as well
    for env in ({}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}):
        code, out = raw(
            "list", "--algos", str(tmp_path), "--op", "gdn_decode", COLUMNS="400", **env
        )
        lines = out.decode(env.get("PYTHONIOENCODING", "utf-8")).splitlines()
        assert (
            code == 0
            and harmless("".join(lines))
            and any(line.startswith("fine ") for line in lines)
        )
        broken = [line.split(":")[0] for line in lines if line.startswith("broken ")]
        bad = "bad\ufffd" if not env else r"bad\ufffd"
        wanted = [
            "x[red]y",
            "[",
            "=cmd()",
            r"t\x1b]0;title\x07",
            r"n\nl",
            r"b\u202ei",
            bad,
        ]
        assert sorted(broken) == sorted(f"broken gdn_decode/{name}" for name in wanted)
    code, out = raw(
        "list", "--algos", str(tmp_path), "--json", PYTHONIOENCODING="ascii"
    )
    assert code == 0 and {b["algo"] for b in json.loads(out)["broken"]} == set(ODD)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("run", "--algo", "\x1b]0;x\x07\udcff"), r"gdn: unknown algo '\x1b]0;x\x07" + "\ufffd'"),
        (("run", "--device", "a\nb\x1b"), r"gdn: unknown device 'a\nb\x1b'"),
        (("run", "--\x1b]0;x\x07"), r"No such option: --\x1b]0;x\x07"),
        (("run", "-n", "\x1b[2J"), r"\x1b[2J"),
        (("\x1b[2J",), r"No such command '\x1b[2J'"),
        (("history", "--export", "\x1b.txt"), r"gdn: --export \x1b.txt: expected"),
        (("report", "\udcff\x1b.json"), "gdn: \ufffd\\x1b.json: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_wrong_usage_is_shown_and_not_obeyed(args, says):
    code, out = raw(*args)
    assert code == 2 and says in out.decode() and harmless(out.decode())
    code, out = raw(*args, PYTHONIOENCODING="ascii")
    assert code == 2 and harmless(out.decode("ascii"))


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
    assert (
        harmless(err)
        and r"w \x1b[2J" in err
        and err.endswith("ValueError: bug \\x1b]0;t\\x07\n")
    )


def test_a_foreign_progress_display_keeps_its_colours_and_no_more():
    spinner = "\x1b[?25l\x1b[32m✓\x1b[0m Created\r\x1b[2K\x1b[1A"
    assert text.display(spinner) == spinner
    assert text.display("\x1b]8;id=1;https://e/\x1b\\app\x1b]8;;\x1b\\") == "app"
    assert (
        text.display("\x1b]0;t\x07\x1b[2J\x1b]52;c;aGk=\x07")
        == r"\x1b]0;t\x07\x1b[2J\x1b]52;c;aGk=\x07"
    )


def test_a_progress_bar_names_an_algo_as_it_is(monkeypatch):
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    with screen.progress() as progress:
        progress("x[/red]\x1b]0;t\x07\n", 1, 2)
    assert (
        r"x[/red]\x1b]0;t\x07\n" in out.getvalue()
        and "\x1b]" not in out.getvalue()
        and "\x07" not in out.getvalue()
    )


def test_without_a_terminal_a_line_says_from_time_to_time_how_far_it_is(monkeypatch):
    said, more = [], threading.Event()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(screen, "_STILL_S", 0.001)
    monkeypatch.setattr(
        screen, "say", lambda line: (said.append(f"gdn: {line}\n"), more.set())
    )
    with screen.progress() as progress:
        progress("x", 1, 2)
        assert more.wait(60)
        progress("x", 2, 2, True)
    kinds = {re.sub(r" after .*\n", "", line) for line in said}
    assert kinds == {"gdn: x: 1 of 2", "gdn: x: done, 2 of 2"}
    # no test sees how many there were
    done = helpers.Done(0, "", "".join(said) + "gdn: else\n")
    assert (done.complaints, done.finished) == ("gdn: else\n", ["x: done, 2 of 2"])
