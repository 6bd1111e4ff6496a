from __future__ import annotations

import os

import pytest


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts stand-ins for SLURM's commands on PATH, shell scripts by name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    write(srun="exit 1")
    return write
