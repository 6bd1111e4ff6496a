"""An engine that is a command: stand-ins for ssh that answer, that talk, that die, that
are silent, and one that runs gdn as ssh would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import building
import helpers
import pytest
from msgspec import structs
from remote.test_remote import job, opened

from gdn_cli import errors, paths
from gdn_cli.errors import MissingError, RemoteError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.records.store import Writer
from gdn_cli.remote import engines, host, through, wire
from gdn_cli.run import execute, jobs, planning
from gdn_cli.schema.record_types import Environment, Status

WHERE = Environment(gpu="NVIDIA H100", gpu_uuid="GPU-7", where="far")
HELLO = wire.Hello(host="far", gpus=["NVIDIA H100"], version="1")


def line(content) -> str:
    return wire.marked(wire.encode(content)).decode().rstrip()


EMPTY = line(wire.Reply(outcomes=[jobs.Outcome(Status.DONE)]))


def engine_of(tmp_path, script: str, said: list | None = None) -> through.Through:
    """An engine whose command is a shell script; it keeps its stdin and its words."""
    file = tmp_path / "ssh"
    keep = f'head -n 1 > {tmp_path}/parcel\necho "$@" > {tmp_path}/words\n'
    file.write_text("#!/bin/sh\n" + keep + textwrap.dedent(script))
    file.chmod(0o755)
    words = (str(file), "--time={minutes}", "{python}", "worker")
    how = engines.Command(command=words)
    return through.Through(
        name="far", config=how, say=(said if said is not None else []).append
    )


def sent(tmp_path) -> wire.Parcel:
    return opened(wire.unmarked((tmp_path / "parcel").read_bytes()))


def test_all_jobs_travel_in_one_parcel_and_records_come_as_they_are_made(tmp_path):
    a, b = job("cuda-v1", "cuda", 2), job("cuda-v4", "cuda", 2)
    made = [building.record("cuda-v1", 2.0, w.uuid) for w in a.workloads]
    others = [building.record("cuda-v4", 3.0, w.uuid) for w in b.workloads]
    done = [jobs.Outcome(Status.DONE, None, r, WHERE) for r in (made, others)]
    first, reply = line(wire.Made(0, made[0], WHERE)), line(wire.Reply(outcomes=done))
    answer = f"a banner of the site\n{line(HELLO)}\n{first}\nmore talk\n{reply}\n"
    (tmp_path / "answer").write_text(answer)
    said, came = [], []
    engine = engine_of(tmp_path, f"cat {tmp_path}/answer", said)
    got = list(engine([a, b], lambda *record: came.append(record)))
    assert [(j, o.status, len(o.records)) for j, o in got] == [
        (a, "done", 2),
        (b, "done", 2),
    ]
    assert came == [(a, made[0], WHERE)]
    content = sent(tmp_path)
    assert [piece.request.name for piece in content.jobs] == ["cuda-v1", "cuda-v4"]
    assert content.where == "far"
    assert (content.gpu, content.cache, content.image) == (None, None, None)
    minutes = (300 + 300 + 120) // 60
    words = (tmp_path / "words").read_text()
    assert words == f"--time={minutes} {sys.executable} worker\n"
    assert said[1] == "far: runs on far (NVIDIA H100, gdn 1)"
    assert said[-1] == "gdn_decode/cuda-v4: 2 of 2 passed, NVIDIA H100 (far)"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Invalid partition' >&2; exit 1", "1 and without a reply: Invalid par"),
        ("echo gdn-parcel: rubbish", "ssh ended with 0 and without a reply"),
        ("kill -9 $$", "ssh ended with -9 and without a reply"),
        (f"echo '{EMPTY}'", "what came back is not a reply of gdn: it has 0 records"),
    ],
)
def test_a_command_that_does_not_answer_keeps_what_came(script, why, tmp_path):
    mine = job("cuda-v4", "cuda", 2)
    first = began(tmp_path, mine)
    writer = Writer(building.document(), tmp_path / "run.json")
    engine = engine_of(tmp_path, f"cat {tmp_path}/answer\n{script}")
    execute.run(planning.Plan([mine], [], []), writer, lambda *_: None, print, engine)
    kept, lost = writer.document.records
    assert (kept.uuid, kept.gpu.uuid) == (first.uuid, "GPU-7")
    assert (lost.status, lost.code) == ("remote_failed", errors.REMOTE)
    assert why in lost.reason and lost.unfinished == 1
    assert execute.exit_code(writer.document, True) == errors.REMOTE


def began(tmp_path, mine: jobs.Job):
    """The first record of a job, in a file as a command prints it."""
    first = building.record("cuda-v4", 2.0, mine.workloads[0].uuid)
    (tmp_path / "answer").write_text(line(wire.Made(0, first, WHERE)) + "\n")
    return first


# --- a command that does not end, or says too much


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(through, "_GRACE_S", 0.05)
    monkeypatch.setattr(through, "_END_S", 0.05)


def passing(
    tmp_path, then: str, said: list | None = None, before: str = "true"
) -> jobs.Outcome:
    """The outcome of a job whose command replies, and then does something else."""
    mine = job("cuda-v4", "cuda", 2)
    records = [building.record("cuda-v4", 2.0, w.uuid) for w in mine.workloads]
    reply = wire.Reply(outcomes=[jobs.Outcome(Status.DONE, None, records, WHERE)])
    (tmp_path / "answer").write_text(line(reply) + "\n")
    script = f"{before}\ncat {tmp_path}/answer\n{then}"
    engine = engine_of(tmp_path, script, said)
    ((_, outcome),) = engine([mine])
    return outcome


@pytest.mark.parametrize(
    "then",
    [
        "sleep 20",
        "trap '' TERM; sleep 20 & wait",
        "exec >&- 2>&-; sleep 20",
        "yes",
        # what it leaves behind holds both pipes open, and even talks on
        "sleep 20 &\nyes >&2 &",
    ],
)
def test_a_command_has_a_moment_to_end_after_its_reply(then, tmp_path, hasty):
    outcome = passing(tmp_path, then)
    assert (outcome.status, len(outcome.records)) == ("done", 2)


def test_a_command_without_a_reply_is_ended_at_the_limit(tmp_path, hasty):
    """The limit is the sum of the time limits, and counts again from the first record:
    until then it may queue.
    """
    mine = replace(job("cuda-v4", "cuda", 2), timeout_s=0.05)
    first = began(tmp_path, mine)

    def ended(script: str, **how) -> jobs.Outcome:
        engine = engine_of(tmp_path, script)
        # less than the least of the file, which is a second
        engine.config = structs.replace(engine.config, start_s=0.05, **how)
        ((_, outcome),) = engine([mine])
        assert (outcome.status, outcome.code) == ("remote_failed", errors.REMOTE)
        assert f"was ended: no reply in its time; {option} gives" in outcome.reason
        return outcome

    hello = f"echo '{line(HELLO)}'"
    option = "--timeout"
    came = ended(f"{hello}; cat {tmp_path}/answer\nsleep 20", queue_s=3600)
    assert [record.uuid for record in came.records] == [first.uuid]
    option = "start_s of its engine"
    assert ended("sleep 20").records == []


def test_a_reply_of_another_gdn_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "SCHEMA", 0)
    other = line(HELLO)
    monkeypatch.undo()
    ((_, outcome),) = engine_of(tmp_path, f"echo '{other}'")([job("cuda-v4", "cuda")])
    assert outcome.reason.startswith("the other side speaks schema 0, this gdn")


def test_a_link_that_is_silent_is_given_up(tmp_path, hasty, monkeypatch):
    monkeypatch.setattr(through, "SILENCE_S", 0.2)
    engine = engine_of(tmp_path, f"echo '{line(HELLO)}'; sleep 20")
    ((_, outcome),) = engine([job("cuda-v4", "cuda", 2)])
    assert outcome.reason.endswith("was ended: it was silent for 0.2 s")


def test_beats_are_no_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(through, "SILENCE_S", 1.0)
    beats = "for i in 1 2 3 4 5 6 7 8; do echo gdn-beat; sleep 0.2; done"
    outcome = passing(tmp_path, "", before=f"echo '{line(HELLO)}'; {beats}")
    assert outcome.status == "done"


def test_a_machine_without_a_gpu_is_refused_at_its_hello(tmp_path):
    blind = structs.replace(HELLO, gpus=[])
    engine = engine_of(tmp_path, f"echo '{line(blind)}'; sleep 20")
    with pytest.raises(RemoteError, match="far has no GPU; name a partition"):
        list(engine([job("cuda-v4", "cuda"), job("cuda-v1", "cuda")]))


def test_a_lock_that_the_other_side_waits_for_is_said(tmp_path):
    waits = structs.replace(HELLO, waits="the CPU is in use by `gdn bench`; waiting")
    said = []
    passing(tmp_path, "", said, before=f"echo '{line(waits)}'")
    assert "far: the CPU is in use by `gdn bench`; waiting" in said


@pytest.mark.parametrize(
    ("script", "end"),
    [
        # a message without an end
        ("(printf 'gdn-parcel: '; yes) | head -c 3000000 | tr -d '\\n'", "a reply"),
        # of many words the ends are kept
        (
            "yes error | head -c 3000000 >&2; printf '\033[2Jthe last' >&2; exit 7",
            "ssh ended with 7 and without a reply: \x1b[2Jthe last",
        ),
    ],
)
def test_more_than_can_be_is_not_kept(script, end, tmp_path, monkeypatch):
    monkeypatch.setattr(through, "_LINE", 1 << 20)
    ((_, outcome),) = engine_of(tmp_path, script)([job("cuda-v4", "cuda", 2)])
    assert outcome.reason.endswith(end) and len(outcome.reason) < 500


# --- configs/engines.toml


WORDS = ["{nope}", "{", "}", "a{}", "{0}", "{python!r}", "{minutes:d}", "{python.x}"]


@pytest.mark.parametrize("word", [*WORDS, "{python[0]}", "a\\u0000b"])
def test_a_word_that_cannot_be_filled_in_names_file_and_key(
    word, tmp_path, monkeypatch
):
    file = tmp_path / "engines.toml"
    file.write_text(f'[mine]\ncommand = ["ssh", "{word}"]\ncuda = true\nstart_s = 1\n')
    monkeypatch.setattr(paths, "CONFIGS_DIR", tmp_path)
    with pytest.raises(UsageError) as e:
        engines.table("mine")
    says = f"{file}: [mine]: command.1: expected text without NUL, with {{python}}"
    assert str(e.value).startswith(says)


def test_what_the_file_of_engines_has_and_what_it_lacks(tmp_path):
    assert engines.table("slurm") == engines.Cluster(submitit="slurm")
    with pytest.raises(UsageError, match="unknown engine 'slrm'; did you mean slurm"):
        engines.table("slrm")
    blind = through.Through(
        name="cpus", config=engines.Command(command=("x",), cuda=False), say=print
    )
    place = blind.place(helpers.REGISTRY.find("cuda-v4"))
    assert place.reason == "engine cpus has no GPU"
    assert blind.place(helpers.REGISTRY.find("cpp-v1")) == inventory.Place("cpu")
    nothing = engines.Command(command=(str(tmp_path / "nothing"),))
    with pytest.raises(MissingError, match="cannot start .*nothing: No such file"):
        list(
            through.Through(name="gone", config=nothing, say=print)(
                [job("cuda-v4", "cuda")]
            )
        )


# --- the other side


@pytest.fixture
def own(tmp_path):
    """GDN_HOME with an engine that runs gdn as ssh would."""
    folder = tmp_path / "home" / "configs"
    folder.mkdir(parents=True)
    far = f'[far]\ncommand = ["{tmp_path}/ssh"]\ncuda = false\n'
    (folder / "engines.toml").write_text(far)
    file = tmp_path / "ssh"
    file.write_text(f"#!/bin/sh\nexec {sys.executable} -m gdn_cli worker --parcel\n")
    file.chmod(0o755)
    return {"GDN_HOME": str(tmp_path / "home"), "GDN_LOCK_DIR": str(tmp_path)}


WAITS = """import os, time
from .right import run as right


def run(*args):
    open(HERE, "w").write(str(os.getpid()))
    while True:
        time.sleep(0.05)
"""


def until(true):
    end = time.monotonic() + helpers.PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pid: str) -> bool:
    """Whether it has ended; where orphans become children of this process it stays a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.fixture
def waiting(own, tmp_path):
    """(process of a command whose algo waits there, that one's pid), of keywords of Popen."""
    here = tmp_path / "pid"
    source = WAITS.replace("HERE", repr(str(here)))
    helpers.write_algo(tmp_path / "algos", "waits", source)
    words = f"run waits --algos {tmp_path}/algos --device cpu -w 0 --engine far"
    command = [sys.executable, "-m", "gdn_cli", *words.split()]

    def start(**how):
        env = helpers.environment(**own)
        process = subprocess.Popen(command, env=env, **how)
        until(lambda: here.exists() and here.read_text())
        return process, here.read_text()

    return start


@pytest.mark.slow
def test_the_work_there_ends_when_the_command_here_does(waiting):
    """However it ends: its stdin does then."""
    process, there = waiting(stderr=subprocess.DEVNULL)
    process.kill()
    process.wait()
    until(lambda: gone(there))


@pytest.mark.slow
def test_ctrl_c_keeps_what_came_and_says_so(waiting):
    process, there = waiting(
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=helpers.PATIENCE_S)
    assert process.returncode == errors.INTERRUPTED and "Traceback" not in err
    until(lambda: gone(there))


def test_the_lock_of_the_machine_is_taken_there(monkeypatch, tmp_path):
    monkeypatch.setenv("GDN_LOCK_DIR", str(tmp_path))
    parcel = wire.Parcel(
        gpu=None,
        cache=None,
        env={},
        jobs=[wire.Piece.from_job(job("cpp-v1", "cpu", 1, "bench", ("wall",)))],
    )
    kept, holders = [], []

    def served(data, keep, before):
        holders.append((tmp_path / "gdn-cpu.lock").read_text())
        return b"done"

    monkeypatch.setattr(host.container, "serve", served)
    assert host.serve(wire.encode(parcel), kept.append) == b"done"
    assert f'"pid": {os.getpid()}' in holders[0]
    assert [hello.waits for hello in wire.readable(kept, wire.Hello)] == [None, None]


def test_another_gdn_there_is_one_line(monkeypatch):
    kept = []
    monkeypatch.setattr(wire, "SCHEMA", 0)
    parcel = wire.encode(wire.Parcel(gpu=None, cache=None, env={}, jobs=[]))
    monkeypatch.undo()
    reply = wire.decode(host.serve(parcel, kept.append), wire.Reply)
    assert "the other side speaks schema 0" in reply.lost


@pytest.mark.slow
def test_a_bench_through_a_pipe(own):
    words = "bench pt-reference --device cpu -w 0 --engine far --seconds 0.05 --json"
    done = helpers.gdn(*words.split(), env=own)
    assert done.code == 0, done.err
    assert {r["status"] for r in done.json["records"]} == {"passed"}
    names = {r["algo"] for r in done.json["records"]}
    assert names == {"copy", "empty", "copy-rate", "pt-reference"}
    assert done.json["environments"]["cpu"]["where"] == "far"
    assert "modal" not in done.json
