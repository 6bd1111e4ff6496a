"""`gdn modal check`, against the test server: one container, what it is asked for, and
what is made of the answer.
"""

from __future__ import annotations

import json

import profiles
import reports
from cli.test_modal import measured, rent
from modal_server import Server
from remote.test_remote import answered, job, opened, rented

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
        "for": "",
        "mend": None,
    },
    {
        "state": "missing",
        "what": "fla",
        "found": "",
        "for": "",
        "mend": "pip install it",
    },
    {"state": "missing", "what": "modal", "found": "", "for": "", "mend": None},
]


def answering(profile: Profile, without: str = ""):
    """A container in which all works but the tier `without`."""

    def answer(number: int, data: bytes) -> bytes:
        reply = wire.decode(measured()(number, data), Reply)
        floors, *_ = reply.outcomes
        tiers = opened(data).jobs[0].request.timing.tiers
        copy, *machine = floors.records
        clocks = {"before": {}, "during": [], "after": {"sm_mhz": 1965}}
        plain = wire.msgspec.to_builtins(copy) | {"gpu_state": clocks}
        every = [plain | {"tier": tier} for tier in tiers]
        for record in every:
            if record["tier"] == without:
                record |= {"status": "tier_unavailable", "reason": "no library"}
                record["timing"] = None
        copies = wire.msgspec.convert(every, list[type(copy)])
        replace = wire.msgspec.structs.replace
        machine = [replace(r, tier=tier) for tier in tiers for r in machine]
        floors.records = copies + machine
        reply.findings, reply.profiles = INSTALLED, [profile]
        return wire.encode(reply)

    return answer


def found_in(document: dict) -> dict[str, tuple[str, str]]:
    return {f["what"]: (f["state"], f["found"]) for f in document["findings"]}


def test_one_container_is_asked_for_everything_and_a_table_says_what_works(tmp_path):
    denied = Profile(refused=Refusal("no permission", "ask Modal", errors.MISSING))
    with Server(answer=answering(denied, without="nvbench")) as s:
        done = rent(s, "check --out", tmp_path / "r.json")
    (data,) = s.calls.values()
    content = opened(data)
    floors, *checks = content.jobs
    assert content.examine and content.limit_s == 600
    assert floors.request.timing.tiers == ("cupti", "events", "graph", "nvbench")
    assert {piece.request.command for piece in checks} == {"check"} and len(checks) >= 9
    assert {len(piece.request.workloads) for piece in content.jobs} == {1}
    (wanted,) = content.profiles
    assert wanted["settings"]["tool"] == "ncu"
    assert wanted["subject"]["algo"]["name"] == "cuda-v5"
    found = found_in(json.loads((tmp_path / "r.json").read_text()))
    assert (
        found.items()
        >= {
            "tier cupti": ("ok", "a copy of 1.00 MB takes 2.00 us"),
            "tier nvbench": ("missing", "tier unavailable: no library"),
            "a large copy": ("ok", "500 GB/s"),
            "an empty launch": ("ok", "2.00 us"),
            "clocks": ("ok", "1965 to 1965 MHz of at most 1980 after a measurement"),
            "ncu's counters": ("missing", "no permission"),
            "algos": ("ok", f"{len(checks)} of {len(checks)} built and right"),
        }.items()
    )
    assert "modal" not in found and done.code == 0
    assert "cuda-v5" in done.out and "ask Modal" in done.out
    assert "pip install it" not in done.out


def test_an_algo_that_fails_there_and_counters_that_can_be_read():
    where = reports.GPU | {"gpu": "NVIDIA B200", "where": "modal"}
    answer = answering(Profile(profiles.typed(profiles.v4(environment=where))))

    def broken(number: int, data: bytes) -> bytes:
        reply = wire.decode(answer(number, data), Reply)
        record = reply.outcomes[-1].records[0]
        record.status, record.reason = "build_failed", "nvcc said no"
        return wire.encode(reply)

    with Server(answer=broken) as s:
        done = rent(s, "check --json")
    found = found_in(done.json)
    assert done.code == errors.FAILED and found["algos"][0] == "bad"
    assert found["ncu's counters"] == ("ok", "it reads the counters of cuda-v4")


def test_the_container_says_what_is_installed_and_leaves_out_a_profile_without_time(
    monkeypatch,
):
    machine = inventory.Machine(gpus=lambda: ())
    monkeypatch.setattr(
        worker_process, "serve", lambda *_, **__: worker_process.Outcome("done")
    )
    engine = rented(minutes=1)
    engine.wanted = []
    (work,) = engine.split([job("pt-reference", "cpu")])
    content = opened(engine.parcel(work, None))
    content.profiles = [{}]
    reply = answered(container.serve(wire.encode(content), machine=machine))
    assert {"torch", "nvcc", "GPU", "--tool ncu"} <= {f["what"] for f in reply.findings}
    assert reply.profiles[0].refused.message == "no time was left for it"
