"""`gdn modal` as a user drives it, against a server on this machine that speaks Modal's
protocol (modal_server.py): declarations and uploads, every error, both interrupts, and
the table made from the replies.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time

import grpclib
import helpers
import modal_server
import profiles
import pytest
import reports
from modal_server import Server, failure
from remote.test_remote import answered, carried, job, opened, rented, work_of

from gdn_cli import errors, paths
from gdn_cli.catalog.tiers import COPY, COPY_RATE, EMPTY
from gdn_cli.machine import inventory
from gdn_cli.parsing import to_json
from gdn_cli.records import history
from gdn_cli.remote import container, modal_client, settings, setup, wire
from gdn_cli.remote.wire import Profile, Reply

SETTINGS = settings.load()


def rent(server: Server, *args, **env) -> helpers.Done:
    """Run `gdn modal ARGS` against the server."""
    return helpers.gdn("modal", *args, env=server.env | env)


def words(text: str) -> str:
    return " ".join(text.split())


def measured(device: str = "NVIDIA B200", uuid: str = "GPU-1", us: float = 2.0):
    """An answer for Server.answer: a container whose GPU is `device`, on which
    everything passes, in `us`.
    """

    def answer(number: int, data: bytes) -> bytes:
        content = opened(data)
        if why := content.gpu.mismatch([device]):
            return wire.encode(Reply(wrong_gpu=why))
        where = reports.GPU | {
            "gpu": device,
            "where": "modal",
            "image": "gdn",
            "asked": "B200",
            "gpu_uuid": uuid,
        }
        outcomes = [
            {
                "status": "done",
                "records": _records(to_json(piece.request), us),
                "environment": where,
            }
            for piece in content.jobs
        ]
        return wire.encode(Reply(outcomes=outcomes))

    return answer


def _records(request: dict, us: float) -> list[dict]:
    plain = {"op": request["op"]["name"], "source_hash": None, "mode": request["mode"]}
    plain |= {
        "status": "passed",
        "reason": None,
        "bytes_moved": 1_000_000,
        "tier": "cupti",
    }
    plain |= {"timing": reports.timing(us), "doubts": []}
    if request["command"] == "floor":
        copies = [plain | {"algo": COPY, "workload": w} for w in request["workloads"]]
        return copies + [
            plain | {"algo": name, "workload": None} for name in (EMPTY, COPY_RATE)
        ]
    if request["command"] == "official":
        harness = {
            "status": "PASSED",
            "performance": {"latency_ms": us * 1.5e-3, "speedup_factor": 3.0},
        }
        judged = {
            "algo": request["name"],
            "tier": "official",
            "timing": reports.timing(us * 1.5) | {"tier": "official"},
        }
        found = [
            plain | judged | {"workload": w, "official": harness}
            for w in request["workloads"]
        ]
        lost = {
            "status": "refused",
            "reason": "left no trace",
            "official": None,
            "timing": None,
        }
        return [*found[:-1], found[-1] | lost]
    check = {
        "passed": True,
        "official": True,
        "errors": {"output": 1e-3, "new_state": 1e-7},
    }
    rivals = [
        {"algo": r["name"], "rounds_us": [us, us * 1.001] * 40}
        for r in request["rivals"]
    ]
    rivals = rivals or [{"algo": request["name"]}]
    return [
        plain | {"check": check, "workload": w} | rival
        for w in request["workloads"]
        for rival in rivals
    ]


# --- rented GPUs


def test_what_is_declared_and_uploaded_and_the_table_that_comes_back(tmp_path):
    out = tmp_path / "records.json"
    args = (
        "run",
        "--algo",
        "cuda-v4",
        "-w",
        "0-2",
        "--gpu",
        "B200:2",
        "--timeout",
        "100",
        "--parallel",
        "2",
    )
    with Server(answer=measured("NVIDIA B200")) as s:
        refused = rent(s, *args)
        done = rent(s, *args[:5], *args[7:], "--out", out)
    # one GPU where two were asked for
    assert (refused.code, refused.out) == (errors.REMOTE, "")
    assert (
        "asked for B200:2, and the container has NVIDIA B200\n" in refused.err
        and "Traceback" not in refused.err
    )

    first, second = s.functions
    assert (first.resources.gpu_config.gpu_type, first.resources.gpu_config.count) == (
        "B200",
        2,
    )
    assert (
        second.resources.gpu_config.gpu_type,
        second.resources.gpu_config.count,
    ) == ("B200", 1)
    assert (
        second.timeout_secs == 100 + SETTINGS.limits.start
        and second.retry_policy.retries == 0
    )
    scaling = second.autoscaler_settings
    assert (
        scaling.max_containers,
        scaling.min_containers,
        scaling.scaledown_window,
    ) == (2, 0, 2)
    assert second.resources.milli_cpu == 4000 and second.resources.memory_mb == 16384
    volumes = {v.mount_path: (v.volume_id, v.read_only) for v in second.volume_mounts}
    assert volumes == {
        "/data": ("vo-flashinfer-trace", True),
        "/cache": ("vo-gdn-cache", False),
    }
    assert (second.module_name, second.implementation_name) == (
        "gdn_cli.remote.modal_client",
        "serve",
    )
    # by name: the two sides' Pythons need not agree
    assert not second.function_serialized
    assert not second.secret_ids and second.app_name == "gdn"

    built = "\n".join(line for image in s.images for line in image.dockerfile_commands)
    assert f"FROM {SETTINGS.chosen(None).base}" in built and "ENTRYPOINT []" in built
    assert (
        all(pin in built for pin in settings.pins())
        and f"RUN {SETTINGS.chosen(None).smoke}" in built
    )
    # it builds, and is proved, on CPU time
    assert not any(image.gpu_config.count for image in s.images)

    mine = {
        name: s.contents[sha]
        for id in second.mount_ids
        for name, sha in s.mounts[id].items()
    }
    there = carried(tmp_path / "carried")
    root = next(iter(mine)).partition("/gdn_cli/")[0]  # where Modal mounts sources
    expected = {
        f"{root}/{p.relative_to(there).as_posix()}": p.read_bytes()
        for p in there.rglob("*")
        if p.is_file()
    }
    assert mine == expected and f"{root}/gdn_cli/worker/profilers/stalls.toml" in mine

    assert (
        done.code == 0
        and "gdn_decode | NVIDIA B200 (modal) | tier cupti, L2 cold" in done.out
    )
    assert re.search(r"^ +cuda-v4( \*)? +2\.00 us .* 1\.00x .* 1\.00$", done.out, re.M)
    assert (
        "gdn: Modal: B200, 2 containers, 3 calls of at most 6 min: 17 min of container time at"
        " most" in done.err
    )
    assert "gdn_decode/cuda-v4: 3 of 3 passed, NVIDIA B200 (modal)" in done.err
    document = json.loads(out.read_text())
    assert (
        document["command"] == "bench"
        and document["environments"]["cuda"]["where"] == "modal"
    )
    assert [r["gpu"] for r in document["records"]] == [
        {"uuid": "GPU-1", "name": "NVIDIA B200"}
    ] * len(document["records"])
    assert document["modal"]["calls"] == []
    requests = [opened(data).jobs[0].request for data in list(s.calls.values())[-3:]]
    assert [r.command for r in requests] == ["floor", "bench", "bench"]
    plan = requests[2].timing.plan
    # the official harness's
    assert (plan["warmup"], plan["iterations"], plan["trials"]) == (10, 50, 3)
    assert modal_server.TOKEN[1] == s.metadata["x-modal-token-secret"]


def test_a_plain_run_takes_the_contests_whole_set(tmp_path):
    with Server(answer=measured()) as s:
        done = rent(
            s,
            "run",
            "--algo",
            "cuda-v4",
            "--json",
            "--together",
            "--out",
            tmp_path / "r.json",
        )
    (data,) = s.calls.values()
    jobs = opened(data).jobs  # floors, reference, baseline, cuda-v4
    assert [len(piece.request.workloads) for piece in jobs] == [54] * 4
    assert done.code == 0 and [x["algo"] for x in done.json["scores"]] == [
        "cuda-v4",
        "cuda-v4",
    ]
    assert "fi-baseline" in {r["algo"] for r in done.json["records"]}
    assert done.json == json.loads((tmp_path / "r.json").read_text())


def test_the_contests_harness_judges_beside_our_own_times(tmp_path):
    args = ("run", "--algo", "cuda-v4", "-w", "0-2", "--official", "--together")
    with Server(answer=measured()) as s:
        done = rent(s, *args, "--isolated", "--out", tmp_path / "r.json")
        first = len(s.images)
        rent(s, *args, "--harness", "0.1.2")
    built, other = (
        "\n".join(line for image in images for line in image.dockerfile_commands)
        for images in (s.images[:first], s.images[first:])
    )
    install = (
        "RUN python -m pip install --no-deps --target /opt/gdn/harness/main 'flashinfer-bench @"
        " https://"
    )
    assert install in built and install not in other
    data, _ = s.calls.values()
    *_, judge = opened(data).jobs
    assert (
        judge.request.command,
        judge.request.name,
        len(judge.request.workloads),
    ) == ("official", "cuda-v4", 3)
    harness = judge.request.official
    assert (harness.name, harness.folder, harness.isolated) == (
        "main",
        "/opt/gdn/harness/main",
        True,
    )
    assert judge.timeout_s == 300 + 3 * 30
    assert "judged by flashinfer-bench main (40e6ca7), its isolated runner" in done.out
    assert re.search(
        r"^cuda-v4 +2/3 +1 +3\.00 us +2\.00 us +1\.50 +- *$", done.out, re.M
    ), done.out
    assert done.code == errors.MISSING and "left no trace" in done.out
    (judged,) = json.loads((tmp_path / "r.json").read_text())["official"]
    assert (
        judged["statuses"] == {"PASSED": 2}
        and judged["without_trace"] == 1
        and judged["compared"] == 2
    )
    assert judged["score"] is None and judged["our_tier"] == "cupti"


def test_rivals_in_one_container_get_the_table_and_who_is_faster():
    with Server(answer=measured()) as s:
        done = rent(s, "bench", "--algo", "cuda-v1,cuda-v4", "-w", "0", "--together")
    assert (
        done.code == 0
        and len(s.calls) == 1
        and "cuda-v4 against cuda-v1" in done.out
        and "SAME" in done.out
    )
    assert re.search(
        r"^B=1 +copy .*\n +pt-reference .*\n +cuda-v1 .*\n +cuda-v4 ", done.out, re.M
    )


def test_the_history_tells_a_rented_gpu_from_ones_own(tmp_path):
    with Server(answer=measured()) as s:
        assert (
            rent(
                s, "bench", "--algo", "cuda-v4", "-w", "0", GDN_HOME=str(tmp_path)
            ).code
            == 0
        )
    kept = history.History(tmp_path / "runs").series()
    assert {row.device for row in kept} == {"NVIDIA B200 (modal)"}


@pytest.mark.slow
def test_a_cpu_algo_end_to_end_through_modals_own_client(tmp_path):
    """The function is called as Modal calls it, on the uploaded files alone."""
    with Server() as s:
        done = rent(
            s,
            "bench",
            "--algo",
            "pt-reference",
            "--device",
            "cpu",
            "-w",
            "0",
            "--seconds",
            "0.05",
            "--json",
        )
    document = done.json
    # Modal talks, and not on stdout
    assert done.code == 0 and "Created objects" in done.err
    assert {r["status"] for r in document["records"]} == {"passed"}
    assert {r["algo"] for r in document["records"]} == {
        "copy",
        "empty",
        "copy-rate",
        "pt-reference",
    }
    assert document["environments"]["cpu"]["where"] == "modal"
    assert not s.functions[0].resources.gpu_config.count


@pytest.mark.filterwarnings("ignore:The serve function is executing locally")
def test_modals_own_local_call_is_the_same_function():
    app, function = modal_client.declare(
        SETTINGS, SETTINGS.chosen(None), SETTINGS.parse("B200"), 60, 1
    )
    data = rented().parcel(work_of(job("cuda-v4", "cuda")), SETTINGS.parse("B200"))
    reply = answered(function.local(data))
    assert reply.wrong_gpu or inventory.gpus()
    assert reply == answered(container.serve(data))
    assert app.name == "gdn"


# --- errors: one line, no traceback

UNAUTHENTICATED, INVALID = (
    grpclib.Status.UNAUTHENTICATED,
    grpclib.Status.INVALID_ARGUMENT,
)
EXHAUSTED = grpclib.Status.RESOURCE_EXHAUSTED
BUILD = [
    "Collecting torch==2.11.0",
    "as-TESTSECRET",
    "\x1b[31mERROR: No matching distribution found\x1b[0m",
]


@pytest.mark.parametrize(
    ("behaviour", "env", "code", "says"),
    [
        ({}, {"MODAL_TOKEN_ID": "", "MODAL_TOKEN_SECRET": ""}, 3, "gdn: not logged in to Modal run `modal setup`, or"),
        (
            {"failing": {"ClientHello": (UNAUTHENTICATED, "Token ID ak-TESTTOKEN / as-TESTSECRET is malformed")}},
            {}, 4, "gdn: Modal does not accept the token: Token ID *** / *** is malformed run `modal setup`",
        ),
        (
            {"failing": {"FunctionCreate": (INVALID, "Invalid GPU type: 'B200'")}},
            {}, 4, "gdn: Modal has no such GPU: Invalid GPU type: 'B200' --gpu takes B200, H200, H100!, ",
        ),
        (
            {"failing": {"FunctionCreate": (EXHAUSTED, "GPU limit of your workspace: 0")}},
            {}, 4, "gdn: Modal does not grant it: GPU limit of your workspace: 0 see your workspace's limits",
        ),
        (
            {"image_result": failure("FAILURE", "pip failed"), "image_logs": BUILD},
            {}, 4, "gdn: the image could not be built: Image build for im-1 failed with the exception: ",
        ),
        ({"answer": measured("NVIDIA H200")}, {}, 4, "gdn: asked for B200, and the container has NVIDIA H200 nothing"),
    ],
    ids=["no-token", "wrong-token", "no-such-gpu", "limit", "image", "other-gpu"],
)  # fmt: skip
def test_a_fatal_error_is_one_line(behaviour, env, code, says):
    with Server(**behaviour) as s:
        done = rent(s, "run", "--algo", "cuda-v4", "-w", "0", "--json", **env)
    said = done.err[done.err.rindex("gdn: ") :]
    assert done.code == done.json["error"]["code"] == code and words(said).startswith(
        says
    ), done.err
    assert "Traceback" not in done.err and modal_server.TOKEN[1] not in done.err
    if "image_logs" in behaviour:
        assert (
            "ERROR: No matching distribution found" in said
            and "modal image logs im-1" in said
        )


def test_a_call_that_is_lost_costs_its_own_algo(tmp_path):
    """Remote time limit, remote memory, an exception of a type that is unknown here;
    the others keep their results.
    """
    unknown = b"\x80\x04\x8c\x12no_such_module_xyz\x94\x8c\x05Oops!\x94\x93\x94)R\x94."
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(unknown)
    fates = {
        "cuda-v1": failure("TIMEOUT", "Task's current input hit its timeout of 340s"),
        "cuda-v4": failure(
            "FAILURE", "Runner failed with exit code 137: out of memory"
        ),
        "cuda-v5": failure(
            "FAILURE",
            "Oops()",
            unknown,
            "Traceback ...:\n  File ...\nno_such_module_xyz.Oops: dear\n",
        ),
    }

    def answer(number: int, data: bytes):
        name = opened(data).jobs[0].request.solution or {"name": ""}
        return fates.get(name["name"].removeprefix("gdn_decode-")) or measured()(
            number, data
        )

    args = ("bench", "--algo", "cuda-v1,cuda-v4,cuda-v5,fla-recurrent", "-w", "0")
    with Server(answer=answer) as s:
        done = rent(s, *args, "--out", tmp_path / "r.json", GDN_HOME=str(tmp_path))
        assert done.code == errors.REMOTE and "Traceback" not in done.out + done.err
        said = words(done.out)
        assert (
            "failed cuda-v1: remote failed, Modal ended the container at its time limit;"
            " --timeout gives more" in said
        )
        assert (
            "failed cuda-v4: remote failed, the container ran out of memory (Runner failed with"
            " exit code 137" in said
        )
        assert re.search(
            "failed cuda-v5: remote failed, the container failed: no_such_module_xyz.Oops: dear;"
            " 1 work",
            said,
        )
        assert re.search(r"fla-recurrent( \*)? +2\.00 us", done.out)
        assert f"gdn modal bench --resume {tmp_path / 'r.json'}" in done.err

        fates.clear()  # and only what failed is sent again
        before = len(s.calls)
        refused = rent(s, "bench", "--resume", tmp_path / "r.json", "--algo", "cuda-v1")
        again = rent(
            s, "bench", "--resume", tmp_path / "r.json", GDN_HOME=str(tmp_path)
        )
    assert refused.code == errors.USAGE and "--resume takes --algo from" in refused.err
    sent = [
        opened(data).jobs[0].request.solution["name"]
        for data in list(s.calls.values())[before:]
    ]
    assert again.code == 0 and sent == [
        "gdn_decode-cuda-v1",
        "gdn_decode-cuda-v4",
        "gdn_decode-cuda-v5",
    ]
    records = json.loads((tmp_path / "r.json").read_text())["records"]
    assert {r["status"] for r in records} == {"passed"} and len(records) == 8
    runs = {
        row.algo: row.runs
        for row in history.overview(history.History(tmp_path / "runs").series())
    }
    assert runs["fla-recurrent"] == 1  # what was kept is not counted twice


def put_off(run: helpers.Done) -> None:
    assert run.code == 0 and re.search(r"cuda-v4( \*)? +2\.00 us", run.out), run.err
    # each interruption once: how many there are depends on when the calls' threads ask
    said = re.findall(
        "the calls go on there; asking again|Modal answers again", run.err
    )
    assert said and all(
        ("asking" in line) == (i % 2 == 0) for i, line in enumerate(said)
    ), run.err
    assert "Traceback" not in run.err


def test_a_refusal_of_modals_servers_costs_no_call():
    with Server(
        answer=measured(),
        faults={"FunctionGetOutputs": [(EXHAUSTED, "rate limit")] * 3},
    ) as s:
        put_off(rent(s, "bench", "--algo", "cuda-v4", "-w", "0"))
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
        left = rent(s, "bench", "--algo", "cuda-v4", "-w", "0", "--detach", **home)
        # each of three calls is asked for four times
        s.faults["FunctionGetOutputs"] = [fault] * 12
        put_off(
            rent(
                s,
                "bench",
                "--resume",
                re.search(r"gdn modal bench --resume (\S+)", left.err)[1],
                **home,
            )
        )
        assert s.faults["FunctionGetOutputs"] == [] and len(s.calls) == 3


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


def on_queue(number: int, data: bytes) -> list[bytes]:
    """The queue of a call that has measured its first workload."""
    (outcome,) = answered(measured()(number, data)).outcomes
    return [
        pickle.dumps(
            wire.encode(wire.Made(0, outcome.records[0], outcome.environment)),
            protocol=4,
        )
    ]


def test_what_a_preempted_call_had_measured_is_in_the_table(tmp_path):
    def answer(number: int, data: bytes):
        (piece,) = opened(data).jobs
        if piece.request.name != "cuda-v4":
            return measured()(number, data)
        s.queues[settings.RECORDS, f"fc-{number}"] = on_queue(number, data)
        return failure("INTERNAL_FAILURE", "the worker was preempted")

    with Server(answer=answer) as s:
        done = rent(
            s, "bench", "--algo", "cuda-v4", "-w", "0,1", "--out", tmp_path / "r.json"
        )
    assert (
        done.code == errors.REMOTE
        and "gdn_decode/cuda-v4: 1 of 2 came before that" in done.err
    )
    assert re.search(
        r"cuda-v4( \*)? +2\.00 us", done.out
    ) and "the worker was preempted; 1 work" in words(done.out)
    mine = [
        r
        for r in json.loads((tmp_path / "r.json").read_text())["records"]
        if r["algo"] == "cuda-v4"
    ]
    assert [r["status"] for r in mine] == ["passed", "remote_failed"]
    with Server(answer=measured()) as s:  # and is not paid for again
        again = rent(s, "bench", "--resume", tmp_path / "r.json")
    (request,) = (opened(data).jobs[0].request for data in s.calls.values())
    assert again.code == 0 and (request.name, len(request.workloads)) == ("cuda-v4", 1)
    assert request.workloads[0].uuid != mine[0]["workload"]["uuid"]
    assert (
        sum(
            r["algo"] == "cuda-v4"
            for r in json.loads((tmp_path / "r.json").read_text())["records"]
        )
        == 2
    )


@pytest.mark.slow
def test_a_preempted_call_goes_on_after_what_it_had_measured(tmp_path):
    """Killed after its fifth record, and started again by Modal: nothing is measured twice."""
    with Server(preempt_after=5) as s:
        args = (
            "--device",
            "cpu",
            "-w",
            "0,1",
            "--seconds",
            "0.05",
            "--together",
            "--json",
        )
        done = rent(s, "bench", "--algo", "pt-reference", *args)
    assert done.code == 0 and s.preempted == ["fc-0"], done.err
    due = [*["copy"] * 2, "empty", "copy-rate", *["pt-reference"] * 2]
    assert [r["algo"] for r in done.json["records"]] == due
    ((_, made),) = (
        (k, [wire.decode(pickle.loads(v), wire.Made) for v in q])
        for k, q in s.queues.items()
    )
    assert sum(m.record.algo == "pt-reference" for m in made) == 2


def test_replies_that_are_none_cost_their_own_algos(tmp_path):
    def answer(number: int, data: bytes):
        rubbish = {
            0: b"rubbish",
            1: failure("SUCCESS", "", pickle.dumps(None)),
            2: failure("SUCCESS", "", b"rubbish"),
        }
        return rubbish.get(number) or measured()(number, data)

    with Server(answer=answer) as s:
        done = rent(s, "bench", "--algo", "cuda-v4,cuda-v1", "-w", "0")
    assert done.code == errors.REMOTE and "Traceback" not in done.out + done.err
    assert words(done.out).count("what came back from Modal is not a reply of gdn") == 3
    assert re.search(r"cuda-v1( \*)? +2\.00 us", done.out)


def test_an_error_in_the_container_is_not_one_of_the_network(tmp_path):
    lost = failure(
        "FAILURE", "OSError(28)", pickle.dumps(OSError(28, "No space left on device"))
    )
    with Server(answer=lambda n, data: lost) as s:
        done = rent(s, "bench", "--algo", "cuda-v4", "-w", "0")
    assert (
        done.code == errors.REMOTE
        and "the container failed: [Errno 28] No space left" in words(done.out)
    )


def test_no_connection_is_known_soon(tmp_path):
    """At most `connect` seconds, 12, which a dozen of a test's would be too many of."""
    assert SETTINGS.limits.connect <= 15
    code = (
        "from gdn_cli import errors\nfrom gdn_cli.remote import modal_client as cloud\n"
    )
    code += "try: cloud.connect(0.5)\nexcept errors.GdnError as e: print(e.code, e)"
    server = {
        "MODAL_SERVER_URL": "http://127.0.0.1:9",
        "MODAL_TOKEN_ID": "ak-x",
        "MODAL_TOKEN_SECRET": "as-x",
    }
    done = helpers.python("-c", code, env=server)
    assert done.out.startswith(
        "4 no connection to Modal (no answer within 0.5 s); check the network"
    ), done.err


def test_without_the_package_modal_it_is_said_how_to_get_it(tmp_path):
    (tmp_path / "modal.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'modal'\", name='modal')\n"
    )
    done = helpers.gdn(
        "modal",
        "status",
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{paths.PACKAGE.parent}"},
    )
    assert done.code == errors.MISSING and words(done.err).endswith(
        "modal is missing here pip install modal"
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "run --algo cuda-v4 --gpu B200,H100",
            "--gpu B200,H100: expected a GPU one name, such as B200",
        ),
        ("run --algo cuda-v4 --image nosuch", "unknown image 'nosuch'"),
        ("run --algo cuda-v9", "unknown algo 'cuda-v9' did you mean cuda-v"),
        (
            "profile --algo cuda-v4 --tool sass",
            "--tool sass needs no GPU gdn profile --tool sass does it here",
        ),
        ("bench --resume nowhere.json", "nowhere.json: cannot be read"),
        ("run --algo cuda-v4 --parallel 0", "Invalid value for '--parallel'"),
        ("setup --dataset nowhere", "nowhere is not a FlashInfer-Trace data set"),
    ],
)
def test_wrong_usage_reaches_no_network(args, says, tmp_path):
    env = {
        "MODAL_SERVER_URL": "http://127.0.0.1:9",
        "MODAL_TOKEN_ID": "ak-x",
        "MODAL_TOKEN_SECRET": "as-x",
    }
    done = helpers.gdn("modal", *args.split(), env=env, cwd=tmp_path)
    assert done.code in (errors.USAGE, errors.MISSING) and says in words(done.err), (
        done.err
    )


# --- Ctrl-C


def interrupted(server: Server, when, *args, sig=signal.SIGINT) -> helpers.Done:
    """`gdn modal ARGS`, which gets a signal as soon as `when(server)`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", "modal", *map(str, args)], env=helpers.environment(**server.env),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's `&` has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + helpers.PATIENCE_S
        while not when(server):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(sig)
        out, err = process.communicate(timeout=helpers.PATIENCE_S)
    finally:
        process.kill()
    return helpers.Done(process.returncode, out, err)


def test_ctrl_c_while_waiting_stops_the_app_and_keeps_the_arrived_results(tmp_path):
    """Records of a call that still runs have arrived too."""
    out = tmp_path / "r.json"

    def answer(number: int, data: bytes):
        if number < 2:
            return measured()(number, data)
        s.queues[settings.RECORDS, f"fc-{number}"] = on_queue(number, data)
        return None

    with Server(answer=answer) as s:
        done = interrupted(
            s, lambda s: out.exists() and len(json.loads(out.read_text())["records"]) == 7,
            "bench", "--algo", "cuda-v4", "-w", "0,1", "--json", "--out", out,
        )  # fmt: skip
    assert done.code == errors.INTERRUPTED and "Traceback" not in done.err
    document = done.json
    assert document["interrupted"] and document == json.loads(out.read_text())
    names = ["copy", "empty", "copy-rate", "pt-reference", "cuda-v4"]
    assert list(dict.fromkeys(r["algo"] for r in document["records"])) == names
    assert document["records"][-1]["gpu"]["uuid"] == "GPU-1"
    assert len(s.disconnects) == 1  # the app is stopped, and its container with it
    assert (
        document["modal"]["calls"] == []
        and f"gdn modal bench --resume {out}" in done.err
    )


def test_ctrl_c_before_the_start_leaves_nothing_behind():
    with Server(create_delay=30) as s:
        done = interrupted(
            s,
            lambda s: "FunctionCreate" in s.rpcs,
            "bench",
            "--algo",
            "cuda-v4",
            "-w",
            "0",
            "--json",
        )
    assert done.code == errors.INTERRUPTED and "Traceback" not in done.err
    assert done.json["records"] == [] and done.json["interrupted"]
    assert s.calls == {} and len(s.disconnects) == 1


# --- runs that are left there, setup, status, logs


def test_a_run_that_was_left_is_listed_and_fetched(tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    with Server(answer=lambda n, data: None) as s:
        done = rent(s, "bench", "--algo", "cuda-v4", "-w", "0", "--detach", **home)
        assert (
            done.code == 0
            and s.app_states == [modal_server.pb.APP_STATE_DETACHED]
            and len(s.calls) == 3
        )
        file = re.search(r"gdn modal bench --resume (\S+)", done.err)[1]
        assert [
            len(c["keys"]) for c in json.loads(open(file).read())["modal"]["calls"]
        ] == [
            1,
            1,
            1,
        ]
        s.answer = lambda n, data: measured()(n, data) if n else None
        listed = rent(s, "status", "--json", **home).json
        shown = rent(s, "status", **home).out
        s.answer = measured()
        fetched = rent(s, "bench", "--resume", file, **home)
        emptied = rent(s, "status", "--json", **home).json
    # gdn's, and nobody else's
    assert [a["app"] for a in listed["apps"]] == ["ap-" + "0" * 22]
    assert listed["runs"] == [
        {
            "command": "bench",
            "file": file,
            "calls": 3,
            "done": 2,
            "under way": 1,
            "lost": 0,
        }
    ]
    assert (
        "3 calls left behind: 2 done, 1 under way" in shown
        and f"--resume {file}" in shown
    )
    assert (
        fetched.code == 0
        and re.search(r"cuda-v4( \*)? +2\.00 us", fetched.out)
        and len(s.calls) == 3
    )
    assert "container time" not in fetched.err and emptied["runs"] == []


def test_a_profile_that_was_left_is_listed_and_fetched(tmp_path):
    home = {"GDN_HOME": str(tmp_path)}
    made = profiles.v4(
        environment=profiles.GPU | {"gpu": "NVIDIA B200", "where": "modal"}
    )
    del made["folder"]
    answer = wire.encode(
        Reply(profiles=[Profile(made, {"log": wire.zlib.compress(b"LOG")})])
    )
    with Server(answer=lambda n, data: None) as s:
        done = rent(s, "profile", "cuda-v4", "-w", "0", "--detach", **home)
        file = re.search(r"gdn modal profile --resume (\S+)", done.err)[1]
        shown = rent(s, "status", **home).out
        wrong = [
            rent(s, "bench", "--resume", file, **home),
            rent(s, "profile", "--resume", file, "-w", "1", **home),
        ]
        s.answer = lambda n, data: answer
        fetched = rent(s, "profile", "--resume", file, **home)
        again = rent(s, "profile", "--resume", file, **home)
    assert (done.code, done.out, len(s.calls)) == (
        0,
        "",
        1,
    ) and "1 call left behind: 1 under way" in shown
    assert (
        f"gdn modal profile --resume {file}" in shown
        and wrong[0].code == wrong[1].code == errors.USAGE
    )
    assert f"is a run of profile gdn modal profile --resume {file}" in words(
        wrong[0].err
    )
    assert "--resume takes --workload from" in wrong[1].err
    assert (
        fetched.code == 0
        and "latency-bound" in fetched.out
        and "NVIDIA B200 (modal)" in fetched.out
    )
    assert (tmp_path / "profiles" / made["name"] / "log").read_bytes() == b"LOG"
    # it has come, and is kept
    assert again.code == errors.USAGE and f"{file}: cannot be read" in again.err


def test_setup_makes_the_volumes_and_uploads_missing_files(tmp_path):
    files = {
        "definitions/gdn/d.json": b"{}", "workloads/gdn/d.jsonl": b"{}\n", "blob/workloads/a.safetensors": b"\0" * 99,
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "traces").mkdir()
    with Server() as s:
        first = rent(s, "setup", "--dataset", tmp_path)
        again = rent(s, "setup", "--dataset", tmp_path, "--no-image", "--json")
        bare = rent(s, "setup", "--no-data", "--json")
        volume = s.volumes["flashinfer-trace"]
        assert (
            volume.pop(setup.DATASET)
            and volume == files
            and s.volumes["gdn-cache"] == {}
        )
        refused = rent(s, "setup", "--dataset", tmp_path)
    assert (
        first.code == 0
        and refused.code == errors.USAGE
        and s.volumes["flashinfer-trace"] == files
    )
    assert (
        "gdn: volume flashinfer-trace has files that `gdn modal setup` did not put there (blob,"
        " definitions, " in (words(refused.err))
    )
    # the image costs no GPU's time
    assert not s.calls and not any(f.resources.gpu_config.count for f in s.functions)
    assert (bare.json["image"], again.json["image"], len(s.functions)) == (
        "gdn",
        None,
        2,
    )
    steps = (
        "token: Modal accepts it",
        "volume flashinfer-trace: there",
        "image gdn: there",
        "1 to 3 of 3 files",
    )
    for step in steps:
        assert step in first.err
    # texts again, tensors not
    assert again.json["kept"] == 1 and again.json["uploaded"] == 2
    assert bare.json["uploaded"] == 0 and bare.code == 0


def test_logs_have_no_secrets():
    with Server() as s:
        done = rent(s, "logs", "-n", "5")
        s.app_name = "something-else"
        none = rent(s, "logs")
    assert done.out == "LINE-ONE\nwith *** in it\n"
    assert none.code == errors.USAGE and "no app of gdn is running" in none.err


def test_no_secret_reaches_records_parcels_or_what_is_packed(tmp_path):
    secret = {"HF_TOKEN": "hf-PRIVATE", "MY_PASSWORD": "pw-PRIVATE"}
    with Server(answer=measured()) as s:
        done = rent(
            s,
            "bench",
            "--algo",
            "cuda-v4",
            "-w",
            "0",
            "--out",
            tmp_path / "r.json",
            **secret,
        )
        assert done.code == 0
        packed = helpers.gdn(
            "pack",
            "--algo",
            "cuda-v4",
            "--out",
            tmp_path / "s.json",
            env=s.env | secret,
        )
    texts = [
        done.out,
        done.err,
        (tmp_path / "r.json").read_text(),
        (tmp_path / "s.json").read_text(),
        packed.out,
    ]
    texts += [wire.zlib.decompress(data).decode() for data in s.calls.values()]
    texts += [
        "\n".join(line for image in s.images for line in image.dockerfile_commands)
    ]
    texts += [data.decode("utf-8", "replace") for data in s.contents.values()]
    for value in (*modal_server.TOKEN, *secret.values()):
        assert not any(value in text for text in texts), value
