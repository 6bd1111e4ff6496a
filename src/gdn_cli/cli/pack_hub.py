"""`gdn pack --for hub`: write the folder of a kernel for the Hugging Face Hub, and prove it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import errors

if TYPE_CHECKING:
    from ..catalog.hub import Kernel
    from ..catalog.registry import Registry
    from .options import Algos


def pack(
    algos: Algos,
    known: Registry,
    out: Path | None,
    name: str | None,
    owner: str | None,
    prove: bool,
    timeout: float,
    json: bool,
) -> None:
    from ..catalog import hub
    from ..report import screen, terminal
    from ..run import prove_hub
    from ..schema.output import Packed
    from . import options as o

    kernels = _kernels(algos, known)
    functions = list(dict.fromkeys(kernel.function for kernel in kernels))
    alone = functions[0].replace("_", "-")
    name = name or (alone if len(functions) == 1 else "gdn")
    texts = hub.files(kernels, name, owner)
    folder = out or Path(name)
    _write(folder, texts)
    packed = [kernel.algo.full_name for kernel in kernels]
    if not json:
        screen.put(f"{folder}: {name} for the Hub, of {', '.join(packed)}")
    steps: list[dict[str, str]] = []
    if prove:
        steps += prove_hub.prove(folder, kernels, known, timeout, o.machine())
        if not json:
            terminal.show_proof(steps)
    elif not json:
        screen.put(
            "next: --prove; then `kernel-builder build-and-upload` in that folder"
        )
    if json:
        definitions = dict.fromkeys(kernel.op.definition for kernel in kernels)
        screen.show_json(
            Packed(
                str(folder),
                name,
                ", ".join(definitions),
                hub.digest(texts),
                sorted(texts),
                packed,
                steps if prove else None,
            )
        )
    exit_code(steps)


def exit_code(steps: Iterable[Mapping[str, str]]) -> None:
    """End with the code of a proof that failed, or that proved nothing."""
    if any(step["state"] == "failed" for step in steps):
        raise typer.Exit(errors.FAILED)
    builds = [step for step in steps if step["step"].endswith("build")]
    if any(step["state"] == "skipped" for step in builds):
        raise typer.Exit(errors.MISSING)


def _kernels(algos: Algos, known: Registry) -> list[Kernel]:
    from ..catalog import pack as p
    from ..catalog import registry
    from ..catalog.hub import Kernel

    kernels = []
    for name in registry.names(algos.algo):
        algo = known.find(name, algos.op)
        op = known.ops[algo.op]
        reference = p.definition(op, known)["reference"]
        kernels.append(Kernel(op, algo, p.pack(algo, op), reference))
    if not kernels:
        hint = "gdn pack --algo NAME[,NAME...] --for hub; `gdn list` shows all"
        raise errors.UsageError("pack takes at least one algo", hint=hint)
    return kernels


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files. Into a folder with other files only if this command wrote them."""
    from .. import files
    from ..catalog import hub
    from ..parsing import read_text

    marker = folder / "build.toml"
    ours = marker.is_file() and hub.WRITTEN in read_text(marker)
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        hint = "-o names another folder"
        raise errors.UsageError(f"{folder} has other files", hint=hint)
    for path, text in texts.items():
        file = folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            hint = "-o names another folder"
            reason = f"cannot write {file.parent}: {e.strerror}"
            raise errors.MissingError(reason, hint=hint) from None
        files.write(file, text)
