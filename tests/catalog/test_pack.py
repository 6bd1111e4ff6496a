"""solution.json: its contents, refusals, foreign files, and the proof that it works alone."""

from __future__ import annotations

import json
import os

import helpers
import pytest

from gdn_cli.catalog import pack, registry
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory
from gdn_cli.run import prove
from gdn_cli.worker.executor import signature

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
SHIPPED = [pytest.param(a, id=a.full_name) for a in REGISTRY.algos]


# --- packing


@pytest.mark.parametrize("algo", SHIPPED)
def test_every_shipped_algo_packs_and_comes_back(algo, tmp_path):
    from flashinfer_bench.data import Definition, Solution

    op = REGISTRY.ops[algo.op]
    solution = pack.pack(algo, op)
    spec = solution["spec"]
    assert solution["name"] == f"{algo.op}-{algo.name}"
    assert solution["definition"] == op.definition
    assert (spec["binding"] == "tvm-ffi") is (algo.language in ("cpp", "cuda"))
    assert set() < set(spec["target_hardware"]) <= {"cuda", "cpu"}
    own = [p for p in algo.folder.iterdir() if p.is_file()]
    files = [p for p in own if p.name not in pack.STAY_BEHIND] + list(algo.shares)
    contents = {s["path"]: s["content"] for s in solution["sources"]}
    assert contents == {p.name: p.read_text() for p in files}

    parsed = Solution.model_validate(solution)  # flashinfer-bench's own word
    assert parsed.get_entry_symbol() == "run"
    Definition.model_validate(pack.definition(op, REGISTRY))

    file = tmp_path / "solution.json"
    file.write_text(json.dumps(solution, indent=2))
    back = pack.read_solution(file, REGISTRY)
    assert (back.op, back.name, back.language, back.entry_point, back.destination_passing) == (
        algo.op, solution["name"], algo.language, algo.entry_point, algo.destination_passing
    )  # fmt: skip
    assert set(back.modes) - {"interpreter"} == set(algo.modes) - {"interpreter"}
    assert pack.source_hash(pack.pack(back, op)) == pack.source_hash(solution)


def test_a_definition_says_what_flashinfer_bench_needs():
    d = pack.definition(DECODE, REGISTRY)
    assert d["axes"]["batch_size"] == {"type": "var"}
    assert d["axes"]["head_size"] == {"type": "const", "value": 128}
    assert d["inputs"]["scale"] == {"shape": None, "dtype": "float32"}
    shape = ["batch_size", "num_v_heads", "head_size", "head_size"]
    assert d["inputs"]["state"]["shape"] == shape
    assert d["reference"] == helpers.RIGHT


def test_the_definitions_reference_is_always_ours(tmp_path, write_algo):
    """A folder of the user's own may hide our rungs, and not what results are judged by."""
    write_algo(
        tmp_path, "pt-reference", f"def run({helpers.DECODE_ARGS}):\n    return None\n"
    )
    mine = registry.load(str(tmp_path))
    assert mine.find("pt-reference").folder.is_relative_to(tmp_path)
    assert pack.definition(DECODE, mine)["reference"] == helpers.RIGHT


def test_the_source_hash_follows_what_decides_the_build(tmp_path, write_algo):
    def hash_of(name, source="def run(): ...", **keys):
        write_algo(tmp_path, name, source, **keys)
        return pack.source_hash(
            pack.pack(registry.load(str(tmp_path)).find(name), DECODE)
        )

    first = hash_of("a")
    assert hash_of("b", summary="another summary") == first
    assert hash_of("c", "def run(): ... ") != first
    assert hash_of("d", {"main.py": "def run(): ...", "x.py": "#"}) != first
    assert hash_of("e", destination_passing=True) != first
    assert (
        hash_of("f", {"nain.py": "def run(): ..."}, entry_point="nain.py::run") != first
    )


RUN = "def run(): ...\n"
REFUSED = {
    "an-empty-file": (
        {"main.py": RUN, "x.py": " \n"},
        "x.py: flashinfer-bench refuses",
    ),
    "a-suffix": ({"main.py": RUN, "t.json": "{}"}, "t.json: flashinfer-bench drops"),
    "no-suffix": (
        {"main.py": RUN, "Makefile": "all:"},
        "Makefile: flashinfer-bench drops",
    ),
    "not-utf8": ({"main.py": RUN, "k.cu": b"// \xe9"}, "k.cu: not UTF-8 text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_solutions_that_flashinfer_bench_cannot_take_are_refused(
    name, tmp_path, write_algo
):
    sources, says = REFUSED[name]
    folder = write_algo(tmp_path, name, sources)
    with pytest.raises(UsageError) as e:
        pack.pack(registry.load(str(tmp_path)).find(name), DECODE)
    assert e.value.code == 2 and str(e.value).startswith(f"{folder}/{says}")


def test_a_subfolder_is_refused_but_ignored_files_are_not(tmp_path, write_algo):
    folder = write_algo(
        tmp_path,
        "sub",
        {"main.py": "from .helper import x\n" + RUN, "helper.py": "x = 1\n"},
    )
    for name in ("README.md", ".hidden"):
        (folder / name).write_text("")
    (folder / "__pycache__").mkdir()
    algo = registry.load(str(tmp_path)).find("sub")
    assert [s["path"] for s in pack.pack(algo, DECODE)["sources"]] == [
        "helper.py",
        "main.py",
    ]
    (folder / "csrc").mkdir()
    with pytest.raises(
        UsageError,
        match=f"{folder}/csrc: flashinfer-bench drops subfolders.*; move it out",
    ):
        pack.pack(algo, DECODE)


def test_gdn_pack_writes_solution_json(tmp_path, gdn):
    done = gdn("pack", "--algo", "cuda-v4", cwd=tmp_path)
    assert done.code == 0 and done.out.startswith(
        "solution.json: gdn_decode-cuda-v4 for gdn_decode_qk4_v8_d128_k_last"
    )
    packed = pack.pack(REGISTRY.find("cuda-v4"), DECODE)
    assert json.loads((tmp_path / "solution.json").read_text()) == packed
    done = gdn("pack", "gdn_prefill_packed/cuda-chunk-packed", cwd=tmp_path)
    count = len(json.loads((tmp_path / "solution.json").read_text())["sources"])
    assert done.out.endswith(f"_d128_k_last, {count} files\n") and count > 40
    done = gdn(
        "pack", "--op", "gdn_prefill", "--out", "deep/x.json", "--name", "my-entry", "--author", "us", "--json",
        cwd=tmp_path, env={"ALGO": "pt-chunk"},
    )  # fmt: skip
    assert done.json == {
        "file": "deep/x.json", "name": "my-entry", "definition": "gdn_prefill_qk4_v8_d128_k_last",
        "source_hash": pack.source_hash(pack.pack(REGISTRY.find("pt-chunk"), REGISTRY.ops["gdn_prefill"])),
        "sources": ["main.py"], "algos": ["gdn_prefill/pt-chunk"], "proof": None,
    }  # fmt: skip
    written = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert (written["name"], written["author"]) == ("my-entry", "us")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "pack takes one algo"),
        (("--algo", "cuda-v4", "--out", "file/x.json"), "cannot write file/x.json"),
        (("--algo", "cuda-v55"), "unknown algo 'cuda-v55'"),
    ],
)
def test_gdn_pack_used_wrongly(args, says, tmp_path, gdn):
    (tmp_path / "file").write_text("not a folder")
    done = gdn("pack", *args, cwd=tmp_path)
    assert done.code == 2 and says in done.err and "Traceback" not in done.err


# --- a foreign file


def foreign(**changes) -> dict:
    """A packed file that is right, but for `changes`: dotted keys, None leaves a key out."""
    solution = {
        "name": "theirs",
        "definition": DECODE.definition,
        "author": "them",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
        },
        "sources": [{"path": "main.py", "content": RUN}],
    }
    for key, value in changes.items():
        table = solution
        *path, last = key.split("__")
        for part in path:
            table = table[part]
        if value is None:
            del table[last]
        else:
            table[last] = value
    return json.loads(json.dumps(solution))


def test_a_foreign_file_with_defaults(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(foreign()))
    algo = pack.read_solution(file, REGISTRY)
    assert algo.destination_passing is True  # flashinfer-bench's default
    assert algo.modes == ("cuda",) and algo.op == "gdn_decode" and algo.name == "theirs"
    assert len(pack.source_hash(algo.solution)) == 12


@pytest.mark.parametrize(
    ("language", "hardware", "modes"),
    [
        ("python", ["cpu"], ("cpu",)),
        ("python", ["cuda", "cpu"], ("cuda", "cpu")),
        ("python", ["NVIDIA_B200"], ("cuda",)),
        ("triton", ["cuda"], ("cuda", "interpreter")),
        ("cuda", ["LOCAL", "cpu"], ("cuda",)),
        ("cpp", ["cuda"], ("cpu",)),
    ],
)
def test_where_a_foreign_file_may_run(language, hardware, modes, tmp_path):
    file = tmp_path / "x.json"
    file.write_text(
        json.dumps(foreign(spec__language=language, spec__target_hardware=hardware))
    )
    assert pack.read_solution(file, REGISTRY).modes == modes


def source(path: str) -> list[dict]:
    return [{"path": "main.py", "content": RUN}, {"path": path, "content": "#"}]


OUTSIDE = "would be written outside its folder; refused"
BAD_FILES = {
    "not JSON": ("{", "not valid JSON"),
    "a list": ("[]", "Expected `object`"),
    "no name": (foreign(name=None), "required field `name`"),
    "unknown language": (
        foreign(spec__language="rust"),
        "'rust' - at `$.spec.language`",
    ),
    "no sources": (foreign(sources=[]), "length >= 1 - at `$.sources`"),
    "no file": (foreign(spec__entry_point="k.py::run"), "$.spec.entry_point: expected"),
    "no symbol": (foreign(spec__entry_point="main.py"), "$.spec.entry_point: expected"),
    "twice the same": (foreign(sources=source("main.py")), "files of different names"),
    "definition": (foreign(definition="moe_fp8"), "'moe_fp8' is not one of gdn's ops"),
    "up": (foreign(sources=source("../x.py")), OUTSIDE),
    "up later": (foreign(sources=source("a/../../x.py")), OUTSIDE),
    "absolute": (foreign(sources=source("/tmp/x.py")), OUTSIDE),
    "windows up": (foreign(sources=source("..\\x.py")), OUTSIDE),
    "windows drive": (foreign(sources=source("C:\\x.py")), OUTSIDE),
    "windows drive, relative": (foreign(sources=source("C:x.py")), OUTSIDE),
    "windows root": (foreign(sources=source("\\x.py")), OUTSIDE),
    "windows share": (foreign(sources=source("\\\\host\\share\\x.py")), OUTSIDE),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_foreign_file_that_is_wrong(what, tmp_path):
    content, says = BAD_FILES[what]
    file = tmp_path / "solution.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError) as e:
        pack.read_solution(file, REGISTRY)
    text = str(e.value)
    assert e.value.code == 2 and text.startswith(f"{file}: ") and says in text
    assert "\n" not in text


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(UsageError, match="none.json: cannot be read: No such file"):
        pack.read_solution(tmp_path / "none.json", REGISTRY)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UsageError, match="x.json: not UTF-8 text"):
        pack.read_solution(tmp_path / "x.json", REGISTRY)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        pack.read_solution(tmp_path, REGISTRY)


def test_a_file_that_would_write_outside_writes_nothing(tmp_path, gdn):
    file = tmp_path / "in" / "solution.json"
    file.parent.mkdir()
    file.write_text(
        json.dumps(
            foreign(sources=source("../escaped.py"), spec__target_hardware=["cpu"])
        )
    )
    home = tmp_path / "home"
    for command in ("run", "bench"):
        done = gdn(
            command,
            file,
            "-w",
            "0",
            env={"GDN_HOME": str(home), "FIB_CACHE_PATH": str(home / "built")},
        )
        assert done.code == 2 and "refused" in done.err and done.out == ""
    assert not home.exists()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["in", "solution.json"]


# --- the proof


def proof_of(gdn, tmp_path, *args) -> tuple[int, dict[str, dict]]:
    done = gdn("pack", "--prove", "--json", "--out", tmp_path / "solution.json", *args)
    return done.code, {step["step"]: step for step in done.json["proof"]}


def states(steps: dict[str, dict]) -> dict[str, str]:
    return {name: step["state"] for name, step in steps.items()}


def test_python_is_proved_by_a_run(tmp_path, gdn):
    code, steps = proof_of(gdn, tmp_path, "--algo", "gdn_decode/pt-reference")
    assert states(steps) == {
        "read": "ok",
        "imports": "ok",
        "build": "ok",
        "signature": "ok",
        "run": "ok",
    }
    assert code == 0
    assert steps["imports"]["detail"] == "needs torch"
    assert (
        steps["signature"]["detail"]
        == "9 arguments, value returning, as the definition has them"
    )
    assert steps["run"]["detail"].startswith(
        "B=1 on cpu: right, relative error output "
    )


CPP = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
using T = tvm::ffi::TensorView;
void Run(T q, T k, T v, T state, T A_log, T a, T dt_bias, T b, double scale, T output, T new_state) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run)
"""


@pytest.mark.skipif(not inventory.cxx(), reason="no C++ compiler here")
@pytest.mark.slow
def test_cpp_is_compiled_and_a_wrong_style_is_seen(tmp_path, gdn, write_algo):
    """Takes 11 arguments; said to return its results, it would be handed 9."""
    write_algo(
        tmp_path / "algos",
        "cpp-x",
        {"k.cpp": CPP},
        language="cpp",
        entry_point="k.cpp::run",
    )
    code, steps = proof_of(
        gdn, tmp_path, "--algo", "cpp-x", "--algos", tmp_path / "algos"
    )
    assert code == 1 and states(steps) == {
        "read": "ok",
        "imports": "ok",
        "build": "ok",
        "signature": "failed",
    }
    assert steps["signature"]["detail"].startswith(
        "takes 11 arguments, value returning passes 9 (q, k, v, state, "
    )
    assert steps["signature"]["detail"].endswith(
        "; set destination_passing the other way?"
    )


@pytest.mark.slow
@pytest.mark.skipif(inventory.cuda_home() is None, reason="no nvcc here")
def test_cuda_is_compiled_for_both_architectures_without_a_gpu(tmp_path, gdn):
    code, steps = proof_of(gdn, tmp_path, "--algo", "cuda-v4")
    assert states(steps) == {
        "read": "ok",
        "imports": "ok",
        "build": "ok",
        "signature": "ok",
        "run": "skipped",
    }
    assert code == 0
    assert steps["build"]["detail"].startswith(
        "by flashinfer-bench for 9.0a, 10.0a, in "
    )
    assert (
        steps["signature"]["detail"]
        == "11 arguments, destination passing, as the definition has them"
    )
    assert steps["run"]["detail"].startswith("no GPU here; `gdn list`")


def test_an_undeclared_import_fails_before_anything_is_built(tmp_path, write_algo, gdn):
    source = (
        "import json, torch, sklearn.svm\nfrom numpy import array\n\ndef run():\n    import"
        " scipy\n"
    )
    write_algo(
        tmp_path / "algos", "imports", source, extra='[packages]\nscipy = "scipy"'
    )
    code, steps = proof_of(
        gdn, tmp_path, "--algo", "imports", "--algos", tmp_path / "algos"
    )
    assert code == 1 and states(steps) == {"read": "ok", "imports": "failed"}
    assert steps["imports"]["detail"].startswith(
        "sklearn: imported, but not in [packages] of algo.toml"
    )


def test_a_package_that_is_not_here_skips_the_build(tmp_path, write_algo):
    write_algo(
        tmp_path,
        "needs",
        "import no_such_thing\n" + RUN,
        extra='[packages]\nno_such_thing = "no-such-wheel"',
    )
    known = registry.load(str(tmp_path))
    file = tmp_path / "solution.json"
    file.write_text(json.dumps(pack.pack(known.find("needs"), DECODE)))
    *_, last = prove.prove(file, {"no_such_thing": "no-such-wheel"}, known, 60)
    assert last == {
        "step": "build", "state": "skipped",
        "detail": "package no-such-wheel is not installed: pip install no-such-wheel",
    }  # fmt: skip


INPUTS = list(DECODE.inputs)
WHOLE = INPUTS + list(DECODE.outputs)


@pytest.mark.parametrize(
    ("parameters", "passing", "state", "says"),
    [
        (WHOLE, True, "ok", "11 arguments, destination passing, as the definition has"),
        (
            INPUTS,
            False,
            "ok",
            "9 arguments, value returning, as the definition has them",
        ),
        (
            WHOLE,
            False,
            "failed",
            "takes 11 arguments, value returning passes 9 (q, k, v",
        ),
        (INPUTS, True, "failed", "takes 9 arguments, destination passing passes 11 ("),
        (INPUTS[:-1], False, "failed", "takes 8 arguments, value returning passes 9 ("),
        (
            ["k", "q", *INPUTS[2:]],
            False,
            "failed",
            "order (k, q, v, state, A_log, a, dt",
        ),
        (
            [*INPUTS, "new_state", "output"],
            True,
            "failed",
            "order (q, k, v, state, A_log",
        ),
        # names of their own: nothing to compare
        (list("abcdefghi"), False, "ok", "9 arguments"),
        (["*everything"], False, "skipped", "the entry point does not say which param"),
    ],
)
def test_signatures(parameters, passing, state, says):
    scope = {}
    exec(f"def run({', '.join(parameters)}): raise AssertionError('called')", scope)
    solution = {"spec": {"destination_passing_style": passing}}
    found = signature.match(scope["run"], pack.definition(DECODE, REGISTRY), solution)
    assert found["state"] == state and found["detail"].startswith(says)
    flipped = len(parameters) == (9 if passing else 11)
    assert found["detail"].endswith("the other way?") is flipped


# --- what pack writes, run reads


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[2J", "\u202e", "a\udcff", "x" * 201])
@pytest.mark.parametrize("option", ["name", "author"])
def test_a_name_that_run_would_refuse_is_refused(option, text):
    with pytest.raises(UsageError) as e:
        pack.pack(REGISTRY.find("pt-reference"), DECODE, **{option: text})
    wanted = f"gdn_decode/pt-reference: $.{option}: expected printable text of at most 200 characters"
    assert e.value.message.startswith(wanted) and e.value.message.isprintable()


@pytest.mark.parametrize("name", [b"b\xff.py", b"b\n.py", b"b\x1b.py"])
def test_a_source_with_such_a_name_leaves_the_older_file(
    name, gdn, write_algo, tmp_path
):
    folder = write_algo(tmp_path / "algos", "odd", "def run(): ...\n")
    arguments = ["pack", "--algo", "odd", "--algos", tmp_path / "algos"]
    assert gdn(*arguments, cwd=tmp_path).code == 0
    before = (tmp_path / "solution.json").read_bytes()
    (folder / os.fsdecode(name)).write_text("x = 1\n")
    done = gdn(*arguments, cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (
        2,
        1,
    ) and "is not a valid file name" in done.err
    assert (tmp_path / "solution.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "algos",
        "solution.json",
    ]
