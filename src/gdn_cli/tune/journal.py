"""What `gdn tune` has measured so far: a file that a second run goes on from."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files, paths
from ..errors import GdnError, MissingError, UsageError
from ..parsing import json_of, read_text

# the keys of a line that are read when a run goes on
_KEYS = {
    "key": (),
    "environment": ("environment",),
    "check": ("name", "workload", "status", "reason", "at"),
    "time": ("round", "names", "workload", "gpu", "results", "doubts"),
}
_DAMAGED = "--fresh measures anew; or delete that line, and the rest is kept"


class Journal:
    """The measurements of a tuning, a JSON line each, in the file of this algo, space, GPU and settings."""

    def __init__(self, key: dict[str, Any], fresh: bool = False) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        self.lock = threading.Lock()
        self.path = paths.tunes_dir() / f"{key['op']}-{key['algo']}-{digest}.jsonl"
        self.unsaved: str | None = None  # why the file could not take the last line
        paths.make(self.path.parent)
        self.lines = [] if fresh or not self.path.exists() else list(_whole_lines(self.path))
        self.lines = self.lines or [{"step": "key"} | key]
        try:
            self._write()  # anew, without the half line that a killed run may leave at the end
        except UsageError as e:
            raise MissingError(e.message, hint=e.hint) from None
        self.kept = {step: sum(line["step"] == step for line in self.lines) for step in ("check", "time")}

    def add(self, **line: Any) -> None:
        """Keep a line. A disk that is full by now costs no measurement: `unsaved` says so, as long as lines are left
        out, and the next line brings them along."""
        with self.lock:
            self.lines.append(line)
            try:
                if self.unsaved:
                    self._write()
                else:
                    files.append(self.path, json.dumps(line) + "\n")
                self.unsaved = None
            except GdnError as e:
                self.unsaved = e.message

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """The last line that has these values."""
        found = (line for line in reversed(self.lines) if all(line.get(k) == v for k, v in wanted.items()))
        return next(found, None)

    def _write(self) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        files.write(self.path, text, hint="GDN_HOME names another place", sync=False)


def _whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of an earlier run. MissingError names one that is damaged; the last may be half a line, as a killed run
    leaves it, and is measured again."""
    *lines, _ = _text(file).split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found = json_of(line, f"{file}:{number}", MissingError)
            if not all(key in found for key in _KEYS[found["step"]]):
                raise KeyError
        except MissingError as e:
            raise MissingError(f"{e.message}; the file is damaged", hint=_DAMAGED) from None
        except (KeyError, TypeError):
            raise MissingError(f"{file}:{number}: not a line of gdn's; the file is damaged", hint=_DAMAGED) from None
        yield found


def _text(file: Path) -> str:
    try:
        return read_text(file, MissingError)
    except MissingError as e:
        raise MissingError(f"{e.message}; the file is damaged", hint=_DAMAGED) from None
