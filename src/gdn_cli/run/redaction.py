"""Which environment variables a worker gets, and which values are removed from its output."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .. import bounded

# Variables for building and running kernels. The rest of the user's environment is not passed on.
_ALLOWED = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP TERM COLUMNS
    PYTHONPATH PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONNOUSERSITE
    PYTHONIOENCODING PYTHONUTF8 VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD
    LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH
    CC CXX CFLAGS CXXFLAGS CPPFLAGS LDFLAGS MAX_JOBS SYSTEMROOT SYSTEMDRIVE COMSPEC PATHEXT
    """.split()
)
_PREFIXES = (
    "LC_ XDG_ GDN_ FIB_ CUDA CUBLAS CUDNN CUPTI NVIDIA_ NVCC NSYS_ NCU_ NV_ TRITON_ TORCH"
    " PYTORCH_ AOTI TVM_ FLASHINFER_ FLASH_ FLA_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ BLIS_ NUMEXPR_"
    " ATEN_ SLURM_ LSAN_ ASAN_ TSAN_ UBSAN_"
).split()
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# names of more variables to pass to a worker, separated by commas
PASS = "GDN_PASS_ENV"
# characters: shorter values are words such as "true", which occur everywhere
_LEAST = 6


def allowed(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that algos see: an allow-list, without variables named
    like secrets.

    A user's `GDN_PASS_ENV=NAME,NAME` adds variables by name; one named like a secret is
    still left out.
    """
    extra = {name.strip() for name in env.get(PASS, "").split(",")}
    return {
        name: value
        for name, value in env.items()
        if (name in _ALLOWED or name in extra or name.startswith(tuple(_PREFIXES)))
        and not _SECRET.search(name)
    }


def values(env: Mapping[str, str] | None = None) -> list[str]:
    """The values of an environment's variables (default: this process's) that are named
    like secrets; longest first, since one may contain another.
    """
    env = os.environ if env is None else env
    secrets = {
        value
        for name, value in env.items()
        if _SECRET.search(name) and len(value) >= _LEAST
    }
    return sorted(secrets, key=len, reverse=True)


def masked(content: Any, secrets: Iterable[str]) -> Any:
    """JSON, or a text, with each of these values replaced by "***"."""
    secrets = list(secrets)
    if not secrets:
        return content

    def hidden(text: str) -> str:
        for value in secrets:
            text = text.replace(value, "***")
        return text

    return bounded.mapped(content, hidden, lambda key: hidden(str(key)))
