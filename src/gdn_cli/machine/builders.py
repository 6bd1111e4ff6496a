"""Environment variables for the builders of kernels: the compilers on this machine, and
caches in gdn's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping

from .. import paths
from . import inventory


def with_builders(
    env: Mapping[str, str],
    mode: str,
    gpu: inventory.Gpu | None = None,
    machine: inventory.Machine = inventory.HERE,
) -> dict[str, str]:
    """An environment in which flashinfer-bench's builders work. `gpu` is the only
    visible GPU; None: CUDA's choice.
    """
    env = dict(env)
    # ninja and other tools are next to the interpreter of a virtual environment that
    # may not be activated
    env["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), env.get("PATH", "")]
    )
    if home := machine.cuda_home():
        env["CUDA_HOME"] = str(home)
    gpus = ((gpu,) if gpu else machine.gpus()) if mode == "cuda" else ()
    # the one that is locked, whatever CUDA's order is
    if gpu and gpus or len(gpus) > 1:
        env["CUDA_VISIBLE_DEVICES"] = gpus[0].uuid
    # flashinfer-bench's cache key has neither the GPU nor the Python that a build was
    # made for, nor this list
    target = gpus[0].capability if gpus else "cpu"
    if asked := env.get(inventory.ARCHITECTURES):
        target += f"-for-{re.sub(r'[^0-9A-Za-z.+]+', '_', asked)}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    env.setdefault("FIB_CACHE_PATH", str(paths.builds_dir() / f"{python}-{target}"))
    # otherwise in the temporary folder
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(paths.builds_dir() / "inductor"))
    return env


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables in this process's environment while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
