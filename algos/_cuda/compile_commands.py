"""compile_commands.json for editors: `make compile_commands.json`. A packed algo is one flat folder, where each header finds
the others; here they are in several folders, and clangd and similar tools need to know which."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gdn_cli.machine import inventory
from tvm_ffi import libinfo

ALGOS = Path(__file__).resolve().parents[1]


def main() -> None:
    cuda = inventory.HERE.cuda_home()
    rooms = sorted(path for path in (ALGOS / "_cuda").iterdir() if path.is_dir())
    tables = [ALGOS / "gdn_prefill" / name for name in ("cuda-recurrent", "cuda-chunk")]
    tables.append(ALGOS / "gdn_mtp" / "cuda-v1")
    folders = [*tables, *rooms, *map(Path, libinfo.include_paths())]
    common = ["clang++", "-std=c++17", *(f"-I{folder}" for folder in folders)]
    as_cuda = ["-xcuda", "--cuda-gpu-arch=sm_90a", *([f"--cuda-path={cuda}"] if cuda else []), "-nocudalib"]
    commands = [
        {"directory": str(path.parent), "file": str(path), "arguments": [*common, *_language(path, as_cuda), str(path)]}
        for path in sorted(ALGOS.rglob("*"))
        if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    ]
    json.dump(commands, sys.stdout, indent=1)


def _language(path: Path, as_cuda: list[str]) -> list[str]:
    return as_cuda if path.suffix in (".cu", ".cuh") else ["-xc++"]


if __name__ == "__main__":
    main()
