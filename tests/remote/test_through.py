"""`--engine`: a stand-in for srun that answers, that talks, that dies, and one that runs gdn as srun would."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import building
import helpers
import pytest
from remote.test_remote import job, opened

from gdn_cli import errors
from gdn_cli.errors import MissingError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.records.store import Writer
from gdn_cli.remote import through, wire
from gdn_cli.remote.engine import Engine
from gdn_cli.run import elsewhere, execute, jobs, planning
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
    how = through.Settings((str(file), "--time={minutes}", "{python}", "worker"), True, 120)
    return through.Through("slurm", how, (said if said is not None else []).append)


def sent(tmp_path) -> wire.Parcel:
    return opened(base64.b64decode((tmp_path / "parcel").read_bytes()))


def test_all_jobs_travel_in_one_parcel_and_records_come_as_they_are_made(tmp_path):
    a, b = job("cuda-v1", "cuda", 2), job("cuda-v4", "cuda", 2)
    made = [building.record("cuda-v1", 2.0, w.uuid) for w in a.workloads]
    others = [building.record("cuda-v4", 3.0, w.uuid) for w in b.workloads]
    reply = wire.Reply(outcomes=[jobs.Outcome(Status.DONE, None, r, WHERE) for r in (made, others)])
    (tmp_path / "answer").write_text(
        "\n".join(["a banner of the site", line(wire.Made(0, made[0], WHERE)), "more talk", line(reply), ""])
    )
    said, came = [], []
    engine = engine_of(tmp_path, f"cat {tmp_path}/answer", said)
    got = list(engine([a, b], lambda job, record, env: came.append((job.algo.name, record.uuid, env.where))))
    assert [(j.algo.name, o.status, len(o.records)) for j, o in got] == [("cuda-v1", "done", 2), ("cuda-v4", "done", 2)]
    assert came == [("cuda-v1", made[0].uuid, "slurm")]
    content = sent(tmp_path)
    assert [piece.request.name for piece in content.jobs] == ["cuda-v1", "cuda-v4"]
    assert (content.where, content.gpu, content.cache, content.image) == ("slurm", None, None, None)
    minutes = (300 + 300 + 120) // 60
    assert (tmp_path / "words").read_text() == f"--time={minutes} {sys.executable} worker\n"
    assert said[-1] == "gdn_decode/cuda-v4: 2 of 2 passed, NVIDIA H100 (slurm)"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'srun: error: Invalid partition' >&2; exit 1", "srun ended with 1 and without a reply: srun: error: In"),
        ("echo gdn-parcel: rubbish", "srun ended with 0 and without a reply"),
        ("kill -9 $$", "srun ended with -9 and without a reply"),
        (":", "srun ended with 0 and without a reply"),
    ],
)
def test_a_command_that_does_not_answer_keeps_what_came(script, why, tmp_path):
    mine = job("cuda-v4", "cuda", 2)
    first = building.record("cuda-v4", 2.0, mine.workloads[0].uuid)
    (tmp_path / "answer").write_text(line(wire.Made(0, first, WHERE)) + "\n")
    writer = Writer(building.document(), tmp_path / "run.json")
    engine = engine_of(tmp_path, f"cat {tmp_path}/answer\n{script}")
    execute.run(planning.Plan([mine], [], []), writer, lambda *_: None, print, engine)
    kept, lost = writer.document.records
    assert (kept.uuid, kept.gpu.uuid, lost.status, lost.code) == (first.uuid, "GPU-7", "remote_failed", errors.REMOTE)
    assert why in lost.reason and lost.unfinished == 1
    assert execute.exit_code(writer.document, True) == errors.REMOTE


def test_what_the_file_of_engines_has_and_what_it_lacks(tmp_path):
    how = through.settings("slurm")
    assert how.command[0] == "srun" and "--gpus=1" in how.command and how.command[-1] == "--parcel" and how.cuda
    with pytest.raises(UsageError, match="unknown engine 'slrm'; did you mean slurm"):
        through.settings("slrm")
    blind = through.Through("cpus", through.Settings(("x",), False, 1), print)
    assert blind.place(helpers.REGISTRY.find("cuda-v4")).reason == "engine cpus has no GPU"
    assert blind.place(helpers.REGISTRY.find("cpp-v1")) == inventory.Place("cpu")
    gone = through.Through("gone", through.Settings((str(tmp_path / "nothing"),), True, 1), lambda line: None)
    with pytest.raises(MissingError, match="cannot start .*nothing: No such file"):
        list(gone([job("cuda-v4", "cuda")]))


def test_both_engines_have_the_one_interface():
    assert issubclass(Engine, elsewhere.Elsewhere) and issubclass(through.Through, elsewhere.Elsewhere)
    assert not (Engine.__abstractmethods__ | through.Through.__abstractmethods__)


def test_ctrl_c_ends_the_command(tmp_path):
    """And keeps what came."""
    script = f"trap 'echo ended > {tmp_path}/ended; exit' TERM\ntouch {tmp_path}/there\nwhile :; do sleep 0.05; done"
    engine_of(tmp_path, script)
    env = helpers.environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", "run", "pt-reference", "--device", "cpu", "-w", "0", "--engine", "slurm"],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    end = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == errors.INTERRUPTED and "Traceback" not in err and (tmp_path / "ended").exists()


@pytest.mark.slow
def test_a_stand_in_for_srun_runs_gdn_itself(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@" >&2\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    args = ("pt-reference", "--device", "cpu", "-w", "0", "--seconds", "0.05", "--engine", "slurm", "--json")
    done = helpers.gdn("bench", *args, env=env)
    document = json.loads(done.out)
    assert done.code == 0 and {r["status"] for r in document["records"]} == {"passed"}
    assert {r["algo"] for r in document["records"]} == {"copy", "empty", "copy-rate", "pt-reference"}
    assert document["environments"]["cpu"]["where"] == "slurm" and "modal" not in document
