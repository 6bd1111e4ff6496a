"""`gdn modal check`, against the test server: one container, what it is asked for, and
what is made of the answer.
"""

from __future__ import annotations

import json

import profiles
import reports
from cli.test_modal import measured, rent
from modal_server import Server
from remote.test_remote import answered, job, opened, rented, work_of

from gdn_cli import errors
from gdn_cli.machine import inventory
from gdn_cli.remote import container, wire
from gdn_cli.remote.wire import Profile, Refusal, Reply
from gdn_cli.run import worker_process

INSTALLED = [
    {
        "state": "ok",
        "what": "nvcc",
        "found": "/usr/local/cuda",
        "for": "CUDA algos",
        "mend": None,
    },
    {
        "state": "missing",
        "what": "fla-core",
        "found": "not installed",
        "for": "fla-upstream",
        "mend": "pip install it",
    },
    {
        "state": "missing",
        "what": "modal",
        "found": "not installed",
        "for": "a B200 at Modal",
        "mend": None,
    },
]


def answering(profile: Profile, without: str = ""):
    """A container in which all works but the tier `without`."""

    def answer(number: int, data: bytes) -> bytes:
        reply = wire.decode(measured()(number, data), Reply)
        floors, *_ = reply.outcomes
        tiers = opened(data).jobs[0].request.timing.tiers
        copy, *machine = floors.records
        lost = {"status": "tier_unavailable", "reason": "no library", "timing": None}
        every = [
            wire.msgspec.to_builtins(copy)
            | {"tier": tier}
            | (lost if tier == without else {})
            for tier in tiers
        ]
        clocks = {"before": {}, "during": [], "after": {"sm_mhz": 1965}}
        floors.records = wire.msgspec.convert(
            [every[0] | {"gpu_state": clocks}, *every[1:]], list[type(copy)]
        ) + machine * len(tiers)
        reply.findings, reply.profiles = INSTALLED, [profile]
        return wire.encode(reply)

    return answer


def test_one_container_is_asked_for_everything_and_a_table_says_what_works(tmp_path):
    denied = Profile(
        refused=Refusal("no permission to read counters", "ask Modal", errors.MISSING)
    )
    with Server(answer=answering(denied, without="nvbench")) as s:
        done = rent(s, "check", "--out", tmp_path / "r.json")
    (data,) = s.calls.values()
    content = opened(data)
    floors, *checks = content.jobs
    assert content.examine and len(content.profiles) == 1 and content.limit_s == 600
    assert floors.request.timing.tiers == ("cupti", "events", "graph", "nvbench")
    assert {piece.request.command for piece in checks} == {"check"} and len(checks) >= 9
    assert {len(piece.request.workloads) for piece in content.jobs} == {1}
    wanted = content.profiles[0]
    assert (wanted["settings"]["tool"], wanted["subject"]["algo"]["name"]) == (
        "ncu",
        "cuda-v5",
    )
    document = json.loads((tmp_path / "r.json").read_text())
    found = {f["what"]: (f["state"], f["found"]) for f in document["findings"]}
    assert found["tier cupti"] == ("ok", "a copy of 1.00 MB takes 2.00 us")
    assert found["tier nvbench"] == ("missing", "tier unavailable: no library")
    assert found["a large copy"] == ("ok", "500 GB/s") and found["an empty launch"] == (
        "ok",
        "2.00 us",
    )
    assert found["clocks"] == (
        "ok",
        "1965 to 1965 MHz of at most 1980 after a measurement",
    )
    assert found["ncu's counters"] == ("missing", "no permission to read counters")
    assert (
        found["algos"] == ("ok", f"{len(checks)} of {len(checks)} built and right")
        and "modal" not in found
    )
    assert (
        done.code == 0
        and "cuda-v5" in done.out
        and "ask Modal" in done.out
        and "pip install it" not in done.out
    )


def test_an_algo_that_fails_there_and_counters_that_can_be_read():
    made = profiles.typed(
        profiles.v4(environment=reports.GPU | {"gpu": "NVIDIA B200", "where": "modal"})
    )
    answer = answering(Profile(made))

    def broken(number: int, data: bytes) -> bytes:
        reply = wire.decode(answer(number, data), Reply)
        last = reply.outcomes[-1]
        last.records[0].status, last.records[0].reason = "build_failed", "nvcc said no"
        return wire.encode(reply)

    with Server(answer=broken) as s:
        done = rent(s, "check", "--json")
    found = {f["what"]: (f["state"], f["found"]) for f in done.json["findings"]}
    assert done.code == errors.FAILED and found["algos"][0] == "bad"
    assert found["ncu's counters"] == ("ok", "it reads the counters of cuda-v4")


def test_the_container_says_what_is_installed_and_leaves_out_a_profile_without_time(
    monkeypatch,
):
    machine = inventory.Machine(gpus=lambda: ())
    monkeypatch.setattr(
        worker_process, "serve", lambda *_, **__: worker_process.Outcome("done")
    )
    work = rented(minutes=1)
    work.wanted = []
    content = opened(work.parcel(work_of(job("pt-reference", "cpu")), None))
    content.profiles = [{}]
    reply = answered(container.serve(wire.encode(content), machine=machine))
    assert {"torch", "nvcc", "GPU", "--tool ncu"} <= {f["what"] for f in reply.findings}
    assert reply.profiles[0].refused.message == "no time was left for it"
