"""Builds one variant of a folder that `gdn pack --for hub` wrote, and looks at both with the Hub's
own package, `kernels`:

    python -m gdn_cli.worker.hub FOLDER cpu|cuda OUT

It writes OUT/build/<variant>, as kernel-builder does, and prints a line of JSON for each step:
{"step", "state", "detail"}. The last is the first that failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import one_line
from ..machine import inventory, toolchain
from ..parsing import read_toml

Step = dict[str, str]
# what kernel-builder writes for `_ops.py`, as far as the packed Python uses it
_OPS = """from pathlib import Path

import tvm_ffi

ops = tvm_ffi.load_module(str(Path(__file__).parent / "{name}.so"))


def torch_add_op_namespace_prefix(op_name):
    return f"{name}::{{op_name}}"
"""
_ERROR = re.compile(r"error\s*:|multiple definition|undefined reference")
_CXX, _CUDA = (".cpp", ".cc", ".cxx", ".c"), ".cu"


def main(folder: Path, backend: str, out: Path) -> Iterator[Step]:
    from kernels import _rust as rust
    from kernels import variants

    try:
        declared = rust.Build.open(folder).general.backends
    except ValueError as e:
        yield _step("build.toml", "failed", str(e))
        return
    names = ", ".join(str(b).rpartition(".")[2].lower() for b in declared)
    yield _step("build.toml", "ok", f"edition 5, for {names}")
    variant = variant_of(backend)
    place = out / "build" / variant
    try:
        archs = build(folder, backend, place)
    except Exception as e:  # the compiler's own words
        yield _step("build", "failed", _errors(e))
        return
    target = f" for {' '.join(archs)}" if archs else ""
    yield _step("build", "ok", f"{variant}{target}")

    metadata = rust.Metadata.read_from_file(place / "metadata.json")
    files = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, place)
    metadata.digest.validate(files)
    yield _step("metadata", "ok", f"{metadata.id}, version {metadata.version}")
    parsed = variants.parse_variant(variant)
    try:
        accepted, (decision,) = variants.resolve_variants([parsed], backend)
    except ValueError as e:  # a backend that this machine does not have
        yield _step("variant", "skipped", str(e))
        return
    if not accepted:
        yield _step("variant", "skipped", decision.reason)
        return
    yield _step("variant", "ok", "accepted")
    yield _benchmarked(folder, out)


def variant_of(backend: str) -> str:
    """The Hub's name of what is built here, such as tvm-ffi01-cpu-x86_64-linux."""
    import tvm_ffi

    major, minor, *_ = tvm_ffi.__version__.split(".")
    arch = backend
    if backend == "cuda":
        arch = f"cu{toolchain.cuda_version() or ''}".replace(".", "")
    system = f"{platform.machine()}-{platform.system().lower()}"
    return f"tvm-ffi{major}{minor}-{arch}-{system}"


def build(folder: Path, backend: str, place: Path) -> list[str]:
    """Compile what build.toml lists for the backend, and write the variant's files into `place`.
    Returns the architectures of CUDA."""
    import tvm_ffi.cpp

    toml: Any = read_toml(folder / "build.toml")
    general = toml["general"]
    module = general["name"].replace("-", "_")
    kernels = [k for k in toml["kernel"].values() if k["backend"] == backend]
    listed = {
        arch for kernel in kernels for arch in kernel.get("cuda-capabilities", [])
    }
    archs = sorted(listed, key=_number)
    if archs:
        os.environ.setdefault(inventory.ARCHITECTURES, " ".join(archs))
    work = place.parent.parent / "work"
    work.mkdir(parents=True)
    binding = [folder / source for source in toml["tvm-ffi"]["src"]]
    sources = binding + _wrapped(folder, kernels, work)
    packed = [source for kernel in kernels for source in kernel["src"]]
    hashed = hashlib.sha256()
    for path in (*binding, *(folder / source for source in packed)):
        hashed.update(path.read_bytes())
    name = f"_{module}_{backend}_{hashed.hexdigest()[:7]}"
    library = tvm_ffi.cpp.build(
        name,
        cpp_files=[str(path) for path in sources if path.suffix in _CXX],
        cuda_files=[str(path) for path in sources if path.suffix == _CUDA],
        build_directory=str(work),
    )
    place.mkdir(parents=True)
    os.replace(library, place / f"{name}.so")
    shutil.copytree(folder / "tvm-ffi-ext" / module, place, dirs_exist_ok=True)
    (place / "_ops.py").write_text(_OPS.format(name=name))
    target = {"type": backend} | ({"archs": archs} if archs else {})
    _write_metadata(general, name, target, place)
    return archs


def _wrapped(folder: Path, kernels: list[Any], work: Path) -> list[Path]:
    """Each source with its kernel's flags in it: tvm_ffi's builder has one set for all files."""
    wrapped = []
    for i, kernel in enumerate(kernels):
        defines = "".join(map(_define, kernel["cxx-flags"]))
        for source in kernel["src"]:
            path = (folder / source).resolve()
            if path.suffix in (*_CXX, _CUDA):
                file = work / f"{i}-{path.name}"
                file.write_text(f'{defines}#include "{path}"\n')
                wrapped.append(file)
    return wrapped


def _write_metadata(
    general: dict[str, Any], name: str, backend: dict[str, Any], place: Path
) -> None:
    from kernels import _rust as rust

    digest = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, place)
    metadata = {
        "name": general["name"],
        "id": name,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digest.files},
    }
    (place / "metadata.json").write_text(json.dumps(metadata, indent=2))


def _benchmarked(folder: Path, out: Path) -> Step:
    """The packed benchmarks, once, with their own comparison."""
    from kernels.cli import benchmark

    count = 0
    for script in sorted((folder / "benchmarks").glob("benchmark*.py")):
        try:
            results, _ = benchmark.run_benchmark_script(
                script,
                iterations=1,
                warmup=0,
                cwd=folder,
                repo_id=str(out),
                is_local=True,
                revision="local",
            )
        except Exception as e:
            return _step("benchmark", "failed", f"{script.name}: {one_line(e)}")
        count += len(results)
    return _step("benchmark", "ok", f"{count} workloads agree with the definition")


def _number(arch: str) -> tuple[int, ...]:
    return tuple(int(part.rstrip("a")) for part in arch.split("."))


def _define(flag: str) -> str:
    return f"#define {flag.removeprefix('-D').replace('=', ' ', 1)}\n"


def _errors(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return "; ".join(errors[:3]) or one_line(e)


def _step(step: str, state: str, detail: str) -> Step:
    return {"step": step, "state": state, "detail": detail}


if __name__ == "__main__":
    for line in main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])):
        print(json.dumps(line), flush=True)
