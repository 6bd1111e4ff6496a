"""A folder for the Hugging Face Hub: what is in it, what is refused, and the proof."""

from __future__ import annotations

import helpers
import pytest

from gdn_cli.catalog import hub, pack, registry
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory
from gdn_cli.parsing import read_toml
from gdn_cli.run import prove_hub

SERVING = [
    "gdn_decode_packed/cpp-v1",
    "gdn_decode_packed/cuda-v5-packed",
    "gdn_mtp_packed/cpp-v1",
    "gdn_mtp_packed/cuda-v1",
    "gdn_prefill_packed/cpp-v1",
    "gdn_prefill_packed/cuda-chunk-packed",
]


def kernels(names, known=helpers.REGISTRY) -> list[hub.Kernel]:
    packed = []
    for name in names:
        algo = known.find(name)
        op = known.ops[algo.op]
        reference = pack.definition(op, known)["reference"]
        packed.append(hub.Kernel(op, algo, pack.pack(algo, op), reference))
    return packed


def written(folder, names, name="gdn"):
    for path, text in hub.files(kernels(names), name, "me").items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_one_folder_has_the_three_calls_of_a_server(tmp_path):
    folder = written(tmp_path, SERVING)
    toml = read_toml(folder / "build.toml")
    assert toml["general"] == {
        "name": "gdn",
        "version": 1,
        "edition": 5,
        "license": "Apache-2.0",
        "backends": ["cpu", "cuda"],
        "hub": {"repo-id": "me/gdn"},
    }
    sections = toml["kernel"]
    functions = ["gdn_decode_packed", "gdn_mtp_packed", "gdn_prefill_packed"]
    backends = ["cpu", "cuda"]
    assert set(sections) == {f"{f}_{b}" for f in functions for b in backends}
    for section in sections.values():
        assert [path for path in section["src"] if not (folder / path).is_file()] == []
    prefill = sections["gdn_prefill_packed_cuda"]
    assert prefill["cuda-capabilities"] == ["8.0", "9.0a", "10.0a", "12.0a"]
    assert prefill["cxx-flags"] == prefill["cuda-flags"]
    # names of two kernels in one library
    exports = [flag for s in sections.values() for flag in s["cxx-flags"]]
    for function in functions:
        flags = sections[f"{function}_cuda"]["cxx-flags"]
        assert f"-Dgdn={function}_gdn" in flags
    assert "-D__tvm_ffi_run=__tvm_ffi_gdn_mtp_packed" in exports
    assert "-D__tvm_ffi_fallback=__tvm_ffi_gdn_prefill_packed_fallback" in exports
    # the sources are those of the algos, byte for byte
    algo = helpers.REGISTRY.find("gdn_mtp_packed/cuda-v1")
    for path in pack.sources(algo):
        copy = folder / "gdn_mtp_packed_cuda" / path.name
        assert copy.read_bytes() == path.read_bytes()
    python = (folder / "tvm-ffi-ext/gdn/__init__.py").read_text()
    assert "from ._ops import" in python
    assert (
        "Tensor(w5!) pool, Tensor state_indices, float? scale, Tensor(w8!) output)"
        in python
    )
    scripts = sorted(path.name for path in (folder / "benchmarks").iterdir())
    assert scripts == [f"benchmark_{f}.py" for f in functions]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["gdn_decode/triton-v2"], "is in triton, and is not packed for the Hub"),
        (["gdn_decode/pt-reference"], "is in python, and is not packed for the Hub"),
        (["gdn_decode/cuda-v4", "gdn_decode/cuda-v5"], "several algos of gdn_decode for cuda"),
        (["gdn_decode/cpp-v1", "gdn_mtp/cuda-v1"], "no algo of gdn_mtp for cpu"),
    ],
)  # fmt: skip
def test_what_the_format_does_not_take_is_refused(names, says):
    with pytest.raises(UsageError, match=says):
        hub.files(kernels(names), "gdn", None)


def test_code_that_could_meet_another_kernels_is_packed_alone(tmp_path, write_algo):
    keys = {"language": "cpp", "entry_point": "k.cpp::run", "destination_passing": True}
    write_algo(tmp_path, "loose", {"k.cpp": "int helper() { return 0; }"}, **keys)
    names = ["gdn_decode/loose", "gdn_mtp/cpp-v1"]
    loose, other = kernels(names, registry.load(str(tmp_path)))
    assert "build.toml" in hub.files([loose], "gdn", None)
    with pytest.raises(
        UsageError, match="gdn_decode/loose: its code is in no namespace"
    ):
        hub.files([loose, other], "gdn", None)


def test_namespaces_are_the_outermost():
    compiled = [
        a.full_name for a in helpers.REGISTRY.algos if a.language in ("cpp", "cuda")
    ]
    spaces = {kernel.algo.full_name: kernel.namespaces for kernel in kernels(compiled)}
    assert {name for name, names in spaces.items() if "gdn" not in names} == set()
    assert set.union(*spaces.values()) == {"gdn", "flashcore", "ptx"}


@pytest.mark.parametrize("name", ["Gdn", "gdn_decode", "g", "gdn-", "5gdn"])
def test_a_name_is_the_hubs(name):
    with pytest.raises(UsageError, match="the Hub does not take this name"):
        hub.files(kernels(["gdn_decode/cpp-v1"]), name, None)


def test_a_folder_of_others_is_left_alone(tmp_path, gdn):
    (tmp_path / "notes.txt").write_text("mine")
    args = ("pack", "--algo", "gdn_decode/cpp-v1", "--for", "hub", "-o", tmp_path)
    done = gdn(*args)
    assert done.code == 2 and "has other files\n  -o names another folder" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "notes.txt").unlink()
    assert gdn(*args).code == 0
    (tmp_path / "CARD.md").write_text("mine")
    assert gdn(*args).code == 0  # its own folder, again
    assert (tmp_path / "CARD.md").read_text().startswith("---\nlibrary_name: kernels\n")


def test_without_the_package_nothing_is_proved(tmp_path):
    folder = written(tmp_path, ["gdn_decode/cpp-v1"])
    bare = inventory.Machine(has_package=lambda module: module != "kernels")
    packed = kernels(["gdn_decode/cpp-v1"])
    *_, last = prove_hub.prove(folder, packed, registry.load(), 60, bare)
    assert (last["step"], last["state"]) == ("build", "skipped")
    assert last["detail"].startswith("package kernels is not installed: pip install ")


def test_another_import_is_seen(tmp_path):
    folder = written(tmp_path, ["gdn_decode/cpp-v1"])
    file = folder / "tvm-ffi-ext/gdn/layers/__init__.py"
    file.write_text("import numpy\n" + file.read_text())
    steps = list(prove_hub.prove(folder, [], registry.load(), 60))
    detail = "__init__.py imports numpy"
    assert steps == [{"step": "imports", "state": "failed", "detail": detail}]


# --- by the Hub's own package


def needs_kernels():
    pytest.importorskip(
        "kernels", reason="pip install 'gdn[hub]' for the Hub's package"
    )


def test_the_hub_reads_what_is_packed(tmp_path):
    needs_kernels()
    from kernels._rust import Backend, Build

    build = Build.open(written(tmp_path, SERVING))
    assert build.general.backends == [Backend.CPU, Backend.CUDA]


@pytest.mark.slow  # a build and a check in a process of its own
@pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here")
def test_a_folder_is_proved_by_what_the_hub_loads(tmp_path, gdn):
    needs_kernels()
    folder = tmp_path / "packed"
    args = ("--algo", "gdn_decode_packed/cpp-v1", "--for", "hub", "-o", folder)
    done = gdn("pack", *args, "--author", "me", "--prove", "--json")
    proof = done.json["proof"]
    wrong = [step for step in proof if step["state"] != "ok"]
    assert (wrong, done.code) == ([], 0)
    assert [step["step"] for step in proof] == [
        "imports",
        *(
            f"cpu: {x}"
            for x in ("build.toml", "build", "metadata", "variant", "benchmark")
        ),
        *["run"] * 3,
    ]
    assert proof[2]["detail"].startswith("tvm-ffi01-cpu-")
    assert proof[-1]["detail"].startswith("B=4 on cpu: right, relative error output ")
