"""What a compiler and a crash say, in terms of the user's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gdn_cli.catalog import registry
from gdn_cli.run import own_files
from gdn_cli.schema.record_types import Record, Status

COPY = "/home/me/builds/py311-cpu/tvm_ffi/tvm_ffi_gdn_decode_mine_aef942"
RECORD = Record(
    op="gdn_decode", algo="cpp-v1", source_hash=None, mode="cpu", tier=None, workload=None,
    status=Status.BUILD_FAILED, reason=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def algo() -> registry.Algo:
    return next(a for a in registry.load().algos if a.name == "cpp-v1")


def test_a_compilers_errors_name_the_file_that_the_user_edits(algo, monkeypatch):
    monkeypatch.chdir(Path(algo.folder).parent)
    lines = [
        "kernel.cpp:114:10: error: no",
        "kernel.cpp(7): error: no",
        "else.h:1: error: no",
    ]
    reason = "\n".join(f"{COPY}/{line}" for line in lines)
    pointed = own_files.pointed(replace(RECORD, reason=reason), algo)
    assert pointed.reason.splitlines() == [
        f"cpp-v1/{lines[0]}", "cpp-v1/kernel.cpp:7: error: no", lines[2],
    ]  # fmt: skip


def test_an_exceptions_trace_too_and_other_paths_stay(algo, monkeypatch):
    monkeypatch.chdir("/")
    own, other = (
        f'  File "{COPY}/pool.h", line 3, in run',
        '  File "/usr/lib/x.py", line 1',
    )
    trace = own_files.pointed(replace(RECORD, trace=[own, other]), algo).trace
    assert trace[0].endswith('_cuda/cpu/pool.h", line 3, in run')
    assert COPY not in trace[0] and trace[1] == other


def test_a_packed_files_sources_have_names_alone(algo):
    packed = replace(algo, folder=None)
    found = own_files.pointed(
        replace(RECORD, tail=[f"{COPY}/kernel.cpp:1: assertion failed"]), packed
    )
    assert found.tail == ["kernel.cpp:1: assertion failed"]
