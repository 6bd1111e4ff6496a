"""Algos in C++ or CUDA -> the sources of a kernel for the Hugging Face Hub: a folder that
kernel-builder builds (build.toml of edition 5, github.com/huggingface/kernels) and `kernels` loads.
Does not import torch.

All algos of a backend become one library. The sources are packed as they are; each algo's flags
give its namespace and what it exports names of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .. import __version__
from .. import source_hash as hashing
from ..errors import UsageError
from . import workloads
from .formats import Solution
from .ops import Op, TensorSpec
from .pack import source_hash
from .registry import Algo, numbers

TEMPLATES = Path(__file__).parent / "data" / "hub"
# the first line of build.toml: a folder with it may be packed into again
WRITTEN = "# written by `gdn pack --for hub`"
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
# what `kernel-builder` compiles for, if an algo runs there
CAPABILITIES = ("8.0", "9.0", "10.0", "12.0")
_BACKENDS = {"cpp": "cpu", "cuda": "cuda"}
_BRACES = re.compile(r"\bnamespace (\w+)[\w:]*\s*\{|[{}]")
# the name, and the function if it is in no namespace
_EXPORT = re.compile(
    r"^\s*TVM_FFI_DLL_EXPORT_TYPED_FUNC\(\s*(\w+)\s*,\s*(?:(\w+)\s*\))?", re.MULTILINE
)


@dataclass(frozen=True)
class Kernel:
    """One algo of the folder. `reference` is the Python source of its op's reference."""

    op: Op
    algo: Algo
    solution: Solution
    reference: str

    @property
    def backend(self) -> str:
        return _BACKENDS[self.algo.language]

    @property
    def function(self) -> str:
        """Its name in Python."""
        return self.op.family

    @property
    def folder(self) -> str:
        """The folder of its sources, and its section of build.toml."""
        return f"{self.function}_{self.backend}"

    @property
    def files(self) -> dict[str, str]:
        sources = self.solution["sources"]
        return {f"{self.folder}/{s['path']}": s["content"] for s in sources}

    @property
    def namespaces(self) -> set[str]:
        """Those that are in no other."""
        names = set()
        depth = 0
        for match in _BRACES.finditer(self.text):
            if match[1] and depth == 0:
                names.add(match[1])
            depth = max(depth - 1, 0) if match[0] == "}" else depth + 1
        return names - {"tvm", "std"}

    @property
    def text(self) -> str:
        return "\n".join(self.files.values())

    @cached_property
    def defines(self) -> list[str]:
        """NAME=VALUE of what must differ between the kernels of a library."""
        entry = self.algo.entry_point.partition("::")[2]
        spaces = sorted(self.namespaces)
        renamed = {space: f"{self.function}_{space}" for space in spaces}
        for name, loose in _EXPORT.findall(self.text):
            export = self.function if name == entry else f"{self.function}_{name}"
            renamed[f"__tvm_ffi_{name}"] = f"__tvm_ffi_{export}"
            if loose:
                renamed[loose] = f"{self.function}_{loose}"
        return [f"{old}={new}" for old, new in renamed.items()]

    @property
    def capabilities(self) -> list[str]:
        lowest = numbers(self.algo.capability or "0.0")
        able = [name for name in CAPABILITIES if numbers(name) >= lowest]
        if not self.algo.specific:
            return able
        return [f"{name}a" if numbers(name) >= (9, 0) else name for name in able]

    # --- as the templates have it

    @property
    def title(self) -> str:
        """The name of its layer."""
        return "".join(map(str.capitalize, self.function.split("_")))

    @property
    def source_hash(self) -> str:
        return source_hash(self.solution)

    @property
    def provenance(self) -> str:
        return self.algo.provenance["source"]

    @property
    def inputs(self) -> list[str]:
        return list(self.op.inputs)

    @property
    def tensors(self) -> list[str]:
        return [name for name, spec in self.op.inputs.items() if spec.shape]

    @property
    def parameters(self) -> list[str]:
        """The inputs as parameters of a function: scalars at the end may be left out."""
        last = self.inputs.index(self.tensors[-1])
        return [f"{n}=None" if i > last else n for i, n in enumerate(self.inputs)]

    @property
    def written(self) -> list[str]:
        """The outputs that are not an input, for an op that is always in place; else all."""
        overwritten = self.op.in_place if self.op.in_place_only else {}
        return [name for name in self.op.outputs if name not in overwritten]

    @property
    def results(self) -> list[str]:
        """What each output is if none is given, as Python."""
        return [
            _new(self.op, spec) if name in self.written else self.op.in_place[name]
            for name, spec in self.op.outputs.items()
        ]

    @property
    def mutated(self) -> list[str]:
        """What torch's operator writes to."""
        inputs = [self.op.in_place[n] for n in self.op.outputs if n not in self.written]
        return inputs + self.written

    @property
    def schema(self) -> str:
        """The schema of torch's operator: the inputs, then `written`."""
        declared: list[str] = []
        for name, spec in (self.op.inputs | self.op.outputs).items():
            kind = "int?" if "int" in spec.dtype else "float?"
            if spec.shape:
                alias = f"(w{len(declared)}!)" if name in self.mutated else ""
                kind = f"Tensor{alias}"
            if name in self.inputs or name in self.written:
                declared.append(f"{kind} {name}")
        return f"({', '.join(declared)}) -> ()"

    @property
    def passed(self) -> list[str]:
        """The library's arguments, by the names of the operator's."""
        return self.inputs + [
            self.op.in_place.get(n, n) if n not in self.written else n
            for n in self.op.outputs
        ]

    def described(self, specs: dict[str, TensorSpec]) -> list[str]:
        """A line for each input or output."""
        width = max(map(len, specs))
        lines = []
        for name, spec in specs.items():
            axes = f"[{', '.join(spec.axes)}] " if spec.shape else ""
            unset = " or ".join(map(str, spec.unset))
            note = spec.note or (unset and f"{unset}: the default")
            line = f"{name:{width}}  {axes}{spec.dtype}"
            lines.append(f"{line}; {note}" if note else line)
        return lines

    @property
    def sizes(self) -> list[tuple[str, dict[str, int]]]:
        """The benchmark's workloads: (part of a name, axes), the smallest first."""
        twins = sorted(workloads.embedded(self.op), key=lambda w: sum(w.axes.values()))
        chosen = [twins[0], twins[len(twins) // 2]]
        names = [self.op.label.format(**w.axes).lower() for w in chosen]
        slugs = [re.sub(r"\W+", "_", name.replace("=", "")) for name in names]
        return [(slug, w.axes) for slug, w in zip(slugs, chosen, strict=True)]

    @property
    def drawn(self) -> dict[str, str]:
        """Python that draws each input, of names of axes: values like those of `gdn run`."""
        return {name: _drawn(self.op, name) for name in self.op.inputs}


def files(kernels: Sequence[Kernel], name: str, owner: str | None) -> dict[str, str]:
    """The folder's files: path -> content. `owner` is the Hub's user or organisation. UsageError
    for what the format does not take."""
    if not NAME.fullmatch(name):
        hint = "lower-case letters, digits and dashes, such as gdn-decode"
        raise UsageError(f"--name {name}: the Hub does not take this name", hint=hint)
    for kernel in kernels:
        _check(kernel)
    backends = sorted({kernel.backend for kernel in kernels})
    by_function = {kernel.function: kernel for kernel in kernels}
    for backend in backends:
        members = [kernel for kernel in kernels if kernel.backend == backend]
        _check_backend(backend, members, by_function)
    licences = {kernel.algo.provenance["license"] for kernel in kernels}
    if len(licences) > 1:
        hint = "pack them apart"
        raise UsageError(f"several licences: {', '.join(sorted(licences))}", hint=hint)
    module = name.replace("-", "_")
    shared: dict[str, object] = {
        "name": name,
        "owner": owner,
        "licence": licences.pop(),
        "kernels": kernels,
        "functions": list(by_function.values()),
        "backends": backends,
        "module": module,
        "version": __version__,
        "written": WRITTEN,
    }
    extension = f"tvm-ffi-ext/{module}"
    rendered = {
        "build.toml": "build.toml",
        "CARD.md": "CARD.md",
        "flake.nix": "flake.nix",
        ".gitignore": "gitignore",
        "tvm-ffi-ext/tvm_ffi_binding.cpp": "binding.cpp",
        f"{extension}/__init__.py": "init.py",
        f"{extension}/layers/__init__.py": "layers.py",
    }
    texts = {path: _render(file, shared) for path, file in rendered.items()}
    for function, kernel in by_function.items():
        text = _render("benchmark.py", shared | {"kernel": kernel})
        texts[f"benchmarks/benchmark_{function}.py"] = text
    for kernel in kernels:
        texts |= kernel.files
    return texts


def digest(texts: dict[str, str]) -> str:
    """12 hex digits over all files."""
    parts = [part for path in sorted(texts) for part in (path, texts[path])]
    return hashing.digest(parts)


def _check(kernel: Kernel) -> None:
    algo = kernel.algo
    if algo.language not in _BACKENDS:
        hint = "`gdn pack --for flashinfer` takes it; for the Hub, C++ and CUDA"
        raise UsageError(
            f"{algo.full_name} is in {algo.language}, and is not packed for the Hub",
            hint=hint,
        )
    if not algo.destination_passing:
        hint = "let its function write to tensors that it is given"
        raise UsageError(f"{algo.full_name} returns its results", hint=hint)
    if algo.packages:
        reason = f"{algo.full_name} needs {', '.join(algo.packages.values())}"
        raise UsageError(reason, hint="a Hub kernel has torch and its own files alone")


def _check_backend(
    backend: str, kernels: list[Kernel], functions: dict[str, Kernel]
) -> None:
    """Every function is there for every backend, once, and their namespaces can be told apart."""
    names = [kernel.function for kernel in kernels]
    for function, kernel in functions.items():
        if function not in names:
            hint = f"add one of {kernel.op.family}, or pack the backends apart"
            raise UsageError(f"no algo of {function} for {backend}", hint=hint)
    for name in names:
        if names.count(name) > 1:
            hint = "name one algo of an op for a backend"
            raise UsageError(f"several algos of {name} for {backend}", hint=hint)
    for kernel in kernels:
        if len(kernels) > 1 and not kernel.namespaces:
            reason = f"{kernel.algo.full_name}: its code is in no namespace"
            raise UsageError(reason, hint="put it into one, or pack it alone")


def _new(op: Op, spec: TensorSpec) -> str:
    """A new tensor for an output, as Python: each axis is an input's, or a number."""
    first = next(name for name, other in op.inputs.items() if other.shape)
    sizes = []
    for axis in spec.axes:
        places = [
            f"{name}.shape[{other.axes.index(axis)}]"
            for name, other in op.inputs.items()
            if axis in other.axes
        ]
        sizes.append(places[0] if places else str(op.fixed[axis]))
    return f"{first}.new_empty(({', '.join(sizes)},), dtype=torch.{spec.dtype})"


def _drawn(op: Op, name: str) -> str:
    spec = op.inputs[name]
    if not spec.shape:
        return "None"
    shape = f"[{', '.join(spec.axes)}]"
    normal = f"torch.randn({shape})"
    values = normal
    if name == "cu_seqlens":
        values = "torch.arange(num_seqs + 1) * total_seq_len // num_seqs"
    elif name in op.slots:
        slots = op.outputs[op.slots[name]].axes[0]
        values = f"1 + torch.randperm({slots} - 1)[: math.prod({shape})].view({shape})"
    elif spec.between:
        low, high = spec.between
        values = f"torch.randint({low}, ({high}) + 1, {shape})"
    elif spec.dtype == "bool":
        values = f"torch.arange({spec.axes[0]}) % 4 != 3"
    elif name == "A_log":
        values = f"torch.empty({shape}).uniform_(1, 16).log()"
    elif name == "dt_bias":
        values = f"torch.empty({shape}).uniform_(-6.9, -2.3)"
    elif name in ("q", "k"):
        values = f"torch.nn.functional.normalize({normal}, dim=-1)"
    elif name in op.in_place.values():
        values = f"0.17 * {normal}"
    return f"({values}).to(self.device, torch.{spec.dtype})"


def _render(template: str, values: dict[str, object]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = json.dumps
    return environment.get_template(f"{template}.jinja").render(values)
