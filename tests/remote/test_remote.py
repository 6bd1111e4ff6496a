"""What travels to Modal and what runs there, without Modal: settings, parcels, the
container's function, its caches, resuming; and every algo's request by a worker that
has the carried files and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import building
import helpers
import profiles as documents
import pytest
from msgspec import structs
from packaging.requirements import Requirement

import gdn_cli
from gdn_cli import errors, paths
from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.tiers import TIERS
from gdn_cli.catalog.workloads import embedded
from gdn_cli.errors import RemoteError, UsageError
from gdn_cli.machine import inventory
from gdn_cli.parsing import to_json
from gdn_cli.profile import session
from gdn_cli.records import store
from gdn_cli.records.store import Writer
from gdn_cli.remote import (
    calls,
    container,
    engine,
    modal_client,
    modal_errors,
    profiles,
    replies,
    resume,
    settings,
    wire,
    work,
)
from gdn_cli.remote.wire import Cache, Parcel, Profile, Refusal, Reply
from gdn_cli.remote.work import Rent
from gdn_cli.run import execute, jobs, planning, worker_process
from gdn_cli.schema.record_types import Environment, RemoteCall, Rented, Spent, Status
from gdn_cli.worker.request import Timing

REGISTRY = helpers.REGISTRY
SETTINGS = settings.load()
B200 = SETTINGS.parse("B200")
PACKAGE = Path(gdn_cli.__file__).parent


def job(
    name: str, mode: str, workloads: int = 1, command: str = "check", tiers=(), **more
) -> jobs.Job:
    algo = REGISTRY.find(name)
    op = REGISTRY.ops[algo.op]
    known = sorted(embedded(op), key=lambda w: max(w.axes.values()))
    return jobs.Job.of(
        command,
        op,
        pack.definition(op, REGISTRY),
        mode,
        known[:workloads],
        [(algo, pack.pack(algo, op))],
        timing=Timing(tiers),
        **more,
    )


V1, V4 = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")


def work_of(*wanted: jobs.Job) -> engine.Work:
    return engine.Work(list(wanted), 60)


def kept_by(wanted: list[jobs.Job], kept: list[bytes]) -> engine.Work:
    return engine.Work(wanted, 60, kept=kept)


def opened(data: bytes) -> Parcel:
    return wire.decode(data, Parcel)


def answered(data: bytes) -> Reply:
    return wire.decode(data, Reply)


def rented(**more) -> engine.Engine:
    rent = Rent(SETTINGS, B200, SETTINGS.chosen(None), **more)
    return engine.Engine(rent=rent, say=lambda line: None)


# --- what a GPU's name means


@pytest.mark.parametrize(
    ("asked", "sent_as", "devices", "fits"),
    [
        (None, "B200", "NVIDIA B200", True),
        ("B200:2", "B200:2", "NVIDIA B200,NVIDIA B200", True),
        ("B200:2", "B200:2", "NVIDIA B200", False),
        ("B200", "B200", "NVIDIA B300 SXM6 AC", False),
        ("B200", "B200", "NVIDIA GB200", False),
        ("B200", "B200", "", False),
        # without its `!` Modal may give an H200
        ("H100", "H100!", "NVIDIA H100 80GB HBM3", True),
        ("H100!", "H100!", "NVIDIA H200", False),
        ("H100", "H100!", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
        ("A100-80GB", "A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "A100-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("L4", "L4", "NVIDIA L40S", False),
        ("A10", "A10", "NVIDIA A10G", True),
        ("RTX-PRO-6000", "RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell", True),
    ],
)
def test_only_the_gpu_that_was_asked_for_will_do(asked, sent_as, devices, fits):
    gpu = SETTINGS.parse(asked)
    assert str(gpu) == sent_as
    why = gpu.mismatch(devices.split(",") if devices else [])
    assert (why is None) == fits
    if why:
        assert f"asked for {sent_as}" in why


@pytest.mark.parametrize(
    "asked",
    ["B200,H100", "B200+", "B200:0", "B200:16", "B200:", "a b", "B200!!", "any"],
)
def test_anything_but_one_gpu_by_name_is_refused(asked):
    with pytest.raises(UsageError, match="expected a GPU"):
        SETTINGS.parse(asked)


# --- configs/modal.toml and the pins


# their wheels choose torch's version: not for an image with another one
ENGINES = {"vllm", "sglang"}


def test_the_image_has_what_pyproject_pins_and_nothing_is_named_twice(monkeypatch):
    project = registry.read_toml(paths.PYPROJECT)["project"]
    listed = settings.pins()
    pins = {r.name: r for r in map(Requirement, listed)}
    assert len(pins) == len(listed)
    assert all([s.operator for s in r.specifier] == ["=="] for r in pins.values())
    assert {tier.package for tier in TIERS.values()} <= {None} | set(pins)
    # what no worker imports
    only_here = {"typer", "rich", "modal", "tomli", "matplotlib", "jinja2"}
    for line in project["dependencies"] + project["optional-dependencies"]["peers"]:
        requirement = Requirement(line)
        if requirement.name not in only_here:
            (pin,) = pins[requirement.name].specifier
            assert requirement.specifier.contains(pin.version), line
    for algo in REGISTRY.algos:
        place, packages = rented().place(algo), set(algo.packages.values())
        if engines := ENGINES & packages:
            assert place.reason == f"package {min(engines)} is not in the image"
        else:
            assert packages <= set(pins), algo.full_name
            assert place.mode == ("cuda" if "cuda" in algo.modes else algo.modes[0])
    # packages that an image brings along are not replaced
    kept = settings.packages(SETTINGS.chosen("flashinfer"))
    assert "ninja==1.13.2" in kept and not {"torch", "triton"} & set(
        pin.split("==")[0] for pin in kept
    )
    # the same list of an installed wheel, as its metadata has it
    lines = [f"{pin} ; extra == 'image'" for pin in listed]
    lines += ["pytest>=8; extra == 'dev'", "numpy>=1.26"]
    monkeypatch.setattr(paths, "IN_CHECKOUT", False)
    monkeypatch.setattr(settings.metadata, "requires", lambda name: lines)
    assert settings.pins() == listed


# --- parcels


def test_all_54_workloads_travel_as_one_request_and_come_back_as_they_were():
    whole = job("cuda-v4", "cuda", 54, "bench", tiers=("cupti",))
    data = rented().parcel(work_of(whole), B200)
    content = opened(data)
    (only,) = content.jobs
    assert (to_json(only.request), only.timeout_s) == (to_json(whole.request), 300.0)
    assert content.gpu == B200 and len(data) < 100_000
    records, env = [building.record("a", 2.0)], Environment(gpu="x")
    outcome = jobs.Outcome(Status.TIMED_OUT, "r", records, env, ["last"], 3)
    document = documents.typed(documents.v4(label="\ud800"))
    profile = Profile(document, {"a": bytes(range(256)) * 9})
    reply = Reply(outcomes=[outcome], profiles=[profile])
    assert answered(wire.encode(reply)) == reply


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"schema": 99}',
        *(f'{{"schema": 4, "profiles": {shape}}}' for shape in (1, [1], {"a": 1})),
        None,
    ],
)
def test_an_invalid_parcel_is_refused_in_one_line(content):
    data = b"no zlib" if content is None else wire.zlib.compress(content.encode())
    with pytest.raises(RemoteError, match="not a reply of gdn|speaks schema 99"):
        answered(data)
    # the other side says so as well, and does not raise
    reply = answered(container.serve(data))
    assert reply.lost and reply.outcomes == []


@pytest.mark.parametrize("algo", REGISTRY.algos, ids=lambda a: a.full_name)
@pytest.mark.sampled(3)
def test_every_request_arrives_as_it_is_with_every_file_that_a_source_names(algo):
    mine = job(algo.full_name, algo.modes[0])
    (there,) = opened(rented().parcel(work_of(mine), B200)).jobs
    assert to_json(there.request) == to_json(mine.request)
    sources = {s["path"]: s["content"] for s in there.request.solution["sources"]}
    named = {algo.entry_point.split("::")[0]}
    for name, text in sources.items():
        named |= set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M))
        if name.endswith(".py"):
            modules = re.findall(r"^\s*from \.(\w+)", text, re.M)
            named |= {f"{module}.py" for module in modules}
    assert named <= set(sources), f"left behind: {named - set(sources)}"


# --- the container


def carried(folder: Path) -> Path:
    """gdn's own files as they are mounted (modal_client._IGNORED stays here);
    cli/test_modal.py has the mount agree.
    """
    names = [pattern.rpartition("/")[2] for pattern in modal_client._IGNORED]
    ignored = shutil.ignore_patterns(*names)
    shutil.copytree(PACKAGE, folder / "gdn_cli", ignore=ignored)
    return folder


_SERVE = """
import sys
from gdn_cli.remote import container
assert container.__file__.startswith(sys.argv[1]), container.__file__
sys.stdout.buffer.write(container.serve(sys.stdin.buffer.read()))
assert not {"modal", "typer", "rich"} & set(sys.modules)
"""


def serve_alone(root: Path, data: bytes) -> Reply:
    """container.serve in a new process, in an empty folder, with only the carried files."""
    empty = root.parent / "empty"
    empty.mkdir()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [p for p in given if p and not Path(p, "gdn_cli").exists()]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(empty),
        "PYTHONPATH": os.pathsep.join([str(root), *packages]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", _SERVE, str(root)]
    done = subprocess.run(command, input=data, capture_output=True, cwd=empty, env=env)
    assert done.returncode == 0, done.stderr.decode()
    return answered(done.stdout)


# One algo per language: a file that a builder needs could be missing.
HERE = [
    ("gdn_decode/cpp-v1", "cpu"),
    ("gdn_decode/triton-v2", "interpreter"),
    ("gdn_decode/pt-reference", "cpu"),
]


@pytest.mark.slow
def test_algos_get_their_verdicts_with_only_the_carried_files(tmp_path):
    languages = {REGISTRY.find(name).language for name, _ in HERE}
    assert languages == {a.language for a in REGISTRY.algos if set(a.modes) != {"cuda"}}
    wanted = [job(name, mode) for name, mode in HERE]
    parcel = rented().parcel(work_of(*wanted), None)
    reply = serve_alone(carried(tmp_path / "root"), parcel)
    assert reply.lost is None
    for here, there in zip(wanted, reply.outcomes, strict=True):
        (record,) = there.records
        assert (there.status, record.status) == ("done", "passed"), here.algo.name
        assert there.environment.where == "modal" and there.environment.image == "gdn"
    # to the last bit what this machine's command says
    assert jobs.execute(wanted[-1]).records[0].check == record.check


def test_another_gpu_than_was_asked_for_is_said_before_anything_runs(monkeypatch):
    h200 = inventory.Gpu("NVIDIA H200", "9.0", "1")
    machine = inventory.Machine(gpus=lambda: (h200,))
    monkeypatch.setattr(worker_process, "serve", lambda *_: pytest.fail("it ran"))
    wanted = V4
    data = container.serve(rented().parcel(work_of(wanted), B200), machine=machine)
    why = "asked for B200, and the container has NVIDIA H200"
    assert why in answered(data).lost
    Cloud([data]).install(monkeypatch)
    ((_, lost),) = rented()([wanted])
    assert (lost.code, lost.records) == (errors.REMOTE, []) and why in lost.reason


def test_what_was_measured_before_the_containers_time_is_up_is_sent_back(monkeypatch):
    """A worker is ended before its container, and by what option is said; not for
    --timeout, which is the algo's.
    """
    clock, asked = [1000.0], []
    monkeypatch.setattr(container, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def serve(request, env, timeout_s, on_record):
        asked.append(timeout_s)
        clock[0] += timeout_s
        return jobs.Outcome(Status.TIMED_OUT, "no end", [building.record("a", 2.0)])

    monkeypatch.setattr(worker_process, "serve", serve)
    slow = [job("pt-reference", "cpu", timeout_s=s) for s in (20.0, 300.0, 300.0)]
    parcel = rented(minutes=1).parcel(engine.Work(slow, 60), None)
    by_algo, by_limit, unstarted = answered(container.serve(parcel)).outcomes
    assert asked == [20, 60 - 15 - 20]  # 15 s to send it
    assert (by_algo.status, by_algo.reason) == ("timed_out", "no end")
    assert (len(by_limit.records), len(unstarted.records)) == (1, 0)
    for outcome in (by_limit, unstarted):
        assert (outcome.status, outcome.code) == ("remote_failed", errors.REMOTE)
        assert "time of 60 s was up; --max-minutes gives more" in outcome.reason


@pytest.mark.slow
def test_a_profile_is_made_there_and_its_folder_unpacked_here(tmp_path):
    tool, (subject,) = session.subjects(
        REGISTRY, ["pt-reference"], None, "torch", "0", None, "cpu"
    )
    asked = session.Settings(tool, tmp_path / "here", seconds=0.05)
    wanted, work = engine.Work([], 60, [session.sent(subject, asked)]), rented()
    assert not wanted.cuda
    (made,) = answered(container.serve(work.parcel(wanted, None))).profiles
    profile = profiles.unpacked(made, asked.folder, work.say)
    folder = Path(profile.folder)
    assert folder.parent == tmp_path / "here"
    assert (folder / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    kept = session.load(folder)
    assert kept == profile and kept.passed and kept.survey.time_us > 0
    assert (kept.environment.where, kept.algo) == ("modal", "pt-reference")


def subjects_of(*names: str) -> list[session.Subject]:
    return session.subjects(
        REGISTRY, list(names), None, "torch", "0", None, "cuda", place=rented().place
    )[1]


def profile_of(gpu: str = "NVIDIA B200", files=None, **more) -> Profile:
    environment = documents.GPU | {"gpu": gpu}
    document = documents.typed(documents.v4(environment=environment, **more))
    return Profile(document, files or {})


def profiled(monkeypatch, folder: Path, answer, *names: str) -> tuple[list, Cloud]:
    """The profiles made of what Modal answers, in `folder`."""
    fake = Cloud([answer]).install(monkeypatch)
    asked = session.Settings("torch", folder)
    return list(profiles.make(rented(), subjects_of(*names), asked)), fake


def test_profiles_are_of_one_container_and_a_refusal_is_passed_on(
    tmp_path, monkeypatch
):
    files = {"a.txt": b"A"}
    there = [profile_of(name=f"of-{i}", files=files) for i in range(2)]
    answer = wire.encode(Reply(profiles=there))
    made, fake = profiled(monkeypatch, tmp_path, answer, "cuda-v4", "cuda-v1")
    assert [Path(p.folder).name for p in made] == ["of-0", "of-1"]
    assert [(Path(p.folder) / "a.txt").read_text() for p in made] == ["A", "A"]
    assert len(fake.parcels) == 1
    refused = Profile(refused=Refusal("no ncu here", "take torch", errors.MISSING))
    with pytest.raises(errors.GdnError, match="no ncu here; take torch") as caught:
        profiled(
            monkeypatch, tmp_path, wire.encode(Reply(profiles=[refused])), "cuda-v4"
        )
    assert caught.value.code == errors.MISSING
    with pytest.raises(RemoteError, match="lost"):
        profiled(monkeypatch, tmp_path, modal_errors.CallFailedError("lost"), "cuda-v4")


def test_builds_are_kept_for_the_next_container(tmp_path, monkeypatch):
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr(container, "CACHE", str(volume))
    seen, written, committed = [], [], []
    for _ in range(2):
        with container._builds(Cache("key", "gdn-cache"), committed.append) as env:
            file = Path(env["TRITON_CACHE_DIR"]) / "deep" / "kernel.cubin"
            seen.append(file.exists())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"cubin")
        written.append((volume / "key.tar.gz").stat().st_mtime_ns)
    # nothing new, nothing written
    assert seen == [False, True] and written[0] == written[1]
    assert committed == ["gdn-cache"]
    (volume / "broken.tar.gz").write_bytes(b"not an archive")
    for key in ("another", "broken"):
        with container._builds(Cache(key, "gdn-cache"), committed.append) as env:
            assert not Path(env["TRITON_CACHE_DIR"]).exists()


# --- calls, limits, and results


class Cloud:
    """modal_client's calls: each has a list of what a look at it gives (bytes, None, an
    exception). `clock` is the time, which passes only while somebody waits.
    """

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.parcels, self.cancelled, self.declared = [], [], None
        self.clock, self.deaf = 0.0, False
        self.refuses, self.live = {}, {}

    def install(self, monkeypatch):
        for name in ("deployed", "fitted", "spawn", "recall", "first", "cancel"):
            monkeypatch.setattr(modal_client, name, getattr(self, name))
        monkeypatch.setattr(modal_client, "connect", lambda seconds: None)
        monkeypatch.setattr(modal_client, "app_name", lambda *_: "gdn-0")
        monkeypatch.setattr(modal_client, "kept", lambda id: [])
        clock = SimpleNamespace(monotonic=lambda: self.clock)
        monkeypatch.setattr(calls, "time", clock)
        return self

    def deployed(self, name, settings, image, say):
        return name

    def fitted(self, function, *declared):
        self.declared = declared

    def recall(self, id):
        return self.call(None, id)

    def first(self, waiting, seconds):
        self.clock += seconds
        for call in waiting:
            got = call.script.pop(0) if len(call.script) > 1 else call.script[0]
            call.trouble = (
                got if isinstance(got, modal_errors.UnreachableError) else None
            )
            call.got = None if call.trouble else got
        return [call for call in waiting if call.got is not None]

    def spawn(self, function, data):
        sending = modal_client.futures.Future()
        if error := self.refuses.get(len(self.parcels)):
            sending.set_exception(error)
        else:
            sending.set_result(self.call(data))
        return sending

    def call(self, data, id=None):
        number = len(self.parcels)
        self.parcels.append(data)
        id = id or f"fc-{number}"
        call = SimpleNamespace(
            id=id,
            trouble=None,
            script=self.scripts.pop(0),
            records=self.live.get(id, []),
        )

        def result():
            if isinstance(call.got, BaseException):
                raise call.got
            return call.got

        call.listen = lambda: SimpleNamespace(result=result)
        call.number = number
        return call

    def cancel(self, waiting, seconds):
        self.cancelled += [call.number for call in waiting]
        return [] if self.deaf else waiting


def passed(j: jobs.Job, **environment) -> bytes:
    """The reply of a container in which everything passed."""
    records = [
        building.record(j.algo.name, None, w.uuid, tier=None) for w in j.workloads
    ]
    env = Environment(gpu="NVIDIA B200", where="modal", **environment)
    return wire.encode(
        Reply(outcomes=[jobs.Outcome(Status.DONE, records=records, environment=env)])
    )


RESET = modal_errors.UnreachableError(
    "no connection to Modal (Connection reset by peer)"
)


def call_of(j: jobs.Job, id: str) -> RemoteCall:
    return RemoteCall(id=id, keys=[engine.key(j)], limit_s=540)


def ran(wanted: list[jobs.Job], file: Path, engine: engine.Engine) -> Writer:
    """The document of these jobs, run at Modal."""
    writer = Writer(building.document(), file)
    plan = planning.Plan(wanted, [], [])
    execute.run(plan, writer, lambda *_: None, print, engine)
    return writer


def test_an_interruption_is_waited_for_and_said_once(monkeypatch):
    scripts = [*[RESET] * 400, passed(V1)], [*[RESET] * 300, None, passed(V4)]
    Cloud(*scripts).install(monkeypatch)
    work, said = rented(parallel=2), []
    work.say = said.append
    got = [(j.algo.name, o.status) for j, o in work([V1, V4])]
    assert got == [("cuda-v4", "done"), ("cuda-v1", "done")] and work.sent == []
    cut, again = [line for line in said if "connection" in line or "again" in line]
    assert "the calls go on there" in cut and "up to 24 min" in cut
    assert again == "Modal answers again"


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("script", "says"),
    [(RESET, "Connection reset by peer"), (None, "Modal does not answer")],
)
def test_without_an_answer_until_the_limit_no_id_is_dropped(
    script, says, resumed, monkeypatch
):
    """Not even one that a resumed run has: it would be sent, and paid for, once more."""
    fake = Cloud([passed(V1)], [script]).install(monkeypatch)
    fake.deaf = True  # a request to stop it is not heard either
    work = rented(minutes=10)
    if resumed:
        work.earlier = [call_of(V1, "fc-0"), call_of(V4, "fc-1")]
    got = {j.algo.name: o for j, o in work([V1, V4])}
    assert 600 <= fake.clock <= 602 and got["cuda-v1"].status == "done"
    lost = got["cuda-v4"]
    assert (lost.status, lost.code) == ("remote_failed", errors.REMOTE)
    assert says in lost.reason and "may go on there" in lost.reason
    assert [(call.id, call.keys) for call in work.sent] == [("fc-1", [engine.key(V4)])]


def test_what_cannot_be_sent_leaves_what_was(monkeypatch):
    a, b, c = (job(n, "cuda") for n in ("cuda-v1", "cuda-v4", "cuda-v5"))
    fake = Cloud([passed(a)], [None]).install(monkeypatch)
    fake.refuses = {1: RemoteError("too many inputs")}
    got = {j.algo.name: (o.status, o.reason) for j, o in rented()([a, b, c])}
    assert got["cuda-v1"][0] == "done" and got["cuda-v4"] == got["cuda-v5"]
    assert got["cuda-v4"] == ("remote_failed", "it was not sent: too many inputs")


@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_cancels_what_was_sent_and_forgets_only_what_modal_confirms(
    deaf, tmp_path, monkeypatch
):
    """Not the calls that an earlier command has left."""
    fake, work = Cloud([None], [None]).install(monkeypatch), rented()
    fake.deaf = deaf
    file, said = tmp_path / "run.json", []
    work.say = said.append
    work.earlier = [call_of(V1, "fc-a")]
    work.note(Writer(building.document(), file))

    def first(calls, seconds):
        # in the file from the start: this process may be killed
        saved = json.loads(file.read_text())["modal"]["calls"]
        assert [call["id"] for call in saved] == ["fc-a", "fc-0"]
        raise KeyboardInterrupt

    monkeypatch.setattr(modal_client, "first", first)
    with pytest.raises(KeyboardInterrupt):
        list(work([V1, V4]))
    assert [call.id for call in work.sent] == ["fc-a", "fc-0"][: 1 + deaf]
    assert fake.cancelled == [0]
    assert any("1 call could not be cancelled" in line for line in said) == deaf


def test_a_call_that_is_being_sent_at_ctrl_c_is_cancelled_too(monkeypatch):
    fake, work = Cloud([None]).install(monkeypatch), rented()

    class Sending(modal_client.futures.Future):
        def result(self, timeout=None):
            if timeout is None:
                raise KeyboardInterrupt
            return fake.call(b"")

    monkeypatch.setattr(modal_client, "spawn", lambda *_: Sending())
    with pytest.raises(KeyboardInterrupt):
        list(work([V4]))
    assert fake.cancelled == [0] and work.sent == []


def heard(*script) -> tuple[object, list[float], list[float]]:
    """What a Call gets from Modal's client: its end, the seconds of its requests, and
    of the pauses between them.
    """
    asked, pauses, left = [], [], list(script)

    def get(timeout):
        asked.append(timeout)
        got = left.pop(0)
        if isinstance(got, BaseException):
            raise got
        return got

    call = modal_client.Call(SimpleNamespace(get=get), "fc-0")
    answer = modal_client.futures.Future()
    try:
        answer.set_result(call._get(pauses.append))
    except modal_errors.CallFailedError as e:
        answer.set_exception(e)
    assert left == []
    return answer, asked, pauses


def test_a_call_is_asked_for_by_long_requests_and_with_longer_pauses_while_nothing_answers():
    import grpclib.exceptions
    import modal.exception as e

    wrong = [
        ConnectionResetError(104, "Connection reset by peer"),
        grpclib.exceptions.StreamTerminatedError("Connection lost"),
        *(kind("") for kind in (e.ServiceError, e.InternalError, e.AuthError)),
        e.ExecutionError("Get from url failed with status 503: Slow Down"),
        AttributeError("'Connection' object has no attribute '_transport'"),
    ]
    answer, asked, pauses = heard(
        TimeoutError(), *wrong, TimeoutError(), TimeoutError(), b"reply"
    )
    assert answer.result() == b"reply"
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert asked == [50, 50, *[1] * 7, 50, 50]


def test_only_the_calls_own_verdict_is_its_failure():
    import modal.exception as e

    # the function of Modal's client that raises what a container has raised
    def _process_result(of):
        raise of

    for verdict, says in [
        (e.FunctionTimeoutError("t"), "ended the container at its time limit"),
        (e.OutputExpiredError(), "no longer has its result"),
        (e.DeserializationError("see above"), "it cannot be unpacked"),
        (e.NotFoundError("no such call"), "does not know this call"),
        (e.InternalFailure("worker lost"), "the container failed: worker lost"),
        (e.RemoteError("exit code 137"), "out of memory"),
        (ZeroDivisionError("oops"), "the container failed: oops"),
        (OSError(28, "No space left on device"), "the container failed: "),
        (TimeoutError("inside"), "the container failed: inside"),
    ]:
        raised = verdict
        if "container failed" in says or "memory" in says:
            with pytest.raises(type(verdict)) as caught:
                _process_result(verdict)
            raised = caught.value
        answer, _, pauses = heard(raised)
        error = answer.exception()
        assert isinstance(error, modal_errors.CallFailedError) and says in str(error)
        assert pauses == []


def test_calls_that_are_too_slow_are_cancelled(monkeypatch):
    fake = Cloud([passed(V1)], [None]).install(monkeypatch)
    got = [(j.algo.name, o.status, o.reason) for j, o in rented(minutes=1e-6)([V1, V4])]
    assert got[0][:2] == ("cuda-v1", "done") and fake.cancelled == [1]
    assert got[1][:2] == ("cuda-v4", "remote_failed") and "--max-minutes" in got[1][2]


def test_algos_for_a_cpu_rent_no_gpu(monkeypatch):
    j = job("cpp-v1", "cpu")
    fake = Cloud([passed(j)]).install(monkeypatch)
    assert [o.status for _, o in rented()([j])] == ["done"] and fake.declared[1] is None
    assert opened(fake.parcels[0]).gpu is None


@pytest.mark.parametrize(
    ("count", "more", "says"),
    [
        (
            3,
            {},
            "B200, 1 container, 3 calls of at most 9 min: 27 min of container time",
        ),
        (3, {"parallel": 2}, "B200, 2 containers, 3 calls of at most 9 min: 27 min"),
        (3, {"minutes": 5}, "B200, 1 container, 3 calls of at most 5 min: 5 min"),
        (3, {"minutes": 5, "detach": True}, "3 calls of at most 5 min: 15 min of"),
        (3, {"together": True}, "1 container, 1 call of at most 19 min: 19 min of"),
        (99, {"parallel": 99}, "Modal: B200, 4 containers, 99 calls of"),
        (1, {}, "most, $0.98 "),
    ],
)
def test_the_bill_is_said_before_the_start(count, more, says, monkeypatch):
    said = []
    work = rented(**more)
    work.say = said.append
    lost = [modal_errors.CallFailedError("x")]
    fake = Cloud(*[lost] * count).install(monkeypatch)

    def deployed(*declared):
        assert says in said[0]

    monkeypatch.setattr(modal_client, "deployed", deployed)
    list(work([V4] * count))
    assert fake.parcels


@pytest.mark.parametrize(
    ("gpu", "rate"), [("B200", 0.001736), ("B200:2", 2 * 0.001736), (None, 0)]
)
def test_dollars_are_those_of_all_gpus_of_a_container(gpu, rate):
    # an hour: 4 cores of $0.0000131 a second, 16 GiB of $0.00000222, and the GPUs
    dollars = 3600 * (4 * 0.0000131 + 16 * 0.00000222 + rate)
    gpu = gpu and SETTINGS.parse(gpu)
    for days, old in (
        (90, ""),
        (91, ", 91 days ago (`modal billing rates` has today's)"),
    ):
        read = date.today() - timedelta(days)
        dated = structs.replace(SETTINGS.prices, date=read)
        mine = structs.replace(SETTINGS, prices=dated)
        assert mine.dollars(gpu, 3600) == f"${dollars:.2f} at the prices of {read}{old}"

    likely = f"${dollars:.2f}, likely ${dollars / 10:.2f}, at the prices of"
    assert SETTINGS.dollars(gpu, 3600, 360).startswith(likely)
    assert "has no price of B300" in SETTINGS.dollars(SETTINGS.parse("B300"), 60)
    known = {name.rstrip("!") for name in SETTINGS.gpus.known}
    assert set(SETTINGS.prices.gpus) == known


def test_the_likely_price_is_by_what_such_calls_took(tmp_path, monkeypatch):
    a, b = job("cuda-v4", "cuda", 4, "bench"), job("cuda-v1", "cuda", 2, "bench")

    def spent(gpu: str, *calls) -> None:
        document = building.document()
        document.modal = Rented(gpu=gpu, image="gdn", command="bench")
        document.modal.spent = [Spent(keys=k, due=d, seconds=s) for k, d, s in calls]
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(store.dumps(document))

    def likely(*jobs) -> float | None:
        return work.likely([work_of(j) for j in jobs], list(work.spent("B200")))

    monkeypatch.setattr(paths, "runs_dir", lambda: tmp_path)
    assert likely(a) is None
    mine = [engine.key(a)]
    spent("B200", (mine, 4, 30.0))
    others = ["bench gdn_decode other cpu"], ["bench gdn_decode other cuda"]
    spent("B200", (others[0], 2, 9.0), (others[1], 2, 5.0), (mine, 2, 12.0))
    spent("H200", (mine, 4, 3.0))
    (tmp_path / "9.json").write_text("{")
    # the newest: twice as many workloads, and at most the limit; else one of the op
    assert likely(a) == 24 and likely(a, b) == 29
    assert likely(job("cuda-v4", "cuda", 54, "bench")) == 60
    assert likely(a, job("cuda-v4", "cuda", 4)) is None
    said = []
    mine = rented()
    mine.say = said.append
    Cloud([passed(a)]).install(monkeypatch)
    list(mine([a]))
    assert "most, $0.98, likely $0.04, at the prices" in said[0]


@pytest.mark.parametrize("minutes", [None, 1441])
def test_more_than_modal_allows_is_refused_before_anything_is_rented(
    minutes, monkeypatch
):
    fake = Cloud().install(monkeypatch)
    long = job("cuda-v4", "cuda", timeout_s=86_400 - SETTINGS.limits.start + 1)
    with pytest.raises(UsageError, match="a call of 86401 s: Modal's longest is 24 h"):
        list(rented(minutes=minutes)([long]))
    assert fake.declared is None
    assert rented(minutes=1440).rent.limit_s(1e9) == 86_400


def test_the_apps_name_has_a_hash_of_gdns_files_and_of_the_image(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PACKAGE", tmp_path)
    image = SETTINGS.chosen(None)

    def name(image=image, settings=SETTINGS) -> str:
        return modal_client.app_name(settings, image)

    for part in ("run", "algos", "run/__pycache__"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.py").write_text("1")
    first = name()
    assert re.fullmatch("gdn-[0-9a-f]{12}", first)
    # what does not travel
    (tmp_path / "algos/a.py").write_text("2")
    (tmp_path / "run/__pycache__/a.py").write_text("2")
    assert name() == first
    (tmp_path / "run/a.py").write_text("2")
    others = {name(), name(structs.replace(image, then=("x",)))}
    limits = structs.replace(SETTINGS.limits, idle=3)
    others.add(name(settings=structs.replace(SETTINGS, limits=limits)))
    assert len(others) == 3 and first not in others


def test_a_rented_gpu_is_not_paid_for_work_on_a_cpu():
    gpu = job("cuda-v4", "cuda", command="bench")
    cpu = job("cpp-v1", "cpu", command="bench")
    plan = planning.Plan([cpu, gpu], [], [])
    engine.leave_out_cpu(plan)
    (missing,) = plan.missing
    assert plan.jobs == [gpu] and missing.algo == "cpp-v1"
    assert missing.hint == "--device cpu rents none"
    alone = planning.Plan([cpu], [], [])
    engine.leave_out_cpu(alone)  # no GPU is rented
    assert alone.jobs == [cpu] and alone.missing == []


def test_together_puts_the_named_algos_into_turns_and_all_into_one_parcel():
    def benched(name, command="bench", tiers=("cupti", "fib"), **more):
        return job(name, "cuda", command=command, tiers=tiers, **more)

    others = [benched("pt-reference", "floor"), benched("pt-reference", added=True)]
    a, b = benched("cuda-v4"), benched("fla-recurrent")
    *alone, pair = engine.together([*others, a, b])
    assert alone == others and pair.command == "compare"
    assert pair.names == ("cuda-v4", "fla-recurrent") and pair.due == 2
    assert pair.tiers == ("cupti",) and pair.timeout_s == 600
    assert engine.together([*others, a]) == [*others, a]
    (work,) = rented(together=True).split([*others, pair])
    assert work.earlier is None and len(work.jobs) == 3
    with pytest.raises(UsageError, match="use --tier cupti"):
        engine.together([benched(n, tiers=("fib",)) for n in ("cuda-v4", "cuda-v1")])


def test_gpus_of_a_run_are_numbered_so_that_ratios_stay_within_one(
    tmp_path, monkeypatch
):
    replies = [passed(V1, gpu_uuid="GPU-1")], [passed(V4, gpu_uuid="GPU-2")]
    Cloud(*replies).install(monkeypatch)
    document = ran([V1, V4], tmp_path / "run.json", rented(parallel=2)).document
    assert [record.place for record in document.records] == ["cuda:0", "cuda:1"]
    del document.records[0]
    # a run that goes on knows GPU-2 by its number, and gives no other the same one
    Cloud([passed(V1, gpu_uuid="GPU-3")]).install(monkeypatch)
    writer = Writer(document, tmp_path / "run.json")
    execute.run(planning.Plan([V1], [], []), writer, lambda *_: None, print, rented())
    gpus = {record.gpu.uuid: record.gpu.index for record in document.records}
    assert gpus == {"GPU-2": 1, "GPU-3": 2}


# --- records of calls that did not reply


def test_each_record_is_kept_as_it_is_made_with_where_it_was_made(monkeypatch):
    gpu = inventory.Gpu("NVIDIA B200", "10.0", "580", "GPU-1")
    machine = inventory.Machine(gpus=lambda: (gpu,))
    record = building.record("cuda-v4", 2.0)
    kept = []

    def serve(request, env, timeout_s, on_record):
        on_record(record, Environment(gpu=gpu.name))
        assert len(kept) == 1  # before the worker's end
        raise MemoryError("and then the container is gone")

    monkeypatch.setattr(worker_process, "serve", serve)
    data = rented().parcel(work_of(V4), B200)
    reply = answered(container.serve(data, machine=machine, keep=kept.append))
    assert "MemoryError" in reply.lost
    label = {"where": "modal", "image": "gdn", "asked": "B200", "gpus": [gpu.name]}
    made = wire.decode(kept[0], wire.Made)
    assert made == wire.Made(0, record, Environment(gpu=gpu.name, **label))


def made_of(record, gpu: str = "NVIDIA B200", piece: int = 0, **more) -> bytes:
    """A record as a container keeps it."""
    return wire.encode(wire.Made(piece, record, Environment(gpu=gpu, **more)))


def test_what_a_lost_call_had_measured_is_kept_once_and_only_of_the_gpu_asked_for():
    mine = job("cuda-v4", "cuda", 3)
    a, b, c = (building.record("cuda-v4", 2.0, w.uuid) for w in mine.workloads)
    kept = [made_of(a), b"damaged", made_of(b), made_of(a), made_of(c, "NVIDIA H200")]
    kept += [made_of(c, piece=1), made_of(building.record("cuda-v1", 2.0, c.uuid))]
    said = []
    lost = Reply(lost="preempted")
    ((_, outcome),) = replies.outcomes(kept_by([mine], kept), lost, B200, said.append)
    assert (outcome.status, outcome.reason) == ("remote_failed", "preempted")
    assert outcome.code == errors.REMOTE and outcome.records == [a, b]
    assert outcome.environment.gpu == "NVIDIA B200"
    assert said == ["gdn_decode/cuda-v4: 2 of 3 came before that"]


def test_a_call_without_a_reply_is_complete_if_all_its_records_had_come():
    mine, late = job("cuda-v4", "cuda", 2), job("cuda-v1", "cuda", 1)
    kept = [made_of(building.record("cuda-v4", 2.0, w.uuid)) for w in mine.workloads]
    lost = Reply(lost="preempted")
    whole, none = replies.outcomes(kept_by([mine, late], kept), lost, B200, print)
    assert (whole[1].status, whole[1].reason, whole[1].code) == ("done", None, None)
    assert (none[1].status, none[1].reason) == ("remote_failed", "preempted")


def test_a_call_that_is_started_again_does_what_is_left(monkeypatch):
    """What a preempted container has kept, with its own GPU, and the workloads that it
    had not finished.
    """
    gpu = inventory.Gpu("NVIDIA B200", "10.0", "580", "GPU-2")
    machine = inventory.Machine(gpus=lambda: (gpu,))
    whole = job("cuda-v4", "cuda", 2, "bench", tiers=("cupti", "graph"))
    first, half = (w.uuid for w in whole.workloads)
    asked = []

    def made(uuid, us) -> list:
        return [
            building.record("cuda-v4", us, uuid, tier=t) for t in ("cupti", "graph")
        ]

    def serve(request, env, timeout_s, on_record):
        asked.append([w.uuid for w in request.workloads])
        return jobs.Outcome(Status.DONE, records=made(half, 9.0))

    def served(before):
        reply = container.serve(data, machine=machine, before=[b"damaged", *before])
        return answered(reply).outcomes[0]

    monkeypatch.setattr(worker_process, "serve", serve)
    data = rented().parcel(work_of(whole), B200)
    every = [made_of(r, gpu_uuid="GPU-1") for r in made(first, 1.0) + made(half, 1.0)]
    got = served(every[:3])
    assert asked == [[half]]
    assert [
        (r.uuid, r.timing.median_us, r.gpu and r.gpu.uuid) for r in got.records
    ] == [
        *[(first, 1.0, "GPU-1")] * 2,
        *[(half, 9.0, None)] * 2,
    ]
    got = served(every)
    assert len(asked) == 1 and len(got.records) == 4
    assert got.environment.gpu_uuid == "GPU-1"


def test_records_are_in_the_document_before_their_call_has_ended(tmp_path, monkeypatch):
    mine = job("cuda-v4", "cuda", 3)
    records = [building.record("cuda-v4", 2.0, w.uuid) for w in mine.workloads]
    outcome = jobs.Outcome(Status.DONE, None, records, Environment(gpu="NVIDIA B200"))
    reply = wire.encode(Reply(outcomes=[outcome]))
    fake = Cloud([None, None, reply]).install(monkeypatch)
    live = fake.live["fc-0"] = []
    saved = []

    def say(line):
        if line == "gdn_decode/cuda-v4: 1 of 3 so far":
            saved.append(len(json.loads(file.read_text())["records"]))

    def first(calls, seconds):
        got = Cloud.first(fake, calls, seconds)
        live.append(made_of(records[0], gpu_uuid="GPU-1"))
        return got

    monkeypatch.setattr(modal_client, "first", first)
    file, work = tmp_path / "run.json", rented()
    work.say = say
    document = ran([mine], file, work).document
    assert saved == [1] and len(document.records) == 3  # each once
    assert document.records[0].gpu.uuid == "GPU-1"


# --- replies that are not what was asked for


def outcome(
    gpu: str | None = "NVIDIA B200",
    algo: str = "cuda-v4",
    count: int = 1,
    of: int = 1,
    **more,
) -> jobs.Outcome:
    """A worker that has passed the last of `of` workloads."""
    workload = job(algo, "cuda", of).workloads[-1]
    records = [building.record(algo, None, workload.uuid, tier=None)] * count
    env = gpu and Environment(gpu=gpu, **more)
    return jobs.Outcome(Status.DONE, records=records, environment=env)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wire.zlib.compress(b"{}"), "is not a reply of gdn"),
        (
            wire.zlib.compress(
                b'{"schema": 4, "outcomes": [{"status": "done", "records": 7}]}'
            ),
            "not a reply of gdn: ",
        ),
        ([], "it has 0 outcomes for 1"),
        ([outcome(), outcome()], "it has 2 outcomes for 1"),
        ([outcome(count=0)], "it has 0 records for 1"),
        ([outcome(of=2)], "it has 0 records for 1"),
        ([outcome("NVIDIA H200")], "the container has NVIDIA H200"),
        ([outcome(None)], "the reply does not name its GPU"),
        ([outcome(gpus=["NVIDIA B200"] * 2)], "has NVIDIA B200, NVIDIA B200"),
        ([outcome("NVIDIA H200", gpus=["NVIDIA B200"])], "has NVIDIA H200"),
    ],
)
def test_a_wrong_reply_is_the_failure_of_its_own_call(data, says, monkeypatch):
    if isinstance(data, list):
        data = wire.encode(Reply(outcomes=data))
    wrong, right = V4, V1
    Cloud([data], [None, passed(right)]).install(monkeypatch)
    work = rented(parallel=2)
    got = {j.algo.name: o for j, o in work([wrong, right])}
    assert got["cuda-v1"].status == "done"
    assert got["cuda-v1"].environment.where == "modal"
    lost = got["cuda-v4"]
    assert (lost.status, lost.code) == ("remote_failed", errors.REMOTE)
    assert says in lost.reason and lost.records == [] == work.sent


def test_a_reply_for_another_gdn_can_still_be_fetched_by_that_one(monkeypatch):
    other = wire.zlib.compress(b'{"schema": 2}')
    fake = Cloud([other], [other]).install(monkeypatch)
    work = rented()
    ((_, lost),) = work([V4])
    assert "speaks schema 2" in lost.reason
    assert "speaks schema 2" in work.carry_one(work_of(V1)).lost
    assert [call.id for call in work.sent] == ["fc-0", "fc-1"]
    assert not fake.cancelled


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([], "it has 0 profiles for 1"),
        ([Profile()], "a profile is empty"),
        ([profile_of("NVIDIA H200")], "asked for B200"),
    ],
)
def test_a_wrong_profile_is_refused_in_one_line(made, says, tmp_path, monkeypatch):
    with pytest.raises(RemoteError, match=says):
        profiled(monkeypatch, tmp_path, wire.encode(Reply(profiles=made)), "cuda-v4")
    assert list(tmp_path.iterdir()) == []


def test_a_message_has_a_limit_and_so_has_each_text_in_it(monkeypatch):
    """Of one that comes back: a parcel has the sources, and a profile its files, which
    are texts in JSON as well.
    """
    long = "<" + "x" * 1_000_000 + ">"
    files = {"big": b"x" * 1_000_000}
    profile = Profile(refused=wire.Refusal(long, None, 1), files=files)
    got = answered(wire.encode(Reply(lost=long, profiles=[profile])))
    for text in (got.lost, got.profiles[0].refused.message):
        assert len(text) < 140_000 and text[0] + text[-1] == "<>"
    assert got.profiles[0].files == files
    parcel = Parcel(gpu=None, cache=None, env={"long": long})
    assert opened(wire.encode(parcel)).env["long"] == long
    monkeypatch.setattr(wire, "MOST", 1 << 20)
    too_long = wire.encode(Reply(lost="x" * 1_100_000))
    for data in (too_long, wire.encode(Reply(lost="x"))[:-4], "text", None):
        with pytest.raises(RemoteError, match="is not a reply of gdn"):
            answered(data)


def test_what_modal_says_has_a_limit():
    assert len(modal_errors.scrub("<" + "x" * 20_000_000 + ">")) < 140_000
    shown = io.StringIO()
    modal_client._Scrubbed(shown).write("a\x1b[2Jb")
    assert shown.getvalue() == "a\\x1b[2Jb"


def test_a_file_of_a_profile_stays_in_its_folder(tmp_path, monkeypatch):
    files = {"../b.txt": b"B", "d\0.txt": b"", "..": b""}
    answer = wire.encode(Reply(profiles=[profile_of(files=files)]))
    ((made,), _) = profiled(monkeypatch, tmp_path / "p", answer, "cuda-v4")
    assert "not all of the profile could be kept" in made.unkept
    assert (Path(made.folder) / "b.txt").read_text() == "B"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


# --- going on with a run


def test_only_failed_calls_are_repeated(tmp_path, monkeypatch):
    a, b = job("cuda-v1", "cuda", 2, "bench"), job("cuda-v4", "cuda", 2, "bench")
    Cloud([passed(a)], [modal_errors.CallFailedError("lost")]).install(monkeypatch)
    file = tmp_path / "run.json"
    first = ran([a, b], file, rented()).document
    statuses = [(r.algo, r.status, r.unfinished) for r in first.records]
    ok, lost = ("cuda-v1", "passed", None), ("cuda-v4", "remote_failed", 2)
    assert statuses == [ok, ok, lost]
    assert execute.exit_code(first, True) == errors.REMOTE
    old, again = store.load(file), Writer(building.document(), file)
    assert resume.resume([a, b], old, again) == [b]
    assert again.document.environments["cuda"].gpu == "NVIDIA B200"
    assert again.document.earlier == 2
    for record in old.records:
        record.source_hash = "another"
    fresh = Writer(building.document(), tmp_path / "x.json")
    assert resume.resume([a, b], old, fresh) == [a, b]


def test_detached_calls_are_not_forgotten_without_a_connection(monkeypatch):

    def connect(seconds):
        raise modal_errors.UnreachableError("no network")

    monkeypatch.setattr(modal_client, "connect", connect)
    work = rented()
    work.earlier = [call_of(V1, "fc-a"), call_of(V4, "fc-b")]
    with pytest.raises(RemoteError, match="no network"):
        list(work([V1, V4]))
    assert work.sent == work.earlier
