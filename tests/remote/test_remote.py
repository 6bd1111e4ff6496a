"""What travels to Modal and what runs there, without Modal: settings, parcels, the
container's function, its caches, resuming; and every algo's request by a worker that
has the carried files and nothing else.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import building
import helpers
import profiles as documents
import pytest
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
    build_cache,
    container,
    costs,
    engine,
    modal_client,
    modal_errors,
    profiles,
    resume,
    settings,
    wire,
)
from gdn_cli.remote.wire import Cache, Parcel, Profile, Refusal, Reply
from gdn_cli.run import execute, jobs, planning, worker_process
from gdn_cli.schema.record_types import Environment, RemoteCall, Status
from gdn_cli.worker.request import Options, Timing

REGISTRY = helpers.REGISTRY
SETTINGS = settings.load()
B200 = SETTINGS.parse("B200")
PACKAGE = Path(gdn_cli.__file__).parent


def job(
    name: str, mode: str, workloads: int = 1, command: str = "check", **more
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
        **more,
    )


def work_of(*wanted: jobs.Job) -> engine.Work:
    return engine.Work(list(wanted), 60)


def opened(data: bytes) -> Parcel:
    return wire.decode(data, Parcel)


def answered(data: bytes) -> Reply:
    return wire.decode(data, Reply)


def rented(**more) -> engine.Engine:
    return engine.Engine(
        SETTINGS, engine.Rent(B200, SETTINGS.chosen(None), **more), lambda line: None
    )


# --- what a GPU's name means


@pytest.mark.parametrize(
    ("asked", "sent_as", "devices", "fits"),
    [
        (None, "B200", ["NVIDIA B200"], True),
        ("b200", "B200", ["NVIDIA B200"], True),
        ("B200:2", "B200:2", ["NVIDIA B200", "NVIDIA B200"], True),
        ("B200:2", "B200:2", ["NVIDIA B200"], False),
        ("B200", "B200", ["NVIDIA B200", "NVIDIA B200"], False),
        ("B200", "B200", ["NVIDIA B300 SXM6 AC"], False),
        ("B200", "B200", ["NVIDIA GB200"], False),
        ("B200", "B200", [], False),
        ("H100!", "H100!", ["NVIDIA H100 80GB HBM3"], True),
        ("H100!", "H100!", ["NVIDIA H200"], False),
        # without its `!` Modal may give an H200
        ("H100", "H100!", ["NVIDIA H100 80GB HBM3"], True),
        ("H100", "H100!", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"], False),
        ("H200", "H200", ["NVIDIA H200"], True),
        ("A100-80GB", "A100-80GB", ["NVIDIA A100-SXM4-80GB"], True),
        ("A100-80GB", "A100-80GB", ["NVIDIA A100 80GB PCIe"], True),
        ("A100-80GB", "A100-80GB", ["NVIDIA A100-SXM4-40GB"], False),
        ("A100", "A100", ["NVIDIA A100-SXM4-40GB"], True),
        ("L4", "L4", ["NVIDIA L40S"], False),
        ("L40S", "L40S", ["NVIDIA L40S"], True),
        ("A10", "A10", ["NVIDIA A10G"], True),
        ("T4", "T4", ["Tesla T4"], True),
        (
            "RTX-PRO-6000",
            "RTX-PRO-6000",
            ["NVIDIA RTX PRO 6000 Blackwell Server Edition"],
            True,
        ),
    ],
)
def test_only_the_gpu_that_was_asked_for_will_do(asked, sent_as, devices, fits):
    gpu = SETTINGS.parse(asked)
    assert str(gpu) == sent_as
    why = gpu.mismatch(devices)
    assert (why is None) == fits
    if why:
        assert (
            why
            == f"asked for {sent_as}, and the container has {', '.join(devices) or 'no GPU'}"
        )


@pytest.mark.parametrize(
    "asked",
    ["B200,H100", "B200+", "B200:0", "B200:16", "", " ", "B200:", "a b", "B200!!"],
)
def test_anything_but_one_gpu_by_name_is_refused(asked):
    if not asked.strip():
        assert asked != "" or SETTINGS.parse(asked) == B200  # an empty option is none
        return
    with pytest.raises(UsageError, match="expected a GPU"):
        SETTINGS.parse(asked)


# --- configs/modal.toml and the pins


# their wheels choose torch's version: not for an image with another one
ENGINES = {"vllm", "sglang"}


def test_the_image_has_what_pyproject_pins_and_nothing_is_named_twice(monkeypatch):
    project = registry.read_toml(paths.PYPROJECT)["project"]
    pins = {r.name: r for r in map(Requirement, settings.pins())}
    assert len(pins) == len(settings.pins())
    assert all([s.operator for s in r.specifier] == ["=="] for r in pins.values())
    wanted = [
        Requirement(r)
        for r in project["dependencies"] + project["optional-dependencies"]["peers"]
    ]
    # what no worker imports
    only_here = {"typer", "rich", "modal", "tomli", "matplotlib", "jinja2"}
    for requirement in wanted:
        if requirement.name not in only_here:
            pinned = next(iter(pins[requirement.name].specifier)).version
            assert requirement.specifier.contains(pinned), (
                f"{requirement} and the image's {pinned}"
            )
    for algo in REGISTRY.algos:
        if whole := ENGINES & set(algo.packages.values()):
            assert (
                engine.place(algo).reason == f"package {min(whole)} is not in the image"
            )
            continue
        assert set(algo.packages.values()) <= set(pins), algo.full_name
        assert engine.place(algo).mode == (
            algo.modes[0] if "cuda" not in algo.modes else "cuda"
        )
    # the same list of an installed wheel, as its metadata has it
    lines = [f"{pin} ; extra == 'image'" for pin in settings.pins()] + [
        "pytest>=8; extra == 'dev'",
        "numpy>=1.26",
    ]
    monkeypatch.setattr(paths, "IN_CHECKOUT", False)
    monkeypatch.setattr(settings.metadata, "requires", lambda name: lines)
    assert [line.split(" ;")[0] for line in lines[:-2]] == settings.pins()


def test_images_are_dated_and_proved_without_a_gpu():
    assert set(SETTINGS.images) == {"gdn", "flashinfer"}
    for image in SETTINGS.images.values():
        tag = image.base.split(":")[1]
        assert re.search(r"\d", tag) and "latest" not in tag
        assert all(
            word in image.smoke
            for word in ("nvcc", "c++", "ninja", "torch", "flashinfer_bench")
        )
        assert "cuda.init" not in image.smoke and "is_available" not in image.smoke
    assert (
        SETTINGS.chosen(None).python == "3.12" and "devel" in SETTINGS.chosen(None).base
    )
    kept = settings.packages(SETTINGS.chosen("flashinfer"))
    assert (
        not any(pin.startswith(("torch==", "triton==")) for pin in kept)
        and "ninja==1.13.2" in kept
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('gpu = "B200"', "gpu = 1", "$.gpu: expected text, got 1"),
        (
            "idle = 2",
            "idle = 0",
            "$.limits.idle: expected a positive whole number, got 0",
        ),
        (
            "queue = 900",
            "queu = 900",
            "$.limits.queu: unknown key; did you mean queue?",
        ),
        (
            'python = ""',
            "python = 3",
            "$.images.flashinfer.python: expected a version such as '3.12', or '', got 3",
        ),
        (
            'image = "gdn"',
            'image = "other"',
            "$.image: expected one of gdn, flashinfer, got 'other'",
        ),
        ("[environment]", "[enviroment]", "$.enviroment: unknown key"),
    ],
)
def test_a_wrong_key_in_modal_toml_is_named(old, new, says, tmp_path, monkeypatch):
    text = (paths.CONFIGS_DIR / "modal.toml").read_text()
    assert old in text
    (tmp_path / "modal.toml").write_text(text.replace(old, new))
    monkeypatch.setattr(paths, "CONFIGS_DIR", tmp_path)
    with pytest.raises(UsageError, match=re.escape(says)):
        settings.load()


# --- parcels


def test_all_54_workloads_travel_as_one_request_and_come_back_as_they_were():
    op = REGISTRY.ops["gdn_decode"]
    whole = job("cuda-v4", "cuda", 54, "bench", timing=Timing(("cupti",)))
    data = rented().parcel(work_of(whole), B200)
    content = opened(data)
    (only,) = content.jobs
    assert len(only.request.workloads) == 54 == len(embedded(op))
    assert (to_json(only.request), only.timeout_s) == (to_json(whole.request), 300.0)
    assert content.gpu == B200 and len(data) < 100_000
    outcome = jobs.Outcome(
        Status.TIMED_OUT,
        "r",
        [building.record("a", 2.0)],
        Environment(gpu="x"),
        ["last"],
        3,
    )
    reply = Reply(
        outcomes=[outcome],
        profiles=[
            Profile(
                documents.typed(documents.v4(label="\ud800")),
                {"a": bytes(range(256)) * 9},
            )
        ],
    )
    assert answered(wire.encode(reply)) == reply
    with pytest.raises(RemoteError, match="not a reply of gdn: .*status"):
        answered(wire.encode(Reply(outcomes=[{"records": []}])))


@pytest.mark.parametrize(
    "data",
    [b"", b"no zlib", wire.zlib.compress(b"[]"), wire.zlib.compress(b'{"schema": 99}')],
)
def test_an_invalid_parcel_is_refused_in_one_line(data):
    with pytest.raises(
        RemoteError, match="not a reply of gdn|speaks schema 99, this gdn 3"
    ):
        answered(data)
    # the other side says so as well, and does not raise
    reply = answered(container.serve(data))
    assert (
        reply.lost.startswith("the container failed: RemoteError: ")
        and reply.outcomes == []
    )


def test_a_dataset_is_read_where_it_is_mounted():
    here = job("pt-reference", "cpu", options=Options(dataset="/somewhere/here"))
    assert engine.piece(here).request.dataset == "/data"
    assert engine.piece(here, Path("/data/contest")).request.dataset == "/data/contest"
    assert here.request.dataset == "/somewhere/here"


def test_a_secret_of_this_machine_does_not_travel(monkeypatch):
    for name in ("MODAL_TOKEN_SECRET", "HF_TOKEN", "SOME_PASSWORD"):
        monkeypatch.setenv(name, "s3cr3t-value")
    data = rented().parcel(work_of(job("pt-reference", "cpu")), None)
    assert b"s3cr3t-value" not in wire.zlib.decompress(data) and set(
        opened(data).env
    ) <= {"GDN_COMMIT"}


@pytest.mark.parametrize("algo", REGISTRY.algos, ids=lambda a: a.full_name)
def test_every_request_arrives_as_it_is_with_every_file_that_a_source_names(algo):
    mine = job(algo.full_name, algo.modes[0])
    (there,) = opened(rented().parcel(work_of(mine), B200)).jobs
    assert to_json(there.request) == to_json(mine.request)
    sources = {s["path"]: s["content"] for s in there.request.solution["sources"]}
    named = set()
    for name, text in sources.items():
        if name.endswith(".py"):
            tree = ast.parse(text)
            named |= {
                f"{n.module.split('.')[0]}.py"
                for n in ast.walk(tree)
                if isinstance(n, ast.ImportFrom) and n.level
            }
        else:
            named |= set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M))
    assert named <= set(sources), f"left behind: {named - set(sources)}"
    assert algo.entry_point.split("::")[0] in sources


# --- the container


def carried(folder: Path) -> Path:
    """gdn's own files as they are mounted (cloud._IGNORED stays here);
    cli/test_modal.py has the mount agree.
    """

    def ignored(where: str, names: list[str]) -> set[str]:
        inside = Path(where).relative_to(PACKAGE)
        return {
            n
            for n in names
            if any(
                fnmatch.fnmatch(f"x/{inside / n}", f"*{p.removeprefix('**')}")
                for p in modal_client._IGNORED
            )
        }

    shutil.copytree(PACKAGE, folder / "gdn_cli", ignore=ignored)
    return folder


_SERVE = """
import sys
from gdn_cli.remote import container
assert container.__file__.startswith(sys.argv[1]), container.__file__
sys.stdout.buffer.write(container.serve(sys.stdin.buffer.read()))
assert not {"modal", "typer", "rich"} & set(sys.modules)
"""


def serve_alone(root: Path, data: bytes, gpu: bool = False) -> Reply:
    """container.serve in a new process, in an empty folder, with only the carried files."""
    empty = root.parent / f"empty-{os.urandom(4).hex()}"
    empty.mkdir()
    hidden = {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") if gpu else ""
    }
    packages = [
        p
        for p in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if p and not Path(p, "gdn_cli").exists()
    ]
    path = os.pathsep.join([str(root), *packages])
    env = {"PATH": os.environ["PATH"], "HOME": str(empty), "PYTHONPATH": path}
    env |= {name: value for name, value in hidden.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, str(root)],
        input=data,
        capture_output=True,
        cwd=empty,
        env=env,
    )
    assert done.returncode == 0, done.stderr.decode()
    return answered(done.stdout)


# One algo per language: a file that a builder needs could be missing. That every algo's
# request arrives as a worker here would get it, with all of its files, is tested above;
# on a GPU the next test has every algo.
HERE = [
    ("gdn_decode/cpp-v1", "cpu"),
    ("gdn_decode/triton-v2", "interpreter"),
    ("gdn_decode/pt-reference", "cpu"),
]


@pytest.mark.slow
def test_algos_get_their_verdicts_with_only_the_carried_files(tmp_path):
    languages = {REGISTRY.find(name).language for name, _ in HERE}
    assert languages == {a.language for a in REGISTRY.algos if set(a.modes) != {"cuda"}}
    root = carried(tmp_path / "root")
    assert (root / "gdn_cli" / "profilers" / "stalls.toml").is_file() and not (
        root / "gdn_cli" / "algos"
    ).exists()
    assert (
        not list(root.rglob("__pycache__"))
        and not (root / "gdn_cli" / "configs").exists()
    )
    parts = [HERE[:1], HERE[1:]]  # at about the same time to their end
    data = [
        rented().parcel(work_of(*(job(name, mode) for name, mode in part)), None)
        for part in parts
    ]
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda d: serve_alone(root, d), data))
    for part, reply in zip(parts, replies, strict=True):
        assert reply.lost is None
        for (name, mode), outcome in zip(part, reply.outcomes, strict=True):
            assert (outcome.status, [r.status for r in outcome.records]) == (
                "done",
                ["passed"],
            ), (name, outcome)
            assert (
                outcome.environment.where == "modal"
                and outcome.environment.image == "gdn"
            )
            # to the last bit what this machine's command says
            if name == "gdn_decode/pt-reference":
                here = jobs.execute(job(name, mode))
                assert here.records[0].check == outcome.records[0].check


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [a.full_name for a in REGISTRY.algos if "cuda" in a.modes]
)
def test_a_gpu_algo_gets_its_verdict_with_only_the_carried_files(tmp_path, name):
    if (place := inventory.HERE.place(REGISTRY.find(name), "cuda")).mode is None:
        pytest.skip(f"{name}: {place.reason}")
    device = inventory.gpus()[0].name
    gpu = settings.Gpu(
        device, len(inventory.gpus()), (tuple(re.split(r"[\s\-_]+", device.upper())),)
    )
    wanted = job(name, "cuda")
    reply = serve_alone(
        carried(tmp_path / "root"), rented().parcel(work_of(wanted), gpu), gpu=True
    )
    assert (reply.lost, reply.wrong_gpu) == (None, None)
    there, here = reply.outcomes[0], jobs.execute(wanted)
    verdicts = [
        [(r.status, r.reason) for r in outcome.records] for outcome in (there, here)
    ]
    assert verdicts[0] == verdicts[1] and there.status == here.status
    assert there.environment.gpu == device and there.environment.asked == str(gpu)


@pytest.mark.slow
def test_a_crash_and_a_hang_cost_their_own_algo_only(tmp_path, write_algo):
    head = "from .right import run as right\nimport os, signal\n\n"
    run = f"def run({helpers.DECODE_ARGS}):\n    {{}}\n    return right({helpers.DECODE_ARGS})\n"
    # pt-reference's workloads in the order of their size: B = 1, then 4
    write_algo(
        tmp_path,
        "aborts",
        head
        + run.format("if q.shape[0] > 1: os.write(2, b'LAST-WORDS\\n'); os.abort()"),
    )
    write_algo(
        tmp_path, "hangs", head + "while True: signal.pause()\n" + run.format("pass")
    )
    known, op = registry.load(str(tmp_path)), REGISTRY.ops["gdn_decode"]
    few = (embedded(op)[0], next(w for w in embedded(op) if w.axes["batch_size"] > 1))
    described = pack.definition(op, known)
    wanted = [
        jobs.Job.of(
            "check",
            op,
            described,
            "cpu",
            few,
            [(known.find(n), pack.pack(known.find(n), op))],
            timeout_s=s,
        )
        for n, s in (("aborts", 300.0), ("hangs", 4.0))
    ]
    content = rented().parcel(work_of(*wanted), None)
    before = dict(os.environ)
    reply = answered(container.serve(content))
    assert dict(os.environ) == before
    crashed, hung = reply.outcomes
    assert (crashed.status, [r.status for r in crashed.records]) == (
        "crashed",
        ["passed"],
    )
    assert "LAST-WORDS" in crashed.tail and crashed.environment.where == "modal"
    assert (hung.status, hung.records, hung.reason) == (
        "timed_out",
        [],
        "no end after 4 s; --timeout gives more",
    )


def test_another_gpu_than_was_asked_for_is_said_before_anything_runs(monkeypatch):
    machine = inventory.Machine(
        gpus=lambda: (inventory.Gpu("NVIDIA H200", "9.0", "1"),)
    )
    monkeypatch.setattr(
        worker_process, "serve", lambda *_: pytest.fail("it ran all the same")
    )
    wanted = job("cuda-v4", "cuda")
    data = container.serve(rented().parcel(work_of(wanted), B200), machine=machine)
    assert answered(data) == Reply(
        wrong_gpu="asked for B200, and the container has NVIDIA H200"
    )
    Cloud([data]).install(monkeypatch)
    with pytest.raises(
        RemoteError, match="asked for B200, and the container has NVIDIA H200"
    ) as caught:
        list(rented()([wanted]))
    assert caught.value.code == errors.REMOTE


def test_what_was_measured_before_the_containers_time_is_up_is_sent_back(monkeypatch):
    """A worker is ended before its container, and by what option is said; not for
    --timeout, which is the algo's.
    """
    clock, asked = [1000.0], []
    monkeypatch.setattr(container, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def serve(request, env, timeout_s, on_record):
        asked.append(timeout_s)
        clock[0] += timeout_s
        return jobs.Outcome(
            Status.TIMED_OUT,
            f"no end after {timeout_s:g} s",
            [building.record("a", 2.0)],
        )

    monkeypatch.setattr(worker_process, "serve", serve)
    slow = [job("pt-reference", "cpu", timeout_s=s) for s in (20.0, 300.0, 300.0)]
    work = engine.Work(slow, 60)
    by_algo, by_limit, unstarted = answered(
        container.serve(rented(minutes=1).parcel(work, None))
    ).outcomes
    assert asked == [20, 60 - 15 - 20]  # 15 s to send it
    assert (by_algo.status, by_algo.reason) == ("timed_out", "no end after 20 s")
    for outcome, records in ((by_limit, 1), (unstarted, 0)):
        assert (outcome.status, outcome.code, len(outcome.records)) == (
            "remote_failed",
            errors.REMOTE,
            records,
        )
        assert (
            outcome.reason
            == "the container's time of 60 s was up; --max-minutes gives more"
        )


@pytest.mark.parametrize(
    ("minutes", "option"), [(None, "--timeout"), (9, "--max-minutes")]
)
def test_a_call_that_modal_ended_names_the_option_that_ended_it(
    minutes, option, monkeypatch
):
    Cloud(
        [modal_errors.TimedOut("Modal ended the container at its time limit")]
    ).install(monkeypatch)
    ((_, lost),) = rented(minutes=minutes)([job("cuda-v4", "cuda")])
    assert (
        lost.reason
        == f"Modal ended the container at its time limit; {option} gives more"
    )


def test_each_environment_says_where_it_is_and_what_was_asked_for(monkeypatch):
    gpu = inventory.Gpu("NVIDIA B200", "10.0", "580", "GPU-1")
    machine = inventory.Machine(gpus=lambda: (gpu,))
    described = {"gpu": gpu.name, "gpu_index": 0, "gpu_uuid": gpu.uuid}
    monkeypatch.setattr(
        worker_process,
        "serve",
        lambda *_, **__: jobs.Outcome(
            Status.DONE, environment=Environment(**described)
        ),
    )
    reply = answered(
        container.serve(
            rented().parcel(work_of(job("cuda-v4", "cuda")), B200), machine=machine
        )
    )
    label = {"where": "modal", "image": "gdn", "asked": "B200", "gpus": ["NVIDIA B200"]}
    assert reply.outcomes[0].environment == Environment(**described | label)


@pytest.mark.slow
def test_a_profile_is_made_there_and_its_folder_unpacked_here(tmp_path):
    tool, (subject,) = session.subjects(
        REGISTRY, ["pt-reference"], None, "torch", "0", None, "cpu"
    )
    asked = session.Settings(tool, tmp_path / "here", seconds=0.05)
    again, theirs = session.received(
        json.loads(json.dumps(session.sent(subject, asked))), tmp_path / "x"
    )
    assert (again.op, again.workload, again.solution) == (
        subject.op,
        subject.workload,
        subject.solution,
    )
    assert theirs == session.Settings(tool, tmp_path / "x", seconds=0.05)
    wanted, work = engine.Work([], 60, [session.sent(subject, asked)]), rented()
    assert not wanted.cuda
    (made,) = answered(container.serve(work.parcel(wanted, None))).profiles
    profile = profiles._unpacked(made, asked.folder, work.say)
    folder = Path(profile.folder)
    assert (
        folder.parent == tmp_path / "here"
        and (folder / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    )
    kept = session.load(folder)
    assert (
        kept.environment.where == "modal"
        and kept.passed
        and kept.algo == "pt-reference"
    )
    assert kept == profile and kept.survey.time_us > 0


def test_profiles_are_of_one_container_and_a_refusal_is_passed_on(
    tmp_path, monkeypatch
):
    tool, subjects = session.subjects(
        REGISTRY,
        ["cuda-v4", "cuda-v1"],
        None,
        "torch",
        "0",
        None,
        "cuda",
        place=engine.place,
    )
    asked = session.Settings(tool, tmp_path)
    there = [
        Profile(
            documents.typed(
                documents.v4(
                    name=f"of-{i}", environment=documents.GPU | {"gpu": "NVIDIA B200"}
                )
            ),
            {"a.txt": wire.zlib.compress(b"A")},
        )
        for i in range(2)
    ]
    fake = Cloud([wire.encode(Reply(profiles=there))]).install(monkeypatch)
    made = list(profiles.made(rented(), subjects, asked))
    assert [Path(p.folder).name for p in made] == ["of-0", "of-1"] and len(
        fake.parcels
    ) == 1
    assert [(Path(p.folder) / "a.txt").read_text() for p in made] == ["A", "A"]
    refused = Profile(refused=Refusal("no ncu here", "take torch", errors.MISSING))
    Cloud([wire.encode(Reply(profiles=[refused]))]).install(monkeypatch)
    with pytest.raises(
        errors.GdnError, match="at Modal: no ncu here; take torch"
    ) as caught:
        list(profiles.made(rented(), subjects[:1], asked))
    assert caught.value.code == errors.MISSING
    Cloud([modal_errors.CallFailed("lost")]).install(monkeypatch)
    with pytest.raises(RemoteError, match="lost"):
        list(profiles.made(rented(), subjects[:1], asked))


def test_builds_are_kept_for_the_next_container(tmp_path, monkeypatch):
    volume, first, second = tmp_path / "volume", tmp_path / "first", tmp_path / "second"
    volume.mkdir()
    monkeypatch.setattr(container, "CACHE", str(volume))
    seen, committed = [], []
    for _ in range(2):
        with container._built(Cache("key/1", "gdn-cache"), committed.append) as env:
            file = Path(env["TRITON_CACHE_DIR"]) / "deep" / "kernel.cubin"
            seen.append(file.exists())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"cubin")
        written = (volume / "key_1.tar.gz").stat().st_mtime_ns
        seen.append(written)
    # nothing new, nothing written
    assert seen[0] is False and seen[2] is True and seen[1] == seen[3]
    assert committed == ["gdn-cache"]
    assert not build_cache.restore(volume, "another", first)
    (volume / "broken.tar.gz").write_bytes(b"not an archive")
    assert not build_cache.restore(volume, "broken", second)


# --- calls, limits, and results


class Cloud:
    """modal_client's calls: each has a list of what a look at it gives (bytes, None, an
    exception). `clock` is the time, which passes only while somebody waits.
    """

    def __init__(self, *scripts):
        self.scripts, self.parcels, self.cancelled, self.declared = (
            list(scripts),
            [],
            [],
            None,
        )
        self.clock, self.deaf, self.refuses, self.made, self.live = (
            0.0,
            False,
            {},
            {},
            {},
        )

    def install(self, monkeypatch):
        for name in ("connect", "declare", "session", "recall", "first", "kept"):
            monkeypatch.setattr(modal_client, name, getattr(self, name))
        monkeypatch.setattr(
            engine, "time", SimpleNamespace(monotonic=lambda: self.clock)
        )
        return self

    def connect(self, seconds):
        pass

    def kept(self, id):
        return self.made.get(id, [])

    def declare(self, *declared):
        self.declared = declared
        return None, None

    def session(self, app, function, detach):
        import contextlib

        return contextlib.nullcontext(self.spawn)

    def recall(self, id):
        return self.spawn(None, id)

    def first(self, calls, seconds):
        self.clock += seconds
        for call in calls:
            got = call.script.pop(0) if len(call.script) > 1 else call.script[0]
            call.trouble = got if isinstance(got, modal_errors.Unreachable) else None
            call.got = None if call.trouble else got
        return [call for call in calls if call.got is not None]

    def spawn(self, data, id=None):
        number = len(self.parcels)
        if number in self.refuses:
            raise self.refuses[number]
        name = id or f"fc-{number}"
        call = SimpleNamespace(
            id=name,
            script=self.scripts.pop(0),
            trouble=None,
            got=None,
            made=self.live.get(name, []),
        )
        self.parcels.append(data)

        def result():
            if isinstance(call.got, BaseException):
                raise call.got
            return call.got

        call.look = lambda: call.trouble
        call.result, call.cancel = (
            result,
            lambda: self.deaf or (self.cancelled.append(number), True)[1],
        )
        if self.deaf:
            call.cancel = lambda: False
        return call


def passed(j: jobs.Job, **environment) -> bytes:
    """The reply of a container in which everything passed."""
    records = [
        building.record(j.algo.name, None, w.uuid, tier=None) for w in j.workloads
    ]
    env = Environment(gpu="NVIDIA B200", where="modal", **environment)
    return wire.encode(
        Reply(outcomes=[jobs.Outcome(Status.DONE, records=records, environment=env)])
    )


def test_one_lost_call_leaves_the_others(monkeypatch):
    a, b, c = job("cuda-v1", "cuda"), job("cuda-v4", "cuda"), job("cuda-v5", "cuda")
    fake = Cloud(
        [None, passed(a)],
        [modal_errors.CallFailed("Modal ended the container")],
        [RESET, passed(c)],
    ).install(monkeypatch)
    got = {j.algo.name: o for j, o in rented(containers=9)([a, b, c])}
    assert {name: o.status for name, o in got.items()} == {
        "cuda-v1": "done", "cuda-v4": "remote_failed", "cuda-v5": "done"
    }  # fmt: skip
    assert (
        got["cuda-v4"].code == errors.REMOTE
        and got["cuda-v4"].reason == "Modal ended the container"
    )
    _, image, gpu, limit, containers = fake.declared
    assert (image.name, str(gpu), limit) == ("gdn", "B200", 300 + SETTINGS.limits.start)
    assert containers == min(3, SETTINGS.limits.containers)


RESET = modal_errors.Unreachable("no connection to Modal (Connection reset by peer)")


def test_an_interruption_is_waited_for_and_said_once(monkeypatch):
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    Cloud([*[RESET] * 400, passed(a)], [*[RESET] * 300, None, passed(b)]).install(
        monkeypatch
    )
    work, said = rented(containers=2), []
    work.say = said.append
    assert [(j.algo.name, o.status) for j, o in work([a, b])] == [
        ("cuda-v4", "done"),
        ("cuda-v1", "done"),
    ]
    assert work.sent == []
    told = [line for line in said if "connection" in line or "again" in line]
    assert told == [
        (
            "no connection to Modal (Connection reset by peer): the calls go on there; asking"
            " again for up to 24 min"
        ),
        "Modal answers again",
    ]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("how", ["reset", "silence"])
def test_without_an_answer_until_the_limit_no_id_is_dropped(how, resumed, monkeypatch):
    """Not even one that a resumed run has: it would be sent, and paid for, once more."""
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    fake = Cloud([passed(a)], [RESET if how == "reset" else None]).install(monkeypatch)
    fake.deaf = True  # a request to stop it is not heard either
    work = rented(minutes=10)
    if resumed:
        work.earlier = [
            RemoteCall(id=f"fc-{i}", keys=[engine.key(j)], limit_s=540)
            for i, j in enumerate((a, b))
        ]
    got = {j.algo.name: o for j, o in work([a, b])}
    assert 600 <= fake.clock <= 602 and got["cuda-v1"].status == "done"
    assert (got["cuda-v4"].status, got["cuda-v4"].code) == (
        "remote_failed",
        errors.REMOTE,
    )
    said = "Connection reset by peer" if how == "reset" else "Modal does not answer"
    assert said in got["cuda-v4"].reason and "may go on there" in got["cuda-v4"].reason
    assert [(call.id, call.keys) for call in work.sent] == [("fc-1", [engine.key(b)])]


def test_what_cannot_be_sent_leaves_what_was(monkeypatch):
    a, b, c = (job(n, "cuda") for n in ("cuda-v1", "cuda-v4", "cuda-v5"))
    fake = Cloud([passed(a)], [None]).install(monkeypatch)
    fake.refuses = {1: RemoteError("Modal does not grant it: too many inputs")}
    got = {j.algo.name: (o.status, o.reason) for j, o in rented()([a, b, c])}
    assert got["cuda-v1"][0] == "done" and got["cuda-v4"] == got["cuda-v5"]
    assert got["cuda-v4"] == (
        "remote_failed",
        "it was not sent: Modal does not grant it: too many inputs",
    )


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (KeyboardInterrupt(), []),  # the app is stopped, and the call with it
        (KeyboardInterrupt(modal_errors.UNSTOPPED), ["fc-0"]),
        (RESET, ["fc-0"]),
        (RemoteError("asked for B200"), []),
    ],
)
def test_ids_are_forgotten_only_with_their_app(end, kept, monkeypatch):
    fake, work = Cloud([None]).install(monkeypatch), rented()

    def first(calls, seconds):
        # in the file from the start: this process may be killed
        assert [call.id for call in work.sent] == ["fc-0"]
        raise end

    monkeypatch.setattr(modal_client, "first", first)
    with pytest.raises(type(end)):
        list(work([job("cuda-v4", "cuda")]))
    assert [call.id for call in work.sent] == kept and len(fake.parcels) == 1


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

    call = modal_client.Call(SimpleNamespace(get=get, object_id="fc-0"))
    call._answer = modal_client.futures.Future()
    call._listen(call._answer, pauses.append)
    assert left == []
    return call._answer, asked, pauses


def faults() -> list[Exception]:
    import grpclib.exceptions
    import h2.exceptions
    import modal.exception as e

    return [
        ConnectionResetError(104, "Connection reset by peer"), ConnectionRefusedError(111, "Connection refused"),
        grpclib.exceptions.StreamTerminatedError("Connection lost"), h2.exceptions.ProtocolError("closed"),
        e.ConnectionError("Could not connect"), e.ServiceError("unavailable"), e.InternalError("internal"),
        e.ResourceExhaustedError("rate limit"), e.ConflictError("aborted"), e.ClientClosed("closed"),
        e.ExecutionError("Get from url failed with status 503: Slow Down"),
        AttributeError("'NoneType' object has no attribute '_write_appdata'"),
    ]  # fmt: skip


def test_a_call_is_asked_for_by_long_requests_and_with_longer_pauses_while_nothing_answers():
    wrong = faults()
    answer, asked, pauses = heard(
        TimeoutError(), *wrong, TimeoutError(), TimeoutError(), b"reply"
    )
    assert answer.result() == b"reply"
    assert pauses == [1, 2, 4, 8, 16, *[30] * (len(wrong) - 5)]
    assert asked == [50, 50, *[1] * len(wrong), 50, 50]


def test_only_the_calls_own_verdict_is_its_failure():
    import modal.exception as e

    for verdict, says in [
        (e.FunctionTimeoutError("t"), "Modal ended the container at its time limit"),
        (e.OutputExpiredError(), "no longer has its result"),
        (
            e.DeserializationError("see above"),
            "is not a reply of gdn: it cannot be unpacked",
        ),
        (e.NotFoundError("no such call"), "does not know this call"),
        (e.InternalFailure("worker lost"), "the container failed: worker lost"),
        (e.RemoteError("exit code 137"), "out of memory"),
        (ZeroDivisionError("oops"), "the container failed: oops"),
    ]:
        answer, _, pauses = heard(verdict)
        assert isinstance(answer.exception(), modal_errors.CallFailed) and says in str(
            answer.exception()
        )
        assert pauses == []
    assert isinstance(heard(e.AuthError("revoked"))[0].exception(), RemoteError)

    # the function of Modal's client that raises what a container has raised
    def _process_result(of):
        raise of

    for remote in (OSError(28, "No space left on device"), TimeoutError("inside")):
        try:
            _process_result(remote)
        except Exception as raised:
            assert "the container failed: " in str(heard(raised)[0].exception())


def test_calls_that_are_too_slow_are_cancelled(monkeypatch):
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    fake = Cloud([passed(a)], [None]).install(monkeypatch)
    got = [(j.algo.name, o.status, o.reason) for j, o in rented(minutes=1e-6)([a, b])]
    assert got[0][:2] == ("cuda-v1", "done") and fake.cancelled == [1]
    assert got[1][:2] == ("cuda-v4", "remote_failed") and "--max-minutes" in got[1][2]


def test_algos_for_a_cpu_rent_no_gpu(monkeypatch):
    j = job("cpp-v1", "cpu")
    fake = Cloud([passed(j)]).install(monkeypatch)
    assert [o.status for _, o in rented()([j])] == ["done"] and fake.declared[2] is None
    assert opened(fake.parcels[0]).gpu is None


@pytest.mark.parametrize(
    ("count", "more", "says"),
    [
        (
            1,
            {},
            (
                "Modal: B200, 1 container, 1 call of at most 9 min: 9 min of container time at"
                " most, $0.98 "
            ),
        ),
        (
            3,
            {},
            (
                "Modal: B200, 1 container, 3 calls of at most 9 min: 27 min of container time at"
                " most, $2.95 "
            ),
        ),
        (
            3,
            {"containers": 2},
            (
                "Modal: B200, 2 containers, 3 calls of at most 9 min: 27 min of container time at"
                " most"
            ),
        ),
        (
            3,
            {"minutes": 5},
            "Modal: B200, 1 container, 3 calls of at most 5 min: 5 min of container time at most",
        ),
        (
            3,
            {"minutes": 5, "detach": True},
            "Modal: B200, 1 container, 3 calls of at most 5 min: 15 min of",
        ),
        (
            3,
            {"together": True},
            "Modal: B200, 1 container, 1 call of at most 19 min: 19 min of",
        ),
        (99, {"containers": 99}, "Modal: B200, 4 containers, 99 calls of"),
    ],
)
def test_the_bill_is_said_before_the_start(count, more, says, monkeypatch):
    said = []
    work = rented(**more)
    work.say = said.append
    wanted = [job("cuda-v4", "cuda")] * count
    replies = [modal_errors.CallFailed("x")]
    fake = Cloud(*[replies] * count).install(monkeypatch)
    monkeypatch.setattr(
        fake,
        "session",
        lambda *_: pytest.fail("started") if not said else Cloud.session(fake, *_),
    )
    monkeypatch.setattr(modal_client, "session", fake.session)
    list(work(wanted))
    assert said[0].startswith(says)


@pytest.mark.parametrize(
    ("gpu", "dollars"),
    [
        # an hour: 4 cores of $0.0000131 a second, 16 GiB of $0.00000222, and the GPUs
        ("B200", 3600 * (4 * 0.0000131 + 16 * 0.00000222 + 0.001736)),
        ("B200:2", 3600 * (4 * 0.0000131 + 16 * 0.00000222 + 2 * 0.001736)),
        ("H100", 3600 * (4 * 0.0000131 + 16 * 0.00000222 + 0.001097)),
        (None, 3600 * (4 * 0.0000131 + 16 * 0.00000222)),
    ],
)
def test_dollars_are_those_of_all_gpus_of_a_container(gpu, dollars):
    words = SETTINGS.dollars(gpu and SETTINGS.parse(gpu), 3600)
    assert words == f"${dollars:.2f} at the prices of {SETTINGS.prices.date}"
    assert (
        SETTINGS.dollars(SETTINGS.parse("B300"), 60)
        == "configs/modal.toml has no price of B300"
    )
    assert set(SETTINGS.prices.gpus) == {
        name.rstrip("!") for name in SETTINGS.gpus.known
    }


def test_a_rented_gpu_is_not_paid_for_work_on_a_cpu():
    gpu, cpu = (
        job("cuda-v4", "cuda", command="bench"),
        job("cpp-v1", "cpu", command="bench"),
    )
    plan = planning.Plan(
        [job("pt-reference", "cpu", command="floor"), cpu, gpu], [], []
    )
    costs.affordable(plan, False)
    assert plan.jobs == [gpu] and [(m.algo, m.hint) for m in plan.missing] == [
        ("pt-reference", "--device cpu rents none"), ("cpp-v1", "--device cpu rents none")
    ]  # fmt: skip
    alone = planning.Plan([cpu], [], [])
    costs.affordable(alone, False)  # no GPU is rented
    assert alone.jobs == [cpu] and alone.missing == []


def test_a_tier_that_the_image_does_not_have_is_refused_before_the_start(monkeypatch):
    assert all(tier.package in {None} | settings.pinned() for tier in TIERS.values())
    monkeypatch.setattr(costs, "pinned", lambda: settings.pinned() - {"cuda-bench"})
    many = job(
        "cuda-v4", "cuda", command="bench", timing=Timing(("cupti", "nvbench", "fib"))
    )
    with pytest.raises(
        UsageError, match="tier 'nvbench' needs cuda-bench, which is not in the image"
    ):
        costs.affordable(planning.Plan([many], [], []), False)
    plan = planning.Plan([many], [], [])
    costs.affordable(plan, True)  # --tier all
    assert plan.jobs[0].tiers == ("cupti", "fib")


def test_together_puts_the_named_algos_into_turns_and_all_into_one_parcel(monkeypatch):
    tiers = ("cupti", "fib")
    floor = job("pt-reference", "cuda", command="floor", timing=Timing(tiers))
    yardstick = job(
        "pt-reference", "cuda", command="bench", timing=Timing(tiers), added=True
    )
    a, b = (
        job(n, "cuda", command="bench", timing=Timing(tiers))
        for n in ("cuda-v4", "fla-recurrent")
    )
    made = engine.together([floor, yardstick, a, b])
    assert [j.command for j in made] == ["floor", "bench", "compare"]
    assert made[2].names == ("cuda-v4", "fla-recurrent")
    assert made[2].tiers == ("cupti",) and made[2].timeout_s == 600 and made[2].due == 2
    assert engine.together([floor, yardstick, a]) == [floor, yardstick, a]
    (work,) = rented(together=True)._split(made)
    assert work.earlier is None and len(work.jobs) == 3
    with pytest.raises(UsageError, match="use --tier cupti"):
        engine.together(
            [
                job(n, "cuda", command="bench", timing=Timing(("fib",)))
                for n in ("cuda-v4", "fla-recurrent")
            ]
        )


def test_times_of_several_gpus_are_said_to_be_so(tmp_path, monkeypatch):
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    Cloud([passed(a, gpu_uuid="GPU-1")], [passed(b, gpu_uuid="GPU-2")]).install(
        monkeypatch
    )
    work, document = rented(containers=2), building.document()
    execute.run(
        planning.Plan([a, b], [], []),
        Writer(document, tmp_path / "run.json"),
        lambda *_: None,
        print,
        work,
    )
    work.finish(document)
    assert (
        "2 GPUs of one kind" in document.warnings[0]
        and "--together" in document.warnings[0]
    )
    del document.records[0]
    document.warnings = None
    work.finish(document)
    assert document.warnings is None


def test_records_stand_in_the_order_of_the_jobs_whenever_they_come(
    tmp_path, monkeypatch
):
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    Cloud([None, passed(a)], [passed(b)]).install(monkeypatch)
    writer, came = Writer(building.document(), tmp_path / "run.json"), []
    save = writer.save
    monkeypatch.setattr(
        writer,
        "save",
        lambda: (came.append([r.algo for r in writer.document.records]), save()),
    )
    order = {planning.key(a): 0, planning.key(b): 1}
    execute.run(
        planning.Plan([a, b], [], [], order),
        writer,
        lambda *_: None,
        print,
        rented(containers=2),
    )
    assert came == [["cuda-v4"], ["cuda-v4", "cuda-v1"], ["cuda-v1", "cuda-v4"]]
    assert [
        r["algo"] for r in json.loads((tmp_path / "run.json").read_text())["records"]
    ] == [
        "cuda-v1",
        "cuda-v4",
    ]


# --- records of calls that did not reply


def test_each_record_is_kept_as_it_is_made_with_where_it_was_made(monkeypatch):
    gpu = inventory.Gpu("NVIDIA B200", "10.0", "580", "GPU-1")
    machine = inventory.Machine(gpus=lambda: (gpu,))
    kept = []

    def serve(request, env, timeout_s, on_record):
        on_record(
            building.record("cuda-v4", 2.0),
            Environment(gpu=gpu.name, gpu_uuid=gpu.uuid),
        )
        assert len(kept) == 1  # before the worker's end
        raise MemoryError("and then the container is gone")

    monkeypatch.setattr(worker_process, "serve", serve)
    data = rented().parcel(work_of(job("cuda-v4", "cuda")), B200)
    assert (
        "MemoryError"
        in answered(container.serve(data, machine=machine, keep=kept.append)).lost
    )
    made = wire.decode(kept[0], wire.Made)
    assert (made.piece, made.record) == (0, building.record("cuda-v4", 2.0))
    assert (
        made.environment.where,
        made.environment.asked,
        made.environment.gpu_uuid,
    ) == ("modal", "B200", "GPU-1")


def test_what_a_lost_call_had_measured_is_kept_once_and_only_of_the_gpu_asked_for(
    monkeypatch,
):
    mine = job("cuda-v4", "cuda", 3)
    uuids = [w.uuid for w in mine.workloads]

    def made(uuid, us, gpu="NVIDIA B200", piece=0, algo="cuda-v4"):
        return wire.encode(
            wire.Made(
                piece,
                building.record(algo, us, uuid),
                Environment(gpu=gpu, where="modal"),
            )
        )

    fake = Cloud([modal_errors.CallFailed("preempted")]).install(monkeypatch)
    fake.made["fc-0"] = [
        # started again
        made(uuids[0], 2.0), b"damaged", made(uuids[1], 3.0), made(uuids[0], 4.0),
        made(uuids[2], 5.0, "NVIDIA H200"), made(uuids[2], 5.0, piece=1), made(uuids[2], 5.0, algo="cuda-v1"),
    ]  # fmt: skip
    said, work = [], rented()
    work.say = said.append
    ((_, outcome),) = work([mine])
    assert (outcome.status, outcome.reason, outcome.code) == (
        "remote_failed",
        "preempted",
        errors.REMOTE,
    )
    assert [(r.uuid, r.timing.median_us) for r in outcome.records] == [
        (uuids[0], 2.0),
        (uuids[1], 3.0),
    ]
    assert outcome.environment.gpu == "NVIDIA B200"
    assert said[-1] == "gdn_decode/cuda-v4: 2 of 3 came before that"


def test_a_call_that_is_started_again_does_what_is_left(monkeypatch):
    """What a preempted container has kept, with its own GPU, and the workloads that it
    had not finished.
    """
    machine = inventory.Machine(
        gpus=lambda: (inventory.Gpu("NVIDIA B200", "10.0", "580", "GPU-2"),)
    )
    whole = job("cuda-v4", "cuda", 3, "bench", timing=Timing(("cupti", "graph")))
    first, half, last = (w.uuid for w in whole.workloads)

    def record(uuid, tier, us):
        return building.record("cuda-v4", us, uuid, tier=tier)

    old = Environment(gpu="NVIDIA B200", gpu_uuid="GPU-1")
    before = [wire.encode(wire.Made(0, record(*one), old)) for one in (
        (first, "cupti", 1.0), (first, "graph", 2.0), (half, "cupti", 3.0)
    )]  # fmt: skip
    asked = []

    def serve(request, env, timeout_s, on_record):
        asked.append([w.uuid for w in request.workloads])
        made = [
            record(w.uuid, tier, 9.0)
            for w in request.workloads
            for tier in request.timing.tiers
        ]
        return jobs.Outcome(
            Status.DONE,
            records=made,
            environment=Environment(gpu="NVIDIA B200", gpu_uuid="GPU-2"),
        )

    monkeypatch.setattr(worker_process, "serve", serve)
    data = rented().parcel(work_of(whole), B200)
    (got,) = answered(
        container.serve(data, machine=machine, before=[b"damaged", *before])
    ).outcomes
    assert asked == [[half, last]]
    times = [
        (r.uuid, r.tier, r.timing.median_us, r.gpu and r.gpu.uuid) for r in got.records
    ]
    assert times == [
        (first, "cupti", 1.0, "GPU-1"), (first, "graph", 2.0, "GPU-1"), (half, "cupti", 9.0, None),
        (half, "graph", 9.0, None), (last, "cupti", 9.0, None), (last, "graph", 9.0, None),
    ]  # fmt: skip
    more = [
        wire.encode(wire.Made(0, record(u, t, 5.0), old))
        for u, t in ((half, "graph"), (last, "cupti"), (last, "graph"))
    ]
    (got,) = answered(
        container.serve(data, machine=machine, before=before + more)
    ).outcomes
    assert (
        asked == [[half, last]]
        and len(got.records) == 6
        and got.environment.gpu_uuid == "GPU-1"
    )


def test_records_are_in_the_document_before_their_call_has_ended(tmp_path, monkeypatch):
    mine = job("cuda-v4", "cuda", 3)
    uuids = [w.uuid for w in mine.workloads]
    where = Environment(gpu="NVIDIA B200", gpu_uuid="GPU-1", where="modal")
    ended = jobs.Outcome(
        Status.DONE, None, [building.record("cuda-v4", 7.0, u) for u in uuids], where
    )
    fake = Cloud([None, None, wire.encode(Reply(outcomes=[ended]))]).install(
        monkeypatch
    )
    fake.live["fc-0"] = []
    writer, said, saved = Writer(building.document(), tmp_path / "run.json"), [], []

    def first(calls, seconds):
        got = Cloud.first(fake, calls, seconds)
        if len(calls[0].made) < 2:  # one between two looks
            made = building.record(
                "cuda-v4", 1.0 + len(calls[0].made), uuids[len(calls[0].made)]
            )
            calls[0].made.append(wire.encode(wire.Made(0, made, where)))
        saved.append([r.timing.median_us for r in writer.document.records])
        return got

    monkeypatch.setattr(modal_client, "first", first)
    work = rented()
    work.say = said.append
    execute.run(planning.Plan([mine], [], []), writer, lambda *_: None, print, work)
    assert saved == [[], [1.0], [1.0, 2.0]]
    # each once
    assert [r.timing.median_us for r in writer.document.records] == [1.0, 2.0, 7.0]
    assert {r.gpu.uuid for r in writer.document.records} == {"GPU-1"}
    assert [line for line in said if "so far" in line] == [
        "gdn_decode/cuda-v4: 1 of 3 so far"
    ]


# --- replies that are not what was asked for


def outcome(
    gpu: str | None = "NVIDIA B200", algo: str = "cuda-v4", **more
) -> jobs.Outcome:
    records = [
        building.record(algo, None, w.uuid, tier=None)
        for w in job(algo, "cuda").workloads
    ]
    return jobs.Outcome(
        Status.DONE, records=records, environment=gpu and Environment(gpu=gpu, **more)
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "what came back from Modal is not a reply of gdn"),
        (wire.zlib.compress(b"{}"), "what came back from Modal is not a reply of gdn"),
        (
            wire.zlib.compress(
                b'{"schema": 3, "outcomes": [{"status": "done", "records": 7}]}'
            ),
            "not a reply of gdn: ",
        ),
        (Reply(), "not a reply of gdn: it has 0 outcomes for 1 job"),
        (
            Reply(outcomes=[outcome(), outcome()]),
            "not a reply of gdn: it has 2 outcomes for 1 job",
        ),
        (
            Reply(outcomes=[outcome("NVIDIA H200")]),
            "asked for B200, and the container has NVIDIA H200",
        ),
        (
            Reply(outcomes=[outcome(None)]),
            "asked for B200, and the reply does not name its GPU",
        ),
        (
            Reply(outcomes=[outcome(gpus=["NVIDIA B200"] * 2)]),
            "the container has NVIDIA B200, NVIDIA B200",
        ),
        (
            Reply(outcomes=[outcome("NVIDIA H200", gpus=["NVIDIA B200"])]),
            "the reply names NVIDIA H200 and NVIDIA B200",
        ),
    ],
)
def test_a_wrong_reply_is_the_failure_of_its_own_call(data, says, monkeypatch):
    data = wire.encode(data) if isinstance(data, Reply) else data
    wrong, right = job("cuda-v4", "cuda"), job("cuda-v1", "cuda")
    Cloud([data], [None, passed(right)]).install(monkeypatch)
    work = rented(containers=2)
    got = {j.algo.name: o for j, o in work([wrong, right])}
    assert (
        got["cuda-v1"].status == "done" and got["cuda-v1"].environment.where == "modal"
    )
    assert (got["cuda-v4"].status, got["cuda-v4"].code) == (
        "remote_failed",
        errors.REMOTE,
    )
    assert (
        says in got["cuda-v4"].reason
        and got["cuda-v4"].records == []
        and work.sent == []
    )


def test_a_reply_for_another_gdn_can_still_be_fetched_by_that_one(monkeypatch):
    Cloud([wire.zlib.compress(b'{"schema": 2}')]).install(monkeypatch)
    work = rented()
    ((_, lost),) = work([job("cuda-v4", "cuda")])
    assert "speaks schema 2, this gdn 3" in lost.reason and [
        call.id for call in work.sent
    ] == ["fc-0"]


def test_what_modals_client_unpacks_as_something_else_than_bytes_is_no_reply():
    for content in ("text", 7, {"outcomes": []}, None):
        answer, _, _ = heard(content)
        assert "is not a reply of gdn: it is of type" in str(answer.exception())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([], "it has 0 profiles for 1"),
        ([Profile()], "a profile is empty"),
        (
            [
                Profile(
                    documents.typed(
                        documents.v4(environment=documents.GPU | {"gpu": "NVIDIA H200"})
                    )
                )
            ],
            "asked for B200",
        ),
    ],
)
def test_a_wrong_profile_is_refused_in_one_line(made, says, tmp_path, monkeypatch):
    Cloud([wire.encode(Reply(profiles=made))]).install(monkeypatch)
    tool, subjects = session.subjects(
        REGISTRY, ["cuda-v4"], None, "torch", "0", None, "cuda", place=engine.place
    )
    with pytest.raises(RemoteError, match=says):
        list(profiles.made(rented(), subjects, session.Settings(tool, tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_message_has_a_limit_and_so_has_each_text_in_it(monkeypatch):
    """Of one that comes back: a parcel has the sources, and a profile its files, which
    are texts in JSON as well.
    """
    long = "<" + "x" * 1_000_000 + ">"
    profile = Profile(
        refused=wire.Refusal(long, None, 1), files={"big": b"x" * 1_000_000}
    )
    got = answered(wire.encode(Reply(lost=long, profiles=[profile])))
    for text in (got.lost, got.profiles[0].refused.message):
        assert (
            len(text) < 140_000
            and text[0] + text[-1] == "<>"
            and "characters left out" in text
        )
    assert got.profiles[0].files == profile.files
    parcel = Parcel(gpu=None, cache=None, env={"long": long})
    assert opened(wire.encode(parcel)).env["long"] == long
    monkeypatch.setattr(wire, "MOST", 1 << 20)
    answered(wire.encode(Reply(lost="x" * 1_000_000)))
    for data in (
        wire.encode(Reply(lost="x" * 1_100_000)),
        wire.encode(Reply(lost="x"))[:-4],
        "text",
        None,
    ):
        with pytest.raises(RemoteError, match="is not a reply of gdn"):
            answered(data)


def test_what_modal_says_has_a_limit():
    assert len(modal_errors.scrub("<" + "x" * 20_000_000 + ">")) < 140_000
    tee = modal_client._Tee(io.StringIO())
    for _ in range(100):
        tee.write("x" * 1000)
    tee.write("y\nlast")
    assert [len(text) for text in tee.last()] == [2000, 4] and tee.last()[0].endswith(
        "xy"
    )


@pytest.mark.parametrize("profiles", [None, 1, [1], [None], {"a": 1}, [[]]])
def test_profiles_of_another_shape_are_no_reply(profiles):
    data = wire.zlib.compress(
        json.dumps({"schema": wire.SCHEMA, "profiles": profiles}).encode()
    )
    with pytest.raises(RemoteError, match="is not a reply of gdn"):
        answered(data)


def test_a_damaged_file_of_a_profile_costs_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "_FILE", 1 << 20)
    b200 = documents.v4(environment=documents.GPU | {"gpu": "NVIDIA B200"})
    files = {"a.txt": b"no zlib", "../b.txt": wire.zlib.compress(b"B")}
    files |= {
        "c.txt": wire.zlib.compress(bytes(2 << 20)),
        "d\0.txt": wire.zlib.compress(b"D"),
        "..": b"",
    }
    sent = Profile(documents.typed(b200), files)
    Cloud([wire.encode(Reply(profiles=[sent]))]).install(monkeypatch)
    tool, subjects = session.subjects(
        REGISTRY, ["cuda-v4"], None, "torch", "0", None, "cuda", place=engine.place
    )
    (made,) = profiles.made(rented(), subjects, session.Settings(tool, tmp_path / "p"))
    assert (
        "a.txt arrived damaged" in made.unkept
        and (Path(made.folder) / "b.txt").read_text() == "B"
    )


# --- going on with a run


def test_only_failed_calls_are_repeated(tmp_path, monkeypatch):
    a, b = job("cuda-v1", "cuda", 2, "bench"), job("cuda-v4", "cuda", 2, "bench")
    first = building.document()
    Cloud([passed(a)], [modal_errors.CallFailed("lost")]).install(monkeypatch)
    execute.run(
        planning.Plan([a, b], [], []),
        Writer(first, tmp_path / "run.json"),
        lambda *_: None,
        print,
        rented(),
    )
    assert [(r.algo, r.status) for r in first.records] == [
        ("cuda-v1", "passed"), ("cuda-v1", "passed"), ("cuda-v4", "remote_failed"),
    ]  # fmt: skip
    assert (
        first.records[-1].unfinished == 2
        and execute.exit_code(first, True) == errors.REMOTE
    )
    old, again = (
        store.load(tmp_path / "run.json"),
        Writer(building.document(), tmp_path / "run.json"),
    )
    left = resume.resume([a, b], old, again)
    assert left == [b] and again.document.environments["cuda"].gpu == "NVIDIA B200"
    again.add(building.record("cuda-v4"), b.place, None)
    assert again.earlier == 2 and [r.algo for r in again.news.records] == ["cuda-v4"]
    for record in old.records:
        record.source_hash = "another"
    assert resume.resume(
        [a, b], old, Writer(building.document(), tmp_path / "x.json")
    ) == [a, b]


def test_detached_calls_are_fetched_and_not_sent_again(monkeypatch):
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    fake = Cloud([passed(a)], [passed(b)]).install(monkeypatch)
    work = rented()
    work.earlier = [RemoteCall(id="fc-old", keys=[engine.key(a)], limit_s=540)]
    assert [j.algo.name for j, _ in work([a, b])] == ["cuda-v1", "cuda-v4"]
    assert fake.parcels[0] is None and fake.parcels[1] is not None and work.sent == []


def test_detached_calls_are_not_forgotten_without_a_connection(monkeypatch):
    a, b = job("cuda-v1", "cuda"), job("cuda-v4", "cuda")
    Cloud().install(monkeypatch)
    monkeypatch.setattr(
        modal_client,
        "connect",
        lambda seconds: (_ for _ in ()).throw(modal_errors.Unreachable("no network")),
    )
    work = rented()
    work.earlier = [
        RemoteCall(id=f"fc-{j.algo.name}", keys=[engine.key(j)], limit_s=540)
        for j in (a, b)
    ]
    with pytest.raises(RemoteError, match="no network"):
        list(work([a, b]))
    assert work.sent == work.earlier


def test_a_file_that_is_not_a_run_of_modal_is_refused(tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"schema": 2, "command": "bench", "records": []}))
    with pytest.raises(UsageError, match="not a run of `gdn modal`"):
        resume.read(file)
