"""`gdn modal` as a user drives it, against a server on this machine that speaks Modal's
protocol (modal_server.py): declarations and uploads, every error, both interrupts, and
the table made from the replies.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import building
import grpclib
import helpers
import modal_server
import profiles
import pytest
import reports
from modal_server import Server, failure
from remote.test_remote import answered, carried, opened

from gdn_cli import errors, paths
from gdn_cli.catalog.tiers import COPY, COPY_RATE, EMPTY
from gdn_cli.cli import modal, options
from gdn_cli.parsing import to_json
from gdn_cli.records import history
from gdn_cli.records.store import Writer
from gdn_cli.remote import settings, wire
from gdn_cli.remote.wire import Profile, Reply

SETTINGS = settings.load()


def rent(server: Server, *args, **env) -> helpers.Done:
    """Run `gdn modal ARGS` against the server; an argument may have several words."""
    split = [word for arg in args for word in str(arg).split()]
    return helpers.gdn("modal", *split, env=server.env | env)


def words(text: str) -> str:
    return " ".join(text.split())


def measured(device: str = "NVIDIA B200"):
    """An answer for Server.answer: a container whose GPU is `device`, on which
    everything passes, in 2 us.
    """

    def answer(number: int, data: bytes) -> bytes:
        content = opened(data)
        if why := content.gpu.mismatch([device]):
            return wire.encode(Reply(lost=f"{why}; nothing was measured"))
        where = reports.GPU | {"gpu": device, "gpu_uuid": "GPU-1"}
        where |= {"where": "modal", "image": "gdn", "asked": "B200"}
        requests = [to_json(piece.request) for piece in content.jobs]
        outcomes = [
            {"status": "done", "records": _records(request), "environment": where}
            for request in requests
        ]
        return wire.encode(Reply(outcomes=outcomes))

    return answer


def _records(request: dict) -> list[dict]:
    plain = {"op": request["op"]["name"], "source_hash": None, "mode": request["mode"]}
    plain |= {"status": "passed", "reason": None, "tier": "cupti", "doubts": []}
    plain |= {"bytes_moved": 1_000_000, "timing": reports.timing(2.0)}
    own = [{"algo": request["name"]}]
    if request["command"] == "floor":
        machine = [
            plain | {"algo": name, "workload": None} for name in (EMPTY, COPY_RATE)
        ]
        own = [{"algo": COPY}]
    elif request["command"] == "official":
        performance = {"latency_ms": 3e-3, "speedup_factor": 3.0}
        plain |= {"official": {"status": "PASSED", "performance": performance}}
        plain |= {"tier": "official"}
        plain |= {"timing": reports.timing(3.0) | {"tier": "official"}}
    else:
        worst = {"output": 1e-3, "new_state": 1e-7}
        plain |= {"check": {"passed": True, "official": True, "errors": worst}}
        rounds_us = [2.0, 2.002] * 40
        rivals = request["rivals"]
        own = [{"algo": r["name"], "rounds_us": rounds_us} for r in rivals] or own
    found = [
        plain | {"workload": w} | each for w in request["workloads"] for each in own
    ]
    if request["command"] == "official":
        lost = {"status": "refused", "reason": "left no trace"}
        found[-1] |= lost | {"official": None, "timing": None}
    return found + (machine if request["command"] == "floor" else [])


# --- rented GPUs


@pytest.mark.slow
def test_one_gpu_where_two_were_asked_for():
    with Server(answer=measured()) as s:
        done = rent(s, "run --algo cuda-v4 -w 0-2 --gpu B200:2")
    assert done.code == errors.REMOTE
    assert "asked for B200:2, and the container has NVIDIA B200; nothing" in words(
        done.out
    )
    gpu = s.bound[0].resources.gpu_config
    assert (gpu.gpu_type, gpu.count) == ("B200", 2)


def test_what_is_declared_and_uploaded_and_the_table_that_comes_back(tmp_path):
    out = tmp_path / "records.json"
    with Server(answer=measured()) as s:
        done = rent(
            s, "run --algo cuda-v4 -w 0-2 --timeout 100 --parallel 2 --out", out
        )
    (function,), (options,) = s.functions, s.bound
    resources, scaling = options.resources, function.autoscaler_settings
    gpu = resources.gpu_config
    assert (gpu.gpu_type, gpu.count) == ("B200", 1)
    assert options.timeout_secs == 100 + SETTINGS.limits.start
    assert function.retry_policy.retries == scaling.min_containers == 0
    assert (options.concurrency_limit, scaling.scaledown_window) == (2, 2)
    # a few MiB more: no other run shares these containers
    assert resources.milli_cpu == 4000 and 0 <= resources.memory_mb - 16384 < 128
    volumes = {v.mount_path: (v.volume_id, v.read_only) for v in function.volume_mounts}
    assert volumes == {
        "/data": ("vo-flashinfer-trace", True),
        "/cache": ("vo-gdn-cache", False),
    }
    assert function.module_name == "gdn_cli.remote.modal_client"
    assert function.implementation_name == "serve"
    # by name: the two sides' Pythons need not agree
    assert not function.function_serialized
    assert not function.secret_ids and [function.app_name] == list(s.deployed)
    assert re.fullmatch("gdn-[0-9a-f]{12}", function.app_name)

    image = SETTINGS.chosen(None)
    built = dockerfile(s.images)
    for line in (f"FROM {image.base}", "ENTRYPOINT []", f"RUN {image.smoke}"):
        assert line in built
    assert all(pin in built for pin in settings.pins())
    # it builds, and is proved, on CPU time
    assert not any(image.gpu_config.count for image in s.images)

    mine = {}
    for id in function.mount_ids:
        mine |= {name: s.contents[sha] for name, sha in s.mounts[id].items()}
    there = carried(tmp_path / "carried")
    root = next(iter(mine)).partition("/gdn_cli/")[0]  # where Modal mounts sources
    assert mine == {
        f"{root}/{p.relative_to(there).as_posix()}": p.read_bytes()
        for p in there.rglob("*")
        if p.is_file()
    }

    assert done.code == 0
    assert "gdn_decode | NVIDIA B200 (modal) (GPU 0) | tier cupti, L2 cold" in done.out
    assert re.search(r"^ +cuda-v4( \*)? +2\.00 us .* 1\.00x .* 1\.00$", done.out, re.M)
    assert "B200, 2 containers, 3 calls of at most 6 min: 17 min" in done.err
    assert "gdn_decode/cuda-v4: 3 of 3 passed, NVIDIA B200 (modal)" in done.err
    document = json.loads(out.read_text())
    assert document["environments"]["cuda:0"]["where"] == "modal"
    gpus = [r["gpu"] for r in document["records"]]
    assert all(
        gpu == {"uuid": "GPU-1", "name": "NVIDIA B200", "index": 0} for gpu in gpus
    )
    assert document["modal"]["calls"] == []
    requests = [opened(data).jobs[0].request for data in s.calls.values()]
    assert [r.command for r in requests] == ["floor", "bench", "bench"]
    plan = requests[2].timing.plan
    # the official harness's
    assert (plan["warmup"], plan["iterations"], plan["trials"]) == (10, 50, 3)
    assert modal_server.TOKEN[1] == s.metadata["x-modal-token-secret"]


def dockerfile(images) -> str:
    return "\n".join("\n".join(image.dockerfile_commands) for image in images)


@pytest.mark.slow
def test_a_plain_run_takes_the_contests_whole_set(tmp_path):
    file = tmp_path / "r.json"
    with Server(answer=measured()) as s:
        done = rent(s, "run --algo cuda-v4 --json --together --out", file)
    (data,) = s.calls.values()
    jobs = opened(data).jobs  # floors, reference, cuda-v4
    assert [len(piece.request.workloads) for piece in jobs] == [54] * 3
    assert done.code == 0
    assert done.json == json.loads(file.read_text())


@pytest.mark.slow
def test_the_contests_harness_judges_beside_our_own_times(tmp_path):
    args = "run --algo cuda-v4 -w 0-2 --official --together"
    with Server(answer=measured()) as s:
        done = rent(s, args, "--isolated --out", tmp_path / "r.json")
        first = len(s.images)
        rent(s, args, "--harness 0.1.2")
    install = "pip install --no-deps --target /opt/gdn/harness/main 'flashinfer-bench @"
    assert install in dockerfile(s.images[:first])
    assert install not in dockerfile(s.images[first:])
    data, _ = s.calls.values()
    *_, judge = opened(data).jobs
    request, harness = judge.request, judge.request.official
    assert (request.command, request.name) == ("official", "cuda-v4")
    assert (harness.name, harness.isolated) == ("main", True)
    assert harness.folder == "/opt/gdn/harness/main"
    assert judge.timeout_s == 300 + 3 * 30
    assert "judged by flashinfer-bench main (40e6ca7), its isolated runner" in done.out
    row = r"^cuda-v4 +2/3 +1 +3\.00 us +2\.00 us +1\.50 +- *$"
    assert re.search(row, done.out, re.M), done.out
    assert done.code == errors.MISSING and "left no trace" in done.out
    (judged,) = json.loads((tmp_path / "r.json").read_text())["official"]
    assert judged["statuses"] == {"PASSED": 2} and judged["our_tier"] == "cupti"
    assert (judged["without_trace"], judged["compared"], judged["score"]) == (
        1,
        2,
        None,
    )


@pytest.mark.slow
def test_rivals_in_one_container_get_the_table_and_who_is_faster():
    with Server(answer=measured()) as s:
        done = rent(s, "bench --algo cuda-v1,cuda-v4 -w 0 --together")
    assert done.code == 0 and len(s.calls) == 1
    assert "cuda-v4 against cuda-v1" in done.out and "SAME" in done.out
    order = r"^B=1 +copy .*\n +pt-reference .*\n +cuda-v1 .*\n +cuda-v4 "
    assert re.search(order, done.out, re.M)


@pytest.mark.slow
def test_a_cpu_algo_end_to_end_through_modals_own_client(tmp_path):
    """The function is called as Modal calls it, on the uploaded files alone."""
    with Server() as s:
        done = rent(
            s, "bench --algo pt-reference --device cpu -w 0 --seconds 0.05 --json"
        )
    document = done.json
    # Modal talks, and not on stdout
    assert done.code == 0 and "Created objects" in done.err
    assert {r["status"] for r in document["records"]} == {"passed"}
    names = {r["algo"] for r in document["records"]}
    assert names == {"copy", "empty", "copy-rate", "pt-reference"}
    assert document["environments"]["cpu"]["where"] == "modal"
    assert not s.bound[0].resources.gpu_config.count
    assert re.search(r"Modal: \d+ s of container time, about \$0\.0\d at the", done.err)


# --- errors: one line, no traceback

UNAUTHENTICATED, INVALID = (
    grpclib.Status.UNAUTHENTICATED,
    grpclib.Status.INVALID_ARGUMENT,
)
EXHAUSTED = grpclib.Status.RESOURCE_EXHAUSTED
SECRETS = "ak-TESTTOKEN / as-TESTSECRET"
BUILD = [
    "Collecting torch==2.11.0",
    "as-TESTSECRET",
    "\x1b[31mERROR: No matching distribution found\x1b[0m",
]


@pytest.mark.parametrize(
    ("behaviour", "code", "says"),
    [
        ({}, 3, "not logged in to Modal run `modal setup`"),
        (
            {"ClientHello": (UNAUTHENTICATED, SECRETS)},
            4,
            "not accept the token: *** / ***",
        ),
        (
            {"FunctionBindParams": (INVALID, "Invalid GPU type: 'B2'")},
            4,
            "--gpu takes B200, H",
        ),
        (
            {"FunctionBindParams": (EXHAUSTED, "GPU limit")},
            4,
            "does not grant it: GPU limit",
        ),
        (None, 4, "the image could not be built: Image build for im-1 failed"),
    ],
    ids=["no-token", "wrong-token", "no-such-gpu", "limit", "image"],
)
@pytest.mark.sampled(5)
def test_a_fatal_error_is_one_line(behaviour, code, says):
    with Server(failing=behaviour or {}) as s:
        if behaviour is None:
            s.image_result, s.image_logs = failure("FAILURE", "pip failed"), BUILD
        env = {} if code == 4 else {"MODAL_TOKEN_ID": "", "MODAL_TOKEN_SECRET": ""}
        done = rent(s, "run --algo cuda-v4 -w 0 --json", **env)
    said = done.err[done.err.rindex("gdn: ") :]
    assert done.code == done.json["error"]["code"] == code
    assert says in words(said)
    assert "Traceback" not in done.err and modal_server.TOKEN[1] not in done.err
    if behaviour is None:
        assert "ERROR: No matching distribution found" in done.err


@pytest.mark.slow
def test_a_call_that_is_lost_costs_its_own_algo(tmp_path):
    """Remote time limit, remote memory, an exception of a type that is unknown here;
    the others keep their results.
    """
    unknown = b"\x80\x04\x8c\x12no_such_module_xyz\x94\x8c\x05Oops!\x94\x93\x94)R\x94."
    trace = "Traceback ...:\n  File ...\nno_such_module_xyz.Oops: dear\n"
    fates = {
        "cuda-v1": failure("TIMEOUT", "Task's current input hit its timeout of 340s"),
        "cuda-v4": failure("FAILURE", "Runner failed with exit code 137"),
        "cuda-v5": failure("FAILURE", "Oops()", unknown, trace),
    }

    def answer(number: int, data: bytes):
        fate = fates.get(opened(data).jobs[0].request.name)
        return fate or measured()(number, data)

    file, home = tmp_path / "r.json", {"GDN_HOME": str(tmp_path)}
    args = "bench --algo cuda-v1,cuda-v4,cuda-v5,fla-recurrent -w 0 --out"
    with Server(answer=answer) as s:
        done = rent(s, args, file, **home)
        assert done.code == errors.REMOTE and "Traceback" not in done.out + done.err
        for says in (
            "cuda-v1: remote failed, Modal ended the container at its time limit",
            "cuda-v4: remote failed, the container ran out of memory",
            "cuda-v5: remote failed, the container failed: no_such_module_xyz.Oops: dear",
        ):
            assert says in words(done.out)
        assert re.search(r"fla-recurrent( \*)? +2\.00 us", done.out)
        assert f"gdn modal bench --resume {file}" in done.err

        fates.clear()  # and only what failed is sent again
        before = len(s.calls)
        refused = rent(s, "bench --resume", file, "--algo cuda-v1")
        again = rent(s, "bench --resume", file, **home)
    assert refused.code == errors.USAGE and "--resume takes --algo from" in refused.err
    sent = [
        opened(data).jobs[0].request.name for data in list(s.calls.values())[before:]
    ]
    assert again.code == 0 and sent == ["cuda-v1", "cuda-v4", "cuda-v5"]
    records = json.loads(file.read_text())["records"]
    assert {r["status"] for r in records} == {"passed"} and len(records) == 8
    runs = {
        row.algo: row.runs
        for row in history.overview(history.read(tmp_path / "runs")[0])
    }
    assert runs["fla-recurrent"] == 1  # what was kept is not counted twice


def put_off(run: helpers.Done) -> None:
    assert run.code == 0 and re.search(r"cuda-v4( \*)? +2\.00 us", run.out), run.err
    # each interruption once: how many there are depends on when the calls' threads ask
    said = re.findall(
        "the calls go on there; asking again|Modal answers again", run.err
    )
    assert all(("asking" in line) == (i % 2 == 0) for i, line in enumerate(said)), (
        run.err
    )
    assert "Traceback" not in run.err


@pytest.mark.slow
def test_a_refusal_of_modals_servers_costs_no_call():
    with Server(
        answer=measured(),
        faults={"FunctionGetOutputs": [(EXHAUSTED, "rate limit")] * 3},
    ) as s:
        put_off(rent(s, "bench --algo cuda-v4 -w 0"))
    assert len(s.calls) == 3 and s.rpcs.count("FunctionGetOutputs") <= 9


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [(grpclib.Status.INTERNAL, "oops"), "reset"], ids=["internal", "reset"]
)
def test_a_resumed_run_bears_more_faults_than_modals_own_client_and_sends_nothing_twice(
    fault, tmp_path
):
    home = {"GDN_HOME": str(tmp_path)}
    with Server(answer=measured()) as s:
        left = rent(s, "bench --algo cuda-v4 -w 0 --detach", **home)
        # each of three calls is asked for four times
        s.faults["FunctionGetOutputs"] = [fault] * 12
        put_off(
            rent(
                s,
                "bench --resume",
                re.search(r"gdn modal bench --resume (\S+)", left.err)[1],
                **home,
            )
        )
        assert s.faults["FunctionGetOutputs"] == [] and len(s.calls) == 3


@pytest.mark.slow
def test_records_are_put_on_a_queue_and_read_back():
    code = """
        import time
        from gdn_cli.remote import modal_client as cloud
        assert cloud.kept("fc-0") == []
        keep = cloud.keeper("fc-0")
        for made in (b"one", b"two"):
            keep(made)
        while len(cloud.kept("fc-0")) < 2:
            time.sleep(0.02)
        print(cloud.kept("fc-0"), cloud.kept("fc-1"))
    """
    with Server() as s:
        done = helpers.python("-c", textwrap.dedent(code), env=s.env)
        assert list(s.queues) == [(settings.RECORDS, "fc-0")]
        s.failing["QueueNextItems"] = (EXHAUSTED, "rate limit")
        code = "from gdn_cli.remote import modal_client as cloud; print(cloud.kept('fc-0'))"
        assert helpers.python("-c", code, env=s.env).out == "[]\n"  # and no error
    assert done.out == "[b'one', b'two'] []\n", done.err


@pytest.mark.slow
def test_the_first_call_that_asks_does_the_work_of_a_parcel():
    code = """
        from gdn_cli.remote import modal_client as cloud
        calls = [(b"a", "fc-0"), (b"a", "fc-1"), (b"b", "fc-1"), (b"a", "fc-0")]
        print(*[cloud.claimed(*call) for call in calls])
    """
    with Server() as s:
        done = helpers.python("-c", textwrap.dedent(code), env=s.env)
        s.failing["DictUpdate"] = (EXHAUSTED, "rate limit")
        failed = helpers.python("-c", textwrap.dedent(code), env=s.env)
    assert done.out == "fc-0 fc-0 fc-1 fc-0\n", done.err
    assert failed.out == "fc-0 fc-1 fc-1 fc-0\n", failed.err


def on_queue(number: int, data: bytes) -> list[bytes]:
    """The queue of a call that has measured its first workload."""
    (outcome,) = answered(measured()(number, data)).outcomes
    return [
        pickle.dumps(
            wire.encode(wire.Made(0, outcome.records[0], outcome.environment)),
            protocol=4,
        )
    ]


@pytest.mark.slow
def test_what_a_preempted_call_had_measured_is_in_the_table(tmp_path):
    def answer(number: int, data: bytes):
        (piece,) = opened(data).jobs
        if piece.request.name != "cuda-v4":
            return measured()(number, data)
        s.queues[settings.RECORDS, f"fc-{number}"] = on_queue(number, data)
        return failure("INTERNAL_FAILURE", "the worker was preempted")

    file = tmp_path / "r.json"

    def records() -> list[dict]:
        found = json.loads(file.read_text())["records"]
        return [record for record in found if record["algo"] == "cuda-v4"]

    with Server(answer=answer) as s:
        done = rent(s, "bench --algo cuda-v4 -w 0,1 --out", file)
    assert done.code == errors.REMOTE
    assert "gdn_decode/cuda-v4: 1 of 2 came before that" in done.err
    assert re.search(r"cuda-v4( \*)? +2\.00 us", done.out)
    assert "the worker was preempted; 1 work" in words(done.out)
    first, lost = records()
    assert (first["status"], lost["status"]) == ("passed", "remote_failed")
    with Server(answer=measured()) as s:  # and is not paid for again
        again = rent(s, "bench --resume", file)
    (request,) = (opened(data).jobs[0].request for data in s.calls.values())
    (workload,) = request.workloads
    assert again.code == 0 and request.name == "cuda-v4"
    assert workload.uuid != first["workload"]["uuid"] and len(records()) == 2


@pytest.mark.slow
def test_a_preempted_call_goes_on_after_what_it_had_measured():
    """Killed after its fifth record, and started again by Modal: nothing is measured twice."""
    args = "--device cpu -w 0,1 --seconds 0.05 --together --json"
    with Server(preempt_after=5) as s:
        done = rent(s, "bench --algo pt-reference", args)
    assert done.code == 0 and s.preempted == ["fc-0"], done.err
    names = [r["algo"] for r in done.json["records"]]
    assert names == ["copy", "copy", "empty", "copy-rate", *["pt-reference"] * 2]
    (queue,) = s.queues.values()
    made = [wire.decode(pickle.loads(item), wire.Made) for item in queue]
    assert sum(m.record.algo == "pt-reference" for m in made) == 2


def test_a_reply_that_is_none_costs_nothing_if_all_records_had_come():
    def answer(number: int, data: bytes):
        if opened(data).jobs[0].request.name != "cuda-v4":
            return measured()(number, data)
        s.queues[settings.RECORDS, f"fc-{number}"] = on_queue(number, data)
        return b"rubbish"

    with Server(answer=answer) as s:
        done = rent(s, "bench --algo cuda-v4 -w 0")
    assert done.code == 0 and re.search(r"cuda-v4( \*)? +2\.00 us", done.out), done.err


def test_replies_that_are_none_cost_their_own_algos():
    rubbish = {
        0: b"rubbish",
        1: failure("SUCCESS", "", pickle.dumps(None)),
        2: failure("SUCCESS", "", b"rubbish"),
    }

    def answer(number: int, data: bytes):
        return rubbish.get(number) or measured()(number, data)

    with Server(answer=answer) as s:
        done = rent(s, "bench --algo cuda-v4,cuda-v1 -w 0")
    assert done.code == errors.REMOTE and "Traceback" not in done.out + done.err
    assert words(done.out).count("what came back is not a reply of gdn") == 2
    assert re.search(r"cuda-v1( \*)? +2\.00 us", done.out)


NOWHERE = {
    "MODAL_SERVER_URL": "http://127.0.0.1:9",
    "MODAL_TOKEN_ID": "ak-x",
    "MODAL_TOKEN_SECRET": "as-x",
}


def test_no_connection_is_known_soon():
    """At most `connect` seconds, 12, which a dozen of a test's would be too many of."""
    assert SETTINGS.limits.connect <= 15
    code = """
        from gdn_cli import errors
        from gdn_cli.remote import modal_client as cloud
        try: cloud.connect(0.5)
        except errors.GdnError as e: print(e.code, e)
    """
    done = helpers.python("-c", textwrap.dedent(code), env=NOWHERE)
    assert done.out.startswith("4 no connection to Modal (no answer within 0.5 s)")


def test_without_the_package_modal_it_is_said_how_to_get_it(tmp_path):
    (tmp_path / "modal.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'modal'\", name='modal')\n"
    )
    done = helpers.gdn(
        "modal",
        "setup",
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{paths.PACKAGE.parent}"},
    )
    assert done.code == errors.MISSING and words(done.err).endswith(
        "modal is missing here pip install modal"
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("run --algo cuda-v4 --gpu B200,H100", "--gpu B200,H100: expected a GPU"),
        ("run --algo cuda-v4 --image nosuch", "unknown image 'nosuch'"),
        ("run --algo cuda-v9", "unknown algo 'cuda-v9'"),
        ("profile --algo cuda-v4 --tool sass", "unknown device of sass"),
        ("bench --resume nowhere.json", "nowhere.json: cannot be read"),
    ],
)
def test_wrong_usage_reaches_no_network(args, says, tmp_path):
    done = helpers.gdn("modal", *args.split(), env=NOWHERE, cwd=tmp_path)
    assert done.code in (errors.USAGE, errors.MISSING) and says in words(done.err)


# --- Ctrl-C


@contextlib.contextmanager
def under_way(server: Server, when, line: str, **env):
    """The process of `gdn modal LINE`, as soon as `when(server)`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", "modal", *line.split()],
        env=helpers.environment(**server.env, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's `&` has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + helpers.PATIENCE_S
        while not when(server):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()


def done_of(process: subprocess.Popen) -> helpers.Done:
    out, err = process.communicate(timeout=helpers.PATIENCE_S)
    return helpers.Done(process.returncode, out, err)


def interrupted(server: Server, when, line: str, **env) -> helpers.Done:
    """`gdn modal LINE`, which gets Ctrl-C as soon as `when(server)`."""
    with under_way(server, when, line, **env) as process:
        process.send_signal(signal.SIGINT)
        return done_of(process)


def waiting(server: Server) -> bool:
    """Three calls are asked for."""
    return server.rpcs.count("FunctionGetOutputs") >= 3


@pytest.mark.parametrize("how", ["silence", "reset", "denied"])
@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_modal_and_keeps_what_it_did_not_hear(how, tmp_path):
    """The network stays down, or the token refused, until the command has ended."""
    home = {"GDN_HOME": str(tmp_path)}

    def down(s) -> bool:
        if not waiting(s):
            return False
        if how == "denied":
            refused = grpclib.Status.PERMISSION_DENIED, "token revoked"
            s.failing |= {"FunctionGetOutputs": refused, "FunctionCallCancel": refused}
        else:
            s.outage(how)
        return True

    with Server(answer=lambda n, data: None) as s:
        done = interrupted(s, down, "bench --algo cuda-v4 -w 0", **home)
        assert done.code == errors.INTERRUPTED and "Traceback" not in done.err
        assert "3 calls could not be cancelled" in done.err and s.cancelled == []
        assert "died" not in done.err
        s.failing.clear()
        s.outage("up")
        s.answer = measured()
        file = re.search(r"gdn modal bench --resume (\S+)", done.err)[1]
        again = rent(s, "bench --resume", file, **home)
    assert again.code == 0 and len(s.calls) == 3, again.err


@pytest.mark.slow
def test_calls_survive_a_network_that_accepts_connections_and_resets_them(tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    with Server(answer=lambda n, data: None) as s:
        with under_way(s, waiting, "bench --algo cuda-v4 -w 0", **home) as process:
            s.outage("reset", 2.0)
            s.answer = measured()
            put_off(done_of(process))
        (file,) = (tmp_path / "runs").iterdir()
        assert len(s.calls) == 3
        again = rent(s, "bench --resume", file, **home)
    # and nothing is paid for twice
    assert again.code == 0 and len(s.calls) == 3


@pytest.mark.slow
def test_a_call_whose_answer_was_lost_is_sent_again_and_paid_for_once(tmp_path):
    """Modal has the first call, and the container of the second says that it does the work."""

    def answer(number: int, data: bytes) -> bytes:
        second = wire.encode(Reply(call="fc-0"))
        return second if number == 1 else measured()(number, data)

    out = tmp_path / "r.json"
    with Server(answer=answer) as s:
        rent(s, "setup")
        # the client itself tries four times
        s.faults["FunctionMap"] = ["lost", *["reset"] * 3]
        done = rent(s, "bench --algo cuda-v4 -w 0 --together --out", out)
    assert done.code == 0 and len(s.calls) == 2, done.err
    assert json.loads(out.read_text())["modal"]["calls"] == []


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_record_is_fetched(tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    with Server(answer=lambda n, data: None) as s:
        with under_way(s, waiting, "bench --algo cuda-v4 -w 0", **home) as process:
            process.kill()
        (file,) = (tmp_path / "runs").iterdir()
        s.answer = measured()
        again = rent(s, "bench --resume", file, **home)
    assert again.code == 0 and len(s.calls) == 3 and s.cancelled == []


@pytest.mark.slow
def test_ctrl_c_while_waiting_cancels_the_calls_and_keeps_what_has_arrived(tmp_path):
    """Records of a call that still runs have arrived too."""
    out = tmp_path / "r.json"

    def answer(number: int, data: bytes):
        if number < 2:
            return measured()(number, data)
        s.queues[settings.RECORDS, f"fc-{number}"] = on_queue(number, data)
        return None

    def arrived(s) -> bool:
        return out.exists() and len(json.loads(out.read_text())["records"]) == 7

    with Server(answer=answer) as s:
        done = interrupted(
            s, arrived, f"bench --algo cuda-v4 -w 0,1 --json --out {out}"
        )
    assert done.code == errors.INTERRUPTED and "Traceback" not in done.err
    document = done.json
    assert document["interrupted"] and document == json.loads(out.read_text())
    names = ["copy", "empty", "copy-rate", "pt-reference", "cuda-v4"]
    assert list(dict.fromkeys(r["algo"] for r in document["records"])) == names
    assert document["records"][-1]["gpu"]["uuid"] == "GPU-1"
    assert s.cancelled == ["fc-2"]
    assert document["modal"]["calls"] == []
    assert f"gdn modal bench --resume {out}" in done.err


def test_a_second_ctrl_c_still_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """It ends the command while the first one's table is being made."""
    document = building.document(building.record("cuda-v4", 2.0))
    writer = Writer(document, tmp_path / "r.json")

    def carry_out(*_, elsewhere, **how):
        elsewhere.note(writer)
        raise KeyboardInterrupt

    monkeypatch.setattr(modal, "carry_out", carry_out)
    monkeypatch.setattr(options, "OPTIONS", SimpleNamespace(get=dict))
    with pytest.raises(KeyboardInterrupt):
        modal._carried("bench", modal.Containers(), None, None, None)
    assert f"gdn modal bench --resume {writer.path}" in words(capsys.readouterr().err)


@pytest.mark.slow
def test_ctrl_c_before_the_start_leaves_nothing_behind():
    with Server(create_delay=30) as s:
        done = interrupted(
            s, lambda s: "FunctionCreate" in s.rpcs, "bench --algo cuda-v4 -w 0 --json"
        )
    assert done.code == errors.INTERRUPTED and "Traceback" not in done.err
    assert done.json["records"] == [] and done.json["interrupted"]
    assert s.calls == s.deployed == {}


# --- runs that are left there, setup


def test_a_run_that_was_left_is_fetched(tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    with Server(answer=lambda n, data: None) as s:
        done = rent(s, "bench --algo cuda-v4 -w 0 --detach", **home)
        assert done.code == 0 and len(s.calls) == 3
        file = Path(re.search(r"gdn modal bench --resume (\S+)", done.err)[1])
        calls = json.loads(file.read_text())["modal"]["calls"]
        assert [len(c["keys"]) for c in calls] == [1, 1, 1]
        s.answer = measured()
        fetched = rent(s, "bench --resume", file, **home)
    assert fetched.code == 0 and len(s.calls) == 3
    assert re.search(r"cuda-v4( \*)? +2\.00 us", fetched.out)
    assert "container time" not in fetched.err
    assert json.loads(file.read_text())["modal"]["calls"] == []


def test_a_profile_that_was_left_is_fetched(tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    where = profiles.GPU | {"gpu": "NVIDIA B200", "where": "modal"}
    made = profiles.v4(environment=where)
    del made["folder"]
    profile = Profile(made, {"log": b"LOG"})
    with Server(answer=lambda n, data: None) as s:
        done = rent(s, "profile cuda-v4 -w 0 --detach", **home)
        assert (done.code, done.out, len(s.calls)) == (0, "", 1)
        resume = re.search(r"profile --resume (\S+)", done.err)[0]
        file = resume.split()[-1]
        other = rent(s, "bench --resume", file, **home)
        more = rent(s, resume, "-w 1", **home)
        s.answer = lambda n, data: wire.encode(Reply(profiles=[profile]))
        fetched = rent(s, resume, **home)
        again = rent(s, resume, **home)
    assert other.code == more.code == errors.USAGE
    assert f"is a run of gdn modal profile gdn modal {resume}" in words(other.err)
    assert "--resume takes --workload from" in more.err
    assert fetched.code == 0
    assert "latency-bound" in fetched.out and "NVIDIA B200 (modal)" in fetched.out
    assert (tmp_path / "profiles" / made["name"] / "log").read_bytes() == b"LOG"
    # it has come, and is kept
    assert again.code == errors.USAGE and f"{file}: cannot be read" in again.err


def test_setup_makes_the_volumes_and_builds_the_image_without_a_gpu():
    with Server() as s:
        done = rent(s, "setup")
        bare = rent(s, "setup --no-image")
    assert done.code == bare.code == 0
    assert s.volumes == {"flashinfer-trace": {}, "gdn-cache": {}}
    assert not s.calls and not any(f.resources.gpu_config.count for f in s.functions)
    assert len(s.functions) == 1
    (name,) = s.deployed
    for step in ("token: Modal accepts it", f"app {name}: deployed"):
        assert step in done.err


def test_a_run_calls_what_is_deployed_and_sends_no_files():
    with Server(answer=measured()) as s:
        rent(s, "setup")
        before = len(s.rpcs)
        done = rent(s, "bench --algo cuda-v4 -w 0")
    (name,) = s.deployed
    assert done.code == 0 and f"app {name}\n" in done.err
    assert {rpc for rpc in s.rpcs[before:] if "Queue" not in rpc} == {
        "ClientHello",
        "FunctionGet",
        "FunctionBindParams",
        "FunctionMap",
        "FunctionGetOutputs",
    }


@pytest.mark.slow
def test_of_two_commands_at_once_one_deploys_for_both():
    with Server(answer=measured(), create_delay=1.0) as s:
        with futures.ThreadPoolExecutor() as pool:
            runs = [pool.submit(rent, s, "bench --algo cuda-v4 -w 0") for _ in "ab"]
        done = [run.result() for run in runs]
    assert [run.code for run in done] == [0, 0], done
    assert len(s.functions) == 1 and len(s.calls) == 6


def test_no_secret_reaches_records_parcels_or_what_is_packed(tmp_path):
    secret = {"HF_TOKEN": "hf-PRIVATE", "MY_PASSWORD": "pw-PRIVATE"}
    records, solution = tmp_path / "r.json", tmp_path / "s.json"
    with Server(answer=measured()) as s:
        done = rent(s, "bench --algo cuda-v4 -w 0 --out", records, **secret)
        env = s.env | secret
        packed = helpers.gdn("pack", "--algo", "cuda-v4", "--out", solution, env=env)
    assert done.code == packed.code == 0
    texts = [done.out, done.err, packed.out, dockerfile(s.images)]
    texts += [file.read_text() for file in (records, solution)]
    texts += [wire.zlib.decompress(data).decode() for data in s.calls.values()]
    texts += [data.decode("utf-8", "replace") for data in s.contents.values()]
    for value in (*modal_server.TOKEN, *secret.values()):
        assert not any(value in text for text in texts), value
