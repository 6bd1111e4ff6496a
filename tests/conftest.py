"""Fixtures: gdn's folders inside pytest's own, throw-away algos, `gdn` as a process; no
GPU, no GPU tests.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import helpers
import pytest

from gdn_cli.machine import inventory

# Before anything imports torch, here and in the processes below: a thread a process, as
# there is a test for every core. torch.compile would start processes that import torch
# once more.
for _name in (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
):
    os.environ.setdefault(_name, "1")

# a tenth of the time in which the test files and torch are imported
gc.disable()


def pytest_collection_finish():
    gc.freeze()  # never collected, so that nobody looks through it again
    gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--calls",
        type=int,
        default=20,
        help="calls of each launch path in test_gpu_stress.py",
    )
    parser.addoption(
        "--write-screens",
        action="store_true",
        help="write tests/screens/*.txt anew, to be read as a diff",
    )


def pytest_configure(config):
    pytest.register_assert_rewrite("screens")  # a failure shows the lines that differ
    import screens

    screens.write = config.getoption("--write-screens")


@pytest.fixture(scope="session")
def calls(request) -> int:
    return request.config.getoption("--calls")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """GDN_HOME for the whole session, in this process too: records and builds stay out
    of the user's folders.

    It is shared, so that a C++ algo is compiled once.
    """
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ALGO", "COLUMNS", "GDN_ALGOS", "FIB_DATASET_PATH"):
            patch.delenv(name, raising=False)
        patch.setenv("GDN_HOME", str(folder))
        if inventory.cxx():
            patch.setenv("GDN_TESTS_CXX", os.environ.get("CXX") or "c++")
            patch.setenv("CXX", str(helpers.TESTS / "cxx"))
        # compilers take long: one build for all processes
        if "PYTEST_XDIST_WORKER" in os.environ:
            builds = tmp_path_factory.getbasetemp().parent / "builds"
            builds.mkdir(mode=0o700, exist_ok=True)
            (folder / "builds").symlink_to(builds)
        # on a GPU no other bench may be disturbed; on a CPU two runs of the tests may
        # overlap
        if not inventory.gpus():
            patch.setenv("GDN_LOCK_DIR", str(folder))
        patch.setenv("FIB_CACHE_PATH", str(folder / "builds" / "tests"))
        yield folder


@pytest.fixture(scope="session")
def interpreter(home):
    """interpreter(function, *args): the function's result in a process that imported
    triton with TRITON_INTERPRET set. One process serves all tests, because it takes
    seconds to start; arguments and results are pickled.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def call(function, *args):
            with mock.patch.dict(
                os.environ, helpers.environment(TRITON_INTERPRET="1"), clear=True
            ):
                return pool.submit(function, *args).result(timeout=helpers.PATIENCE_S)

        yield call


@pytest.fixture(scope="session")
def gdn():
    """gdn("list", "--json") -> Done(code, out, err, json)."""
    return helpers.gdn


@pytest.fixture(scope="session")
def write_algo():
    """write_algo(folder, name, sources, **keys of algo.toml) -> the algo's folder."""
    return helpers.write_algo


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    _sample(items)
    # A file is one process's work, and long files take long: were these last, one process
    # would work and the others wait. Some are short, and their commands take long.
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}
    first = {item.path for item in items if item.get_closest_marker("first")}
    items.sort(key=lambda item: (item.path not in first, -sizes[item.path]))
    if not importlib.util.find_spec("torch"):  # .ci/other_pythons.py
        _skip(items, "torch", "torch is not installed")
        return
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            reason = f"no CUDA device that torch {torch.__version__} can use"
            _skip(items, "gpu", reason)


def _sample(items):
    """Of the cases of a test that is marked sampled(n) each n-th stays quick."""
    numbers: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if numbers[test] % mark.args[0]:
                item.add_marker("slow")
            numbers[test] += 1


def _skip(items, mark, reason):
    for item in items:
        if item.get_closest_marker(mark):
            item.add_marker(pytest.mark.skip(reason=reason))
