"""Exit code 0 means that the results are also saved; if that fails they are shown, with
one line that says so.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import helpers
import msgspec
import profiles
import pytest
import reports
from tune import test_search as test_tune

from gdn_cli import errors, files, paths
from gdn_cli.catalog import pack, registry, scaffold
from gdn_cli.cli import bench, options
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.profile import session
from gdn_cli.records import store
from gdn_cli.run import execute, planning
from gdn_cli.schema.record_types import Status, document_of
from gdn_cli.tune import journal

KNOWN = registry.load()


@pytest.fixture
def full(monkeypatch):
    """full(): from now on no new file fits on the disk; full(False): it does again."""

    def set(is_full: bool = True):
        def fail(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files, "_temporary", fail if is_full else real)

    real = files._temporary
    yield set
    set(False)


# --- records


@pytest.fixture
def performed(tmp_path, monkeypatch):
    """performed(*steps, out) -> the Writer of a bench in which each step adds a record,
    or is called.
    """
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))
    made = document_of(reports.bench((1, 8)))

    def perform(*steps, out, json=False, command="bench"):
        opened = store.open_document(command, {}, out)

        def run(plan, writer, *rest):
            for record, step in zip(made.records, steps, strict=False):
                writer.document.environments = made.environments
                writer.document.records.append(record)
                step()
                writer.save()

        monkeypatch.setattr(execute, "run", run)
        bench.perform(None, opened, KNOWN, options.Output(json), lambda: None)
        return opened

    return perform


def nothing():
    pass


def test_a_disk_that_fills_up_costs_no_result_and_is_exit_3(
    performed, full, tmp_path, capfd
):
    out = tmp_path / "x.json"
    document = performed(nothing, full, nothing, out=out)
    done = capfd.readouterr()
    assert (
        document.exit_code(errors.OK) == errors.MISSING
        and document.exit_code(errors.FAILED) == errors.FAILED
    )
    why = (
        f"cannot write {out}: No space left on device; it has the first 1 of 3 records"
    )
    assert f"gdn: the records could not be saved: {why}\n" in done.err
    assert (
        "x copy" in done.out
        and "copy" in done.out
        and f"records: {out}" not in done.out
    )
    # whole, and not half of three
    assert len(json.loads(out.read_text())["records"]) == 1


def test_a_run_that_this_machine_ends_shows_its_results(performed, tmp_path, capfd):
    def fail():
        raise OSError(
            errno.ENOSPC, "No space left on device", "/tmp/gdn-x/request.json"
        )

    with pytest.raises(
        MissingError,
        match="this machine cannot go on: .*No space left on device: '/tmp/gdn-x",
    ):
        performed(nothing, fail, out=tmp_path / "x.json")
    assert "copy" in capfd.readouterr().out
    assert len(json.loads((tmp_path / "x.json").read_text())["records"]) == 2


def test_a_history_that_cannot_take_it_is_exit_3(performed, tmp_path, capfd):
    assert performed(nothing, out=tmp_path / "a.json").exit_code(errors.OK) == errors.OK
    folder = paths.runs_dir()
    folder.rename(folder.with_name("away"))
    folder.write_text("a file where the folder should be")
    assert (
        performed(nothing, out=tmp_path / "b.json").exit_code(errors.OK)
        == errors.MISSING
    )
    assert "gdn: the history cannot be written: " in capfd.readouterr().err
    assert (tmp_path / "b.json").is_file()


_RUN = "run", "--algo", "pt-reference", "-w", "0", "-w", "1"


@pytest.mark.torch
@pytest.mark.slow
def test_a_stream_gets_one_document_at_the_end(tmp_path, gdn):
    done = gdn(*_RUN, "--out", "/dev/stdout")
    document, end = json.JSONDecoder().raw_decode(done.out)
    assert (
        done.code == 0 and len(document["records"]) == 2 and not document["interrupted"]
    )
    assert "pt-reference" in done.out[end:] and '"schema"' not in done.out[end:]
    refused = gdn(*_RUN, "--out", "/dev/stdout", "--json")
    assert (
        refused.code == errors.USAGE
        and refused.no_result
        and "--json has stdout to itself" in refused.err
    )


@pytest.mark.torch
@pytest.mark.slow
def test_a_device_as_out_stays_one_and_a_full_one_is_exit_3(gdn):
    assert gdn(*_RUN, "--out", "/dev/null").code == 0
    done = gdn(*_RUN, "--out", "/dev/full")
    assert done.code == errors.MISSING and "passed" in done.out
    assert (
        done.complaints
        == "gdn: the records could not be saved: cannot write /dev/full: No space left on"
        " device\n"
    )
    assert all(
        os.path.exists(name) and not os.path.isfile(name)
        for name in ("/dev/null", "/dev/full")
    )


@pytest.mark.slow
def test_a_screen_that_cannot_be_written_to_is_exit_3():
    with open("/dev/full", "w") as out:
        for args in (["list"], ["list", "--json"], ["--help"]):
            command = [sys.executable, "-m", "gdn_cli", *args]
            done = subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env=helpers.environment(),
            )
            assert done.returncode == errors.MISSING
            assert (
                done.stderr == "gdn: cannot write the output: No space left on device\n"
            )


# --- packing, drawing, exporting


def limited(kilobytes: int, *args, cwd) -> helpers.Done:
    """`gdn ARGS` where no file may hold more: a write comes half through, then fails."""
    command = [
        "bash",
        "-c",
        f'ulimit -f {kilobytes}; exec "$@"',
        "bash",
        sys.executable,
        "-m",
        "gdn_cli",
        *args,
    ]
    # Python keeps bytecode that was half written, and no process can read it then
    env = helpers.environment(PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    return helpers.Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("args", "file"),
    [
        (["pack", "--algo", "cpp-v1", "-o", "x.json"], "x.json"),
        (["report", "a.json", "-o", "x.html"], "x.html"),
        (["report", "a.json", "-o", "x.csv"], "x.csv"),
        (["report", "--update", "x.md"], "x.md"),
    ],
)
@pytest.mark.sampled(4)
def test_an_older_file_outlives_a_write_that_breaks_off(args, file, tmp_path):
    reports.write(tmp_path, reports.bench(), "a.json")
    old = "<!-- gdn report a.json -->\n<!-- /gdn report -->\n" + "old\n" * 400
    (tmp_path / file).write_text(old)
    before = sorted(p.name for p in tmp_path.iterdir())
    done = limited(1, *args, cwd=tmp_path)
    assert (done.code, done.out) == (errors.MISSING, ""), done.err
    assert (
        f"cannot write {file}: File too large" in done.err
        and "Traceback" not in done.err
    )
    assert (tmp_path / file).read_text() == old and sorted(
        p.name for p in tmp_path.iterdir()
    ) == before


def test_a_solution_can_go_into_a_pipe(gdn, tmp_path):
    done = gdn("pack", "--algo", "cpp-v1", "-o", "/dev/stdout", cwd=tmp_path)
    assert done.code == 0 and json.loads(done.out)["name"] == "gdn_decode-cpp-v1"
    assert done.err.startswith("gdn: /dev/stdout: gdn_decode-cpp-v1")
    done = gdn("pack", "--algo", "cpp-v1", "-o", "/dev/stdout", "--json")
    assert done.code == errors.USAGE and done.no_result
    assert "--json has stdout to itself" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("../x.png", "leads out of"),
        ("{tmp}/x.png", "leads out of"),
        ("away/x.png", "leads out of"),
        ("link.png", "leads out of"),
        ("x.sh", "a figure goes into a file that ends in .png"),
        ("README.md", "a figure goes into a file that ends in .png"),
        ("-", "a figure goes into a file that ends in .png"),
    ],
)
@pytest.mark.sampled(5)
def test_update_writes_below_its_folder_and_only_figures(out, says, tmp_path, gdn):
    folder = tmp_path / "docs"
    folder.mkdir()
    reports.write(folder, reports.bench(), "a.json")
    (folder / "away").symlink_to(tmp_path)
    (folder / "link.png").symlink_to("../x.png")
    (tmp_path / "x.png").write_text("theirs")
    text = "<!-- gdn report a.json -->\nold\n<!-- /gdn report -->\n"
    text += (
        f"<!-- gdn report a.json --format png -o {out.format(tmp=tmp_path)} -->\n<!-- /gdn report"
        " -->\n"
    )
    (folder / "README.md").write_text(text)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    done = gdn("report", "--update", folder / "README.md")
    assert (
        (done.code, done.out) == (errors.USAGE, "")
        and "README.md:4: " in done.err
        and says in done.err
    )
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_new_algo_is_there_whole_or_not_at_all(tmp_path, full):
    full()
    with pytest.raises(MissingError, match="No space left on device"):
        scaffold.new(KNOWN, "mine", KNOWN.find("cpp-v1"), tmp_path)
    assert list((tmp_path / "gdn_decode").iterdir()) == []
    full(False)
    folder = scaffold.new(KNOWN, "mine", KNOWN.find("cpp-v1"), tmp_path)
    # those that it shares, too
    sources = {p.name for p in pack.sources(KNOWN.find("cpp-v1"))}
    assert {p.name for p in folder.iterdir()} == sources | {"algo.toml"}


# --- gdn tune

race = test_tune.race
by_tile = test_tune.by_tile


def test_a_journal_that_cannot_be_written_costs_no_measurement(race, monkeypatch):
    append, calls = files.append_text, []

    def fails_at_first(path, text):
        calls.append(text)
        if 3 <= len(calls) < 6:
            raise MissingError(f"cannot write {path}: No space left on device")
        append(path, text)

    monkeypatch.setattr(files, "append_text", fails_at_first)
    work = race(test_tune.Workers(by_tile), 1)
    assert work.choices and work.journal.unsaved is None
    lines = [json.loads(line) for line in work.journal.path.read_text().splitlines()]
    assert (
        lines[1:] == [msgspec.to_builtins(line) for line in work.journal.lines]
        and len(lines) > 10
    )


def key() -> journal.Key:
    return journal.Key(
        op="op", algo="a", source_hash="0", space=journal.Space(("n",), None, {}), gpu="a CPU", driver=None,
        versions={}, dataset=None, tier="wall", l2="cold", seconds=1.0, target=0.01,
    )  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"step": "else"}\n',
        b'{"step": "time", "round": 1}\n',
        b"[" * 5000 + b"\n",
        b'{"step": "check", "na\n',
    ],
)
def test_a_damaged_journal_is_one_clear_line_and_loses_nothing(
    damage, tmp_path, monkeypatch
):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    first = journal.Journal(key())
    first.add(journal.Check("n", "w", Status.PASSED, None, None))
    whole = first.path.read_bytes()
    first.path.write_bytes(
        whole[: whole.index(b"\n") + 1] + damage + whole[whole.index(b"\n") + 1 :]
    )
    damaged = first.path.read_bytes()
    with pytest.raises(MissingError) as e:
        journal.Journal(key())
    assert (
        str(first.path) in e.value.message
        and "the file is damaged" in e.value.message
        and "--fresh" in e.value.hint
    )
    assert "\n" not in str(e.value) and first.path.read_bytes() == damaged
    assert journal.Journal(key(), fresh=True).kept == {"check": 0, "time": 0}


def test_half_a_line_at_the_end_is_what_a_killed_run_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    first = journal.Journal(key())
    with first.path.open("a") as f:
        f.write('{"step": "check", "na')
    assert journal.Journal(key()).lines == first.lines
    assert first.path.read_text().endswith("}\n")


def test_tune_writes_its_files_only_into_the_algo_s_folder(race, tmp_path):
    (tmp_path / "theirs").write_text('{"gpus": {}}')
    (race.folder / "tuning.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="tuning.json leads out of"):
        race(test_tune.Workers(by_tile), 1)
    assert (tmp_path / "theirs").read_text() == '{"gpus": {}}'


# --- profiles


@pytest.fixture
def kept_profile(tmp_path):
    """A profile that is kept in `tmp_path`."""
    profile = profiles.typed(profiles.v4())
    folder = tmp_path / profile.name
    folder.mkdir()
    return session.keep(folder, profile)


def test_a_profile_that_cannot_be_kept_is_shown_and_exit_3(
    kept_profile, full, tmp_path
):
    assert not kept_profile.unkept and session.exit_code([kept_profile]) == errors.OK
    full()
    again = session.keep(tmp_path, kept_profile)
    assert again.unkept.endswith(
        "cannot write " + str(tmp_path / "profile.json") + ": No space left on device"
    )
    assert session.exit_code([again]) == errors.MISSING
    assert (
        session.exit_code([profiles.typed(profiles.v4(status="wrong")), again])
        == errors.FAILED
    )


@pytest.mark.parametrize("text", ["{", '{"schema": 99, "tool": "ncu"}', "[" * 5000])
def test_a_damaged_profile_is_one_clear_line_and_hides_no_other(
    text, kept_profile, tmp_path, gdn
):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "profile.json").write_text(text)
    done = gdn("profile", "--list", "--json", "--out", tmp_path)
    assert done.code == errors.MISSING and [
        row["name"] for row in done.json["profiles"]
    ] == [kept_profile.name]
    assert (
        done.err.startswith(f"gdn: {tmp_path}/bad/profile.json")
        and len(done.err.splitlines()) == 1
    )
    done = gdn("profile", "bad", "--out", tmp_path)
    assert (done.code, done.out) == (
        errors.MISSING,
        "",
    ) and f"{tmp_path}/bad/profile.json" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("status", "fine", "$.status"),
        ("schema", 2, "$.schema"),
    ],
)
def test_a_damaged_value_of_a_profile_is_named(key, value, message, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profiles.v4() | {key: value}))
    with pytest.raises(MissingError) as e:
        session.load(file)
    assert e.value.message.startswith(f"{file}: ") and message in e.value.message


def test_a_profile_of_a_tool_that_is_gone_is_shown(tmp_path, gdn):
    folder = tmp_path / "old"
    folder.mkdir()
    document = profiles.v4(name="old", tool="nsys")
    (folder / "profile.json").write_text(json.dumps(document))
    done = gdn("profile", "old", "--out", tmp_path)
    assert done.code == errors.OK and done.err == ""
    assert "nsys" in done.out and "gdn_decode_v4" in done.out
    assert gdn("profile", "--list", "--out", tmp_path).code == errors.OK


RECORDED = sorted(
    (helpers.OURS.parent / "results" / "h200" / "profiles").glob("*-B*.json")
)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_recorded_profile_is_read_and_written_without_loss(file):
    document = json.loads(file.read_text())
    read = msgspec.to_builtins(profiles.typed(document))
    assert json.loads(json.dumps(read)) == document and list(read) == list(document)


# --- --algo that names nothing


@pytest.mark.parametrize("value", ["", " , "])
@pytest.mark.parametrize(
    "command",
    [
        "run", "bench", "tune", "pack", "profile", "history", "report a.json",
        pytest.param("data build d", marks=pytest.mark.torch),
    ],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_an_algo_that_names_nothing_is_wrong_usage(command, value, tmp_path, gdn):
    reports.write(tmp_path, reports.bench(), "a.json")
    done = gdn(*command.split(), "--algo", value, cwd=tmp_path)
    assert (done.code, done.out) == (errors.USAGE, "") and "Traceback" not in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json"]


def test_an_empty_variable_is_one_that_is_not_set(tmp_path, gdn):
    assert (
        gdn(
            "pack",
            "--algo",
            "pt-reference",
            "-o",
            tmp_path / "x.json",
            env={"ALGO": ""},
        ).code
        == 0
    )
    done = gdn("list", env={"ALGO": ""})
    assert done.code == 0
    with pytest.raises(UsageError, match="--algo ',' names nothing"):
        planning.choose(KNOWN, ",", None, [], "cpu", timed=False)
    assert planning.choose(KNOWN, None, None, [], "cpu", timed=False)[0]
