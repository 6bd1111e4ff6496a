"""Fixtures: gdn's folders inside pytest's own, throw-away algos, `gdn` as a process; no GPU, no GPU tests."""

from __future__ import annotations

import helpers
import pytest

from gdn_cli import machine


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """GDN_HOME for the whole session, in this process too: records and builds stay out of the user's folders.

    It is shared, so that a C++ algo is compiled once.
    """
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ALGO", "GDN_ALGOS", "FIB_DATASET_PATH"):
            patch.delenv(name, raising=False)
        patch.setenv("GDN_HOME", str(folder))
        if not machine.gpus():  # on a GPU nobody's bench is to be disturbed; two runs of the tests on a CPU may be
            patch.setenv("GDN_LOCK_DIR", str(folder))
        patch.setenv("FIB_CACHE_PATH", str(folder / "builds" / "tests"))
        yield folder


@pytest.fixture(scope="session")
def gdn():
    """gdn("list", "--json") -> Done(code, out, err, json)."""
    return helpers.gdn


@pytest.fixture(scope="session")
def write_algo():
    """write_algo(folder, name, sources, **keys of algo.toml) -> the algo's folder."""
    return helpers.write_algo


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (reason := _no_gpu()):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"no CUDA device that torch {torch.__version__} can use"
