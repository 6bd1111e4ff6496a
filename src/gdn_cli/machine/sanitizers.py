"""`--sanitize`: a C++ compiler's own sanitizer, in an algo's build and in its process."""

from __future__ import annotations

import os
import subprocess

from ..errors import MissingError

# --sanitize's value -> the compiler's flags, its library, the variable of its options
_KINDS = {
    "thread": ("-fsanitize=thread", "libtsan.so", "TSAN_OPTIONS"),
    "address": (
        "-fsanitize=address -fsanitize-recover=address",
        "libasan.so",
        "ASAN_OPTIONS",
    ),
}
NAMES = tuple(_KINDS)
# files of the process's own directory, and reports that do not end it
# (history_size: of thread's, so that it remembers the stack of the earlier access)
_OPTIONS = "log_path=faults:halt_on_error=0:exitcode=0:detect_leaks=0:history_size=7"


def environment(name: str, builds: str | None) -> dict[str, str]:
    """The variables of a process that builds and runs an algo. MissingError if the
    compiler has no such library.
    """
    flags, library, options = _KINDS[name]
    cxx = os.environ.get("CXX") or "c++"
    command = [*cxx.split(), f"-print-file-name={library}"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        hint = "CXX=g++ does; of a distribution's gcc they are part"
        raise MissingError(f"--sanitize {name}: {cxx} has no {library}", hint=hint)
    variables = {
        "CXX": f"{cxx} {flags} -g -fno-omit-frame-pointer",
        "LD_PRELOAD": path,
        options: _OPTIONS,
    }
    if builds:  # the builder's cache knows no flags
        variables["FIB_CACHE_PATH"] = f"{builds}-{name}"
    return variables


def spare_children() -> None:
    """Keep the library of this process out of those that it starts: compilers."""
    if any(options in os.environ for _, _, options in _KINDS.values()):
        os.environ.pop("LD_PRELOAD", None)
