"""`--engine`: a stand-in for srun that answers, that talks, that dies, and one that
runs gdn as srun would.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import building
import helpers
import pytest
from msgspec import structs
from remote.test_remote import job, opened

from gdn_cli import errors
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.records.store import Writer
from gdn_cli.remote import through, wire
from gdn_cli.run import execute, jobs, planning
from gdn_cli.schema.record_types import Environment, Status

WHERE = Environment(gpu="NVIDIA H100", gpu_uuid="GPU-7", where="slurm")


def line(content) -> str:
    return "gdn-parcel: " + base64.b64encode(wire.encode(content)).decode()


def engine_of(tmp_path, script: str, said: list | None = None) -> through.Through:
    """An engine whose command is a shell script; it keeps its stdin and its words."""
    file = tmp_path / "srun"
    keep = f'cat > {tmp_path}/parcel\necho "$@" > {tmp_path}/words\n'
    file.write_text("#!/bin/sh\n" + keep + textwrap.dedent(script))
    file.chmod(0o755)
    how = through.Settings(
        (str(file), "--time={minutes}", "{python}", "worker"), True, 120
    )
    return through.Through("slurm", how, (said if said is not None else []).append)


def sent(tmp_path) -> wire.Parcel:
    return opened(base64.b64decode((tmp_path / "parcel").read_bytes()))


def test_all_jobs_travel_in_one_parcel_and_records_come_as_they_are_made(tmp_path):
    a, b = job("cuda-v1", "cuda", 2), job("cuda-v4", "cuda", 2)
    made = [building.record("cuda-v1", 2.0, w.uuid) for w in a.workloads]
    others = [building.record("cuda-v4", 3.0, w.uuid) for w in b.workloads]
    done = [jobs.Outcome(Status.DONE, None, r, WHERE) for r in (made, others)]
    first, reply = line(wire.Made(0, made[0], WHERE)), line(wire.Reply(outcomes=done))
    answer = f"a banner of the site\n{first}\nmore talk\n{reply}\n"
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
    assert content.where == "slurm"
    assert (content.gpu, content.cache, content.image) == (None, None, None)
    minutes = (300 + 300 + 120) // 60
    words = (tmp_path / "words").read_text()
    assert words == f"--time={minutes} {sys.executable} worker\n"
    assert said[-1] == "gdn_decode/cuda-v4: 2 of 2 passed, NVIDIA H100 (slurm)"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Invalid partition' >&2; exit 1", "1 and without a reply: Invalid par"),
        ("echo gdn-parcel: rubbish", "srun ended with 0 and without a reply"),
        ("kill -9 $$", "srun ended with -9 and without a reply"),
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


def passing(tmp_path, then: str, said: list | None = None) -> jobs.Outcome:
    """The outcome of a job whose command replies, and then does something else."""
    mine = job("cuda-v4", "cuda", 2)
    records = [building.record("cuda-v4", 2.0, w.uuid) for w in mine.workloads]
    reply = wire.Reply(outcomes=[jobs.Outcome(Status.DONE, None, records, WHERE)])
    (tmp_path / "answer").write_text(line(reply) + "\n")
    engine = engine_of(tmp_path, f"cat {tmp_path}/answer\n{then}", said)
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
    mine = job("cuda-v4", "cuda", 2)
    records = [building.record("cuda-v4", 2.0, w.uuid) for w in mine.workloads]
    reply = wire.Reply(outcomes=[jobs.Outcome(Status.DONE, None, records, WHERE)])
    (tmp_path / "answer").write_text(line(reply) + "\n")
    ((_, outcome),) = engine_of(tmp_path, f"cat {tmp_path}/answer\n{then}")([mine])
    assert (outcome.status, len(outcome.records)) == ("done", 2)


def test_a_command_without_a_reply_is_ended_at_the_limit(tmp_path, hasty):
    """The limit is the sum of the time limits, and counts again from the first record:
    until then it may queue.
    """
    mine = replace(job("cuda-v4", "cuda", 2), timeout_s=0.05)
    first = began(tmp_path, mine)

    def ended(script: str, **how) -> jobs.Outcome:
        engine = engine_of(tmp_path, script)
        engine.how = structs.replace(engine.how, start_s=0, **how)
        ((_, outcome),) = engine([mine])
        assert (outcome.status, outcome.code) == ("remote_failed", errors.REMOTE)
        assert "was ended: no reply in its time; --timeout gives" in outcome.reason
        return outcome

    assert ended(f"cat {tmp_path}/answer\nsleep 20", queue_s=3600).records == [first]
    assert ended("sleep 20").records == []


@pytest.mark.parametrize(
    ("script", "end"),
    [
        # a message without an end
        ("(printf 'gdn-parcel: '; yes) | head -c 3000000 | tr -d '\\n'", "a reply"),
        # of many words the ends are kept
        (
            "yes error | head -c 3000000 >&2; printf '\033[2Jthe last' >&2; exit 7",
            "srun ended with 7 and without a reply: \x1b[2Jthe last",
        ),
    ],
)
def test_more_than_can_be_is_not_kept(script, end, tmp_path, monkeypatch):
    monkeypatch.setattr(through, "_LINE", 1 << 20)
    ((_, outcome),) = engine_of(tmp_path, script)([job("cuda-v4", "cuda", 2)])
    assert outcome.reason.endswith(end) and len(outcome.reason) < 500


RUN = "run pt-reference --device cpu -w 0 --engine slurm"


def path(folder) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


# --- configs/engines.toml


WORDS = ["{nope}", "{", "}", "a{}", "{0}", "{python!r}", "{minutes:d}", "{python.x}"]


@pytest.mark.parametrize("word", [*WORDS, "{python[0]}", "a\\u0000b"])
def test_a_word_that_cannot_be_filled_in_names_file_and_key(
    word, tmp_path, monkeypatch
):
    file = tmp_path / "engines.toml"
    file.write_text(f'[mine]\ncommand = ["ssh", "{word}"]\ncuda = true\nstart_s = 1\n')
    monkeypatch.setattr(through.paths, "CONFIGS_DIR", tmp_path)
    with pytest.raises(UsageError) as e:
        through.settings("mine")
    says = f"{file}: [mine]: command.1: expected text without NUL, with {{python}}"
    assert str(e.value).startswith(says)


def test_what_the_file_of_engines_has_and_what_it_lacks(tmp_path):
    how = through.settings("slurm")
    assert how.command[0] == "srun" and how.command[-1] == "--parcel" and how.cuda
    with pytest.raises(UsageError, match="unknown engine 'slrm'; did you mean slurm"):
        through.settings("slrm")
    blind = through.Through("cpus", through.Settings(("x",), False, 1), print)
    place = blind.place(helpers.REGISTRY.find("cuda-v4"))
    assert place.reason == "engine cpus has no GPU"
    assert blind.place(helpers.REGISTRY.find("cpp-v1")) == inventory.Place("cpu")
    nothing = through.Settings((str(tmp_path / "nothing"),), True, 1)
    with pytest.raises(MissingError, match="cannot start .*nothing: No such file"):
        list(through.Through("gone", nothing, print)([job("cuda-v4", "cuda")]))


def test_ctrl_c_ends_the_command(tmp_path):
    """And keeps what came."""
    engine_of(
        tmp_path,
        f"""
        trap 'echo ended > {tmp_path}/ended; exit' TERM
        touch {tmp_path}/there
        while :; do sleep 0.05; done
        """,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", *RUN.split()],
        env=helpers.environment(PATH=path(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + helpers.PATIENCE_S
    while not (tmp_path / "there").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=helpers.PATIENCE_S)
    assert process.returncode == errors.INTERRUPTED and "Traceback" not in err
    assert (tmp_path / "ended").exists()


@pytest.mark.slow
def test_a_stand_in_for_srun_runs_gdn_itself(tmp_path):
    srun = tmp_path / "srun"
    skip = 'while [ "${1#--}" != "$1" ]; do shift; done'
    srun.write_text(f'#!/bin/sh\necho "$@" >&2\n{skip}\nexec "$@"\n')
    srun.chmod(0o755)
    args = RUN.replace("run", "bench", 1) + " --seconds 0.05 --json"
    done = helpers.gdn(*args.split(), env={"PATH": path(tmp_path)})
    document = json.loads(done.out)
    assert done.code == 0 and {r["status"] for r in document["records"]} == {"passed"}
    names = {r["algo"] for r in document["records"]}
    assert names == {"copy", "empty", "copy-rate", "pt-reference"}
    assert document["environments"]["cpu"]["where"] == "slurm"
    assert "modal" not in document
