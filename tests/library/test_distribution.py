"""gdn-kernels: what is in it, that it needs torch and apache-tvm-ffi alone, and its libraries."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

import gdn_cli
from gdn_cli import paths
from gdn_cli.catalog import pack
from gdn_cli.errors import GdnError, MissingError, UsageError
from gdn_cli.machine import compiling, inventory, libraries
from gdn_cli.parsing import read_toml

SRC = Path(gdn_cli.__file__).parent.parent
ROOT = SRC.parent
KERNELS = read_toml(ROOT / "packaging" / "gdn-kernels" / "pyproject.toml")
# what gdn has and gdn-kernels has not: everything that is not torch's or apache-tvm-ffi's
OTHERS = (
    "msgspec typer rich flashinfer_bench pydantic modal matplotlib safetensors pynvml"
)
# an engine's own, which a hook may import
ENGINES = "vllm sglang transformers kernels fla"
# gdn.load is the package gdn's
OF_THE_COMMAND = ("gdn.loading", "gdn.call_checks")
ALONE = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OTHERS.split()}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for name in sys.argv[1:]:
    try:
        __import__(name)
    except ModuleNotFoundError as e:
        if e.name.partition(".")[0] not in {ENGINES.split()}:
            raise
print(*[name for name in sys.modules if name.partition(".")[0] == "gdn_cli"])
import gdn
try:
    gdn.load
except Exception as e:
    print(f"{{type(e).__name__}}: {{e}}")
"""


def test_it_needs_torch_and_tvm_ffi_alone():
    modules = []
    for path in sorted((SRC / "gdn").rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        modules.append(name.removesuffix(".__init__"))
    library = [name for name in modules if name not in OF_THE_COMMAND]
    code = [sys.executable, "-c", ALONE, *library]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used, load = done.stdout.splitlines()
    assert load.startswith("MissingError: gdn.load is in the package gdn, ")

    included = KERNELS["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    packed = {place for place in included.values() if place.endswith(".py")}
    files = [SRC / name.replace(".", "/") for name in used.split()]
    both = [(file / "__init__.py", file.with_suffix(".py")) for file in files]
    found = {next(path for path in two if path.is_file()) for two in both}
    says = (
        "packaging/gdn-kernels/pyproject.toml lists what of gdn_cli the library imports"
    )
    assert {str(path.relative_to(SRC)) for path in found} == packed, says


def test_no_file_is_in_both_packages():
    wheel = read_toml(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    included = KERNELS["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    of_command = {name for name in included.values() if name.endswith(".py")}
    assert wheel["packages"] == ["src/gdn_cli"]
    assert wheel["exclude"] == sorted(f"src/{name}" for name in of_command)
    assert set(included) >= {"../../src/gdn", "../../algos"}


def test_it_gives_way_to_an_engines_torch():
    """vLLM 0.33 and SGLang 0.5.23 pin torch 2.14 and apache-tvm-ffi 0.1.11."""
    torch, ffi, _ = KERNELS["project"]["dependencies"]
    assert (torch, ffi) == ("torch>=2.8", "apache-tvm-ffi>=0.1.2,<0.2")


# --- libraries


def rungs() -> set[str]:
    from gdn.serving import library

    known = [x for x in library._known if x.cuda != "op/rung"]  # other tests'
    return {rung for x in known for rung in (x.cuda, x.halves) if rung}


def test_what_gdn_build_serving_compiles_is_what_serving_calls():
    pytest.importorskip("torch")
    flagged = {algo.full_name for algo in helpers.REGISTRY.algos if algo.serving}
    assert flagged == rungs()


@pytest.mark.parametrize(
    "algo",
    [a for a in helpers.REGISTRY.algos if a.language in ("cpp", "cuda")],
    ids=lambda a: a.full_name,
)
def test_a_librarys_hash_is_that_of_the_records(algo):
    packed = pack.pack(algo, helpers.REGISTRY.ops[algo.op])
    assert libraries.source(algo.full_name).hash == pack.source_hash(packed)


@pytest.mark.parametrize(
    ("name", "capability", "targets"),
    [
        ("gdn_decode_packed/cuda-v5-packed", (9, 0), ["sm_90", "sm_90a"]),
        ("gdn_prefill_packed/cuda-chunk-packed", (9, 0), ["sm_90a", "sm_90"]),
        ("gdn_mtp_packed/cuda-v1", (8, 6), ["sm_86", "sm_86a", *(f"sm_8{i}" for i in range(5, -1, -1))]),
        ("gdn_decode_packed/cpp-v1", None, ["cpu"]),
    ],
)  # fmt: skip
def test_which_libraries_run_on_a_gpu(name, capability, targets):
    assert libraries.fitting(libraries.source(name), capability) == targets


def placed(folder: Path, algo: libraries.Source, target: str, cuda: str | None) -> Path:
    file = folder / libraries.platform_name(cuda) / algo.file(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    return file


def test_a_library_fits_by_hash_architecture_and_cuda(tmp_path, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path))
    algo = libraries.source("gdn_mtp_packed/cuda-v1")
    file = placed(tmp_path, algo, "sm_80", "13.0")
    assert libraries.prebuilt(algo, (8, 0), "13.0") == file
    assert libraries.prebuilt(algo, (8, 9), "13.2") == file  # runs there too
    assert libraries.prebuilt(algo, (9, 0), "13.0") is None
    assert libraries.prebuilt(algo, (8, 0), "12.8") is None
    best = placed(tmp_path, algo, "sm_89", "13.0")
    assert libraries.prebuilt(algo, (8, 9), "13.0") == best
    other = libraries.source("gdn_mtp/cuda-v1")
    assert libraries.prebuilt(other, (8, 0), "13.0") is None
    file.rename(file.with_name(file.name.replace(algo.hash, "0" * 12)))
    assert libraries.prebuilt(algo, (8, 0), "13.0") is None


CPU = "gdn_decode_packed/cpp-v1"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of libraries, and gdn.serving.library, which does not compile."""
    pytest.importorskip("torch")
    from gdn.serving import library

    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path))
    monkeypatch.setattr(libraries, "compiled", lambda *_: Path("compiled"))
    monkeypatch.setattr(library, "Library", str)
    return library


def test_a_library_that_is_there_is_not_compiled(tmp_path, shelf):
    assert shelf._kernel(CPU) == "compiled"
    file = placed(tmp_path, libraries.source(CPU), "cpu", None)
    assert shelf._kernel(CPU) == str(file)


def test_a_damaged_library_is_compiled(tmp_path, shelf, monkeypatch, caplog):
    placed(tmp_path, libraries.source(CPU), "cpu", None)
    monkeypatch.setattr(libraries, "compiled", lambda *_: tmp_path / "compiled")
    (tmp_path / "compiled").touch()

    def damaged(file):
        if file.exists():
            raise OSError("file too short")
        return str(file)

    monkeypatch.setattr(shelf, "Library", damaged)
    # the one that was compiled before is damaged, too: it is deleted and compiled again
    assert shelf._kernel(CPU) == str(tmp_path / "compiled")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "file too short" in record.message


def test_the_log_says_once_what_is_active(tmp_path, shelf, caplog, monkeypatch):
    monkeypatch.setattr(shelf, "_known", [x for x in shelf._known if x.cpu])
    names = sorted({x.cpu for x in shelf._known})
    assert len(names) == 5
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "kept"))
    caplog.set_level(logging.INFO, "gdn.serving")
    for expected in (logging.WARNING, logging.INFO):
        shelf._announce.cache_clear()
        for _ in range(2):
            shelf._announce(False)
        (record,) = caplog.records
        caplog.clear()
        assert record.levelno == expected
        for name in names:
            placed(tmp_path, libraries.source(name), "cpu", None)
            assert name in record.message
    shelf._announce.cache_clear()
    assert record.message.startswith("gdn 0.1.0: gdn_")
    assert record.message.count("prebuilt for cpu") == len(names)


def test_what_cannot_be_compiled_is_one_line(tmp_path, monkeypatch):
    algo = libraries.source("gdn_mtp_packed/cuda-v1")
    monkeypatch.setattr("gdn_cli.machine.toolchain.cuda_home", lambda: None)
    with pytest.raises(
        MissingError, match="gdn_mtp_packed/cuda-v1: no nvcc here; gdn build"
    ):
        libraries.compile_to(tmp_path, algo, "9.0", "13.0")
    with pytest.raises(UsageError, match="gdn ships no algo gdn_decode/nothing"):
        libraries.source("gdn_decode/nothing")


def test_architectures_that_run_an_algo():
    layer, decode = map(libraries.source, ("gdn_layer/cuda-v1", "gdn_decode/cuda-v5"))
    runs = [libraries.runs_on(layer, arch) for arch in ("8.9", "9.0a", "10.0")]
    assert runs == [False, True, True]
    assert libraries.runs_on(decode, "8.0") and not libraries.runs_on(decode, "7.5")


@pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here")
def test_a_compilers_error_is_shown(tmp_path, write_algo, monkeypatch):
    keys = {"language": "cpp", "entry_point": "k.cpp::run"}
    write_algo(tmp_path, "broken", {"k.cpp": "int f() { return nothing; }"}, **keys)
    monkeypatch.setattr(paths, "ALGOS_DIR", tmp_path)
    algo = libraries.source("gdn_decode/broken")
    with pytest.raises(
        GdnError, match=r"(?s)gdn_decode/broken does not build: .*nothing"
    ):
        libraries.compile_to(tmp_path / "out", algo, None, None)
    assert list((tmp_path / "out").rglob("*.so")) == []


@pytest.mark.slow
@pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here")
def test_libraries_are_compiled_by_processes_of_their_own(tmp_path, monkeypatch):
    def compile_here(algo, library):
        raise AssertionError(f"{algo.name} was compiled in this process")

    monkeypatch.setattr(libraries, "_compile", compile_here)
    job = compiling.Job(libraries.source(CPU), None, None)
    ((done, file, seconds),) = compiling.compile_all(tmp_path, [job])
    assert done is job and seconds > 0
    assert b"packed_decode" in file.read_bytes()


def test_a_compile_that_fails_in_its_process_raises_in_ours(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda args, **_: calls.append(args[2:]))
    monkeypatch.setattr("gdn_cli.machine.toolchain.cxx", lambda: None)
    job = compiling.Job(libraries.source(CPU), None, None)
    with pytest.raises(MissingError, match=f"{CPU}: no C\\+\\+ compiler here"):
        list(compiling.compile_all(tmp_path, [job]))
    assert calls == [["gdn_cli.machine.compiling", str(tmp_path), CPU, "", ""]]


def test_an_engine_has_all_that_is_missing_compiled_at_once(
    tmp_path, shelf, monkeypatch
):
    import torch

    started = []
    monkeypatch.setattr(compiling, "start_all", lambda _, jobs: started.extend(jobs))
    monkeypatch.setattr(shelf, "_platform", lambda algo: ((9, 0), "13.0"))
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "kept"))
    verify = libraries.source("gdn_mtp_packed/cuda-v1")
    placed(tmp_path, verify, "sm_90", "13.0")
    shelf._compile_for.cache_clear()
    for _ in range(2):
        shelf._compile_for(torch.bfloat16)
    shelf._compile_for.cache_clear()
    assert [(job.algo.name, job.arch) for job in started] == [
        ("gdn_decode_packed/cuda-v5-packed", "9.0"),  # its gates
        ("gdn_decode_packed_bf16/cuda-v5-packed-bf16", "9.0"),
        ("gdn_layer_bf16/cuda-v1", "9.0"),
        ("gdn_layer_post_conv/cuda-v1", "9.0"),
        ("gdn_prefill_packed/cuda-chunk-packed", "9.0a"),
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "build takes at least one algo"),
        (("gdn_decode/cpp-v1",), "gdn_decode/cpp-v1 is not in CUDA"),
        (("--serving", "--arch", "9x"), "'9x' is no architecture"),
        (
            ("gdn_layer/cuda-v1", "--arch", "8.0"),
            "gdn_layer/cuda-v1 needs compute capability 9.0",
        ),
    ],
)
@pytest.mark.sampled(2)
def test_gdn_build_says_what_is_wrong(args, says, gdn):
    done = gdn("build", *args)
    assert done.code == 2 and says in done.err


@pytest.mark.skipif(inventory.cuda_home() is None, reason="no nvcc here")
def test_a_folder_that_cannot_be_written_is_named(gdn):
    done = gdn("build", "gdn_layer/cuda-v1", "--arch", "9.0a", "-o", "/proc/nope")
    assert done.code == 3
    told = " ".join(done.err.split())
    assert "cannot write /proc/nope" in told and "--out names another" in told


@pytest.mark.slow
@pytest.mark.skipif(inventory.cuda_home() is None, reason="no nvcc here")
def test_a_library_is_built_without_a_gpu(tmp_path, gdn, monkeypatch):
    name = "gdn_decode_packed/cuda-v5-packed"
    done = gdn("build", name, "--arch", "9.0a", "-o", tmp_path, "--json")
    (built,) = done.json["libraries"]
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path))
    file = libraries.prebuilt(libraries.source(name), (9, 0), done.json["cuda"])
    assert str(file) == built["file"] and built["arch"] == "9.0a"
    assert b"packed_decode" in file.read_bytes()
