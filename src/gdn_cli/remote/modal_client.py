"""Modal itself: image, function, session, volumes, and its errors as ours. The only module that imports `modal`.

Known behaviour of its client, found by running it (1.6.4): `enable_output()` writes to stdout; `app.run()` swallows
Ctrl-C, and continues after the `with`; an unreachable server takes it a minute; `.get(timeout=)` raises the builtin
TimeoutError; a remote exception of a type that is unknown here arrives as ExecutionError.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import GdnError, MissingError, RemoteError, one_line
from ..text import display, unguarded
from . import container
from .settings import CACHE, DATA, Gpu, Image, Settings, load, packages

LOGIN = "run `modal setup`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
_SECRETS = ("token_id", "token_secret", "oauth_refresh_token", "oauth_client_secret", "oauth_jwt_key")
_LAST = 8  # lines of a build that failed
# files of gdn that are not sent: an algo's sources travel in the request
_IGNORED = ["**/__pycache__", "**/*.pyc", "algos", "configs"]


class Unreachable(RemoteError):
    """No answer from Modal itself; it may be reachable again in a moment."""


class CallFailed(Exception):
    """One call failed; the message says why, and the others may go on."""


# --- declarations -------------------------------------------------------------------------------------------------


def serve(data: bytes) -> bytes:
    """The function that Modal calls in a container."""
    return container.serve(data, commit)


def declare(settings: Settings, image: Image, gpu: Gpu | None, timeout_s: int, containers: int) -> tuple[Any, Any]:
    """(app, function): the rented resources and their limits. The function is `serve`."""
    import modal

    built = modal.Image.from_registry(image.base, add_python=image.python or None).entrypoint([])
    built = built.uv_pip_install(*packages(image)).run_commands(image.smoke)
    # mounted last, so that a change rebuilds nothing; by default only .py files would be included
    built = built.add_local_python_source("gdn_cli", ignore=_IGNORED)
    app = modal.App(settings.app, include_source=False)
    dataset = modal.Volume.from_name(settings.volumes.dataset, create_if_missing=True)
    cache = modal.Volume.from_name(settings.volumes.cache, create_if_missing=True)
    rent = app.function(
        image=built,
        gpu=str(gpu) if gpu else None,
        timeout=timeout_s,
        retries=0,
        max_containers=containers,
        scaledown_window=settings.limits.idle,
        cpu=float(settings.container.cpu),
        memory=settings.container.memory,
        volumes={DATA: dataset.with_mount_options(read_only=True), CACHE: cache},
        include_source=False,
    )
    return app, rent(serve)


# --- talking to it ------------------------------------------------------------------------------------------------


def connect(seconds: float) -> None:
    """Contact Modal, so that a wrong token or a missing connection shows before anything is packed, built or paid
    for."""
    import asyncio
    import logging

    import modal

    # a call that Ctrl-C cuts short leaves a task of Modal's client, and asyncio logs its end as a traceback
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    async def hello() -> None:
        client = await modal.Client.from_env.aio()
        await client.hello.aio()

    with _translated():
        try:
            asyncio.run(asyncio.wait_for(hello(), seconds))
        except (asyncio.TimeoutError, TimeoutError):
            raise modal.exception.ConnectionError(f"no answer within {seconds:g} s") from None


class Call:
    """One call of the function, under way at Modal."""

    def __init__(self, call: Any) -> None:
        self._call = call

    @property
    def id(self) -> str:
        return self._call.object_id

    def wait(self, seconds: float) -> bytes | None:
        """The reply, or None if there is none within `seconds`. Raises CallFailed if this call alone failed."""
        import modal

        e = modal.exception
        with _translated():
            try:
                return self._call.get(timeout=seconds)
            except TimeoutError:
                return None
            except (e.AuthError, e.ConnectionError, e.ServiceError, e.PermissionDeniedError):
                raise
            except e.FunctionTimeoutError:
                raise CallFailed("Modal ended the container at its time limit; --timeout gives more") from None
            except e.OutputExpiredError:
                raise CallFailed("Modal no longer has its result") from None
            except Exception as other:  # of whatever type the other side has raised
                raise CallFailed(_fate(scrub(_last(other)))) from None

    def cancel(self) -> None:
        """Stop it and its container, whatever Modal answers."""
        with contextlib.suppress(Exception):
            self._call.cancel(terminate_containers=True)


def recall(id: str) -> Call:
    """A call that an earlier command sent."""
    import modal

    with _translated():
        return Call(modal.FunctionCall.from_id(id))


@contextlib.contextmanager
def session(app: Any, function: Any, detach: bool) -> Iterator[Callable[[bytes], Call]]:
    """Build the image if needed, start the app, and stop it at the end unless it is to be left running. Yields a
    function that calls the app's own with a parcel.

    Modal prints to stderr meanwhile. Ctrl-C is raised as KeyboardInterrupt once the app is stopped.
    """
    import modal

    def spawn(parcel: bytes) -> Call:
        with _translated():
            return Call(function.spawn(parcel))

    interrupted = False
    talk = _Tee(unguarded(sys.stderr))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(talk))
        stack.enter_context(modal.enable_output())
        stack.enter_context(_translated(talk))
        with _translated(talk, anything=True):
            stack.enter_context(app.run(detach=detach))
        try:
            yield spawn
        except KeyboardInterrupt:
            interrupted = True
            raise
    if interrupted:
        raise KeyboardInterrupt


class _Tee:
    """Passes on what is written to it, without secrets and control sequences, and remembers the last lines."""

    def __init__(self, to: Any) -> None:
        self.to = to
        self.lines: deque[str] = deque([""], maxlen=200)

    def write(self, text: str) -> int:
        text = scrub(text)
        first, *more = text.split("\n")
        self.lines[-1] += first
        self.lines.extend(more)
        self.to.write(display(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.to, name)

    def last(self) -> list[str]:
        """The last lines that are not empty, without a terminal's colours."""
        plain = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line).rstrip() for line in self.lines)
        return [line for line in plain if line][-_LAST:]


# --- volumes, apps, logs ------------------------------------------------------------------------------------------


def commit(volume: str) -> None:
    """In a container: make changes on the volume permanent. Modal also does so in the background at some point; a loss
    only costs a build."""
    import modal

    with contextlib.suppress(Exception):
        modal.Volume.from_name(volume).commit()


class Volume:
    """A volume by name, created if it does not exist."""

    def __init__(self, name: str) -> None:
        import modal

        with _translated():
            self._volume = modal.Volume.from_name(name, create_if_missing=True)
            self._volume.hydrate()

    def files(self) -> dict[str, int]:
        """path -> size of every file on it."""
        import modal

        with _translated():
            try:
                entries = self._volume.listdir("/", recursive=True)
            except modal.exception.NotFoundError:  # nothing was ever written to it
                return {}
        return {e.path.lstrip("/"): e.size for e in entries if e.type.name == "FILE"}

    def upload(self, files: dict[str, Path]) -> None:
        """Upload these files, replacing those with the same names."""
        with _translated(), self._volume.batch_upload(force=True) as batch:
            for name, path in files.items():
                batch.put_file(path, f"/{name}")


class App(Struct):
    """A running app."""

    app: str  # its id
    state: str
    created: str  # 2026-11-21T14:12:00Z


def apps(name: str) -> list[App]:
    """The running apps of this name, newest first."""
    import modal

    with _translated():
        found = [app.info() for app in modal.Environment.from_context().apps.list() if app.description == name]
    rows = [
        App(info.app_id, info.lifecycle.state.value, info.lifecycle.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"))
        for info in found
    ]
    return sorted(rows, key=lambda row: row.created, reverse=True)


def logs(app: str, lines: int) -> list[str]:
    """The last lines that an app's containers printed."""
    import modal

    with _translated():
        entries = list(modal.App.lookup(app).logs.tail(lines))
    return scrub("".join(entry.message for entry in entries)).splitlines()


# --- its errors ---------------------------------------------------------------------------------------------------


def scrub(text: str) -> str:
    """The text without the secrets that Modal's client has."""
    from modal.config import config

    for name in _SECRETS:
        value = config.get(name, use_env=True)
        if value and len(str(value)) > 3:
            text = text.replace(str(value), "***")
    return text


@contextlib.contextmanager
def _translated(talk: _Tee | None = None, anything: bool = False) -> Iterator[None]:
    """Modal's exceptions as ours, each one line with what to do next; with `anything`, only Modal's client runs in the
    block, so that every exception from it is Modal's."""
    import modal

    try:
        yield
    except (GdnError, CallFailed):
        raise
    except modal.exception.Error as e:
        raise _said(e, talk) from None
    except OSError as e:  # a socket's, not yet wrapped by Modal
        raise Unreachable(f"no connection to Modal ({e.strerror or e})", hint=_NETWORK) from None
    except Exception as e:
        if not anything:
            raise
        raise RemoteError(f"Modal's client failed: {scrub(one_line(e))}", hint="pip install -U modal") from None


_NETWORK = "check the network, or see https://status.modal.com"


def _said(e: Exception, talk: _Tee | None) -> GdnError:
    import modal

    kinds = modal.exception
    text = scrub(_last(e))
    if isinstance(e, kinds.AuthError):
        if "token missing" in str(e).lower() or "profile" in str(e).lower():
            return MissingError("not logged in to Modal", hint=LOGIN)
        return RemoteError(f"Modal does not accept the token: {text}", hint=LOGIN)
    if isinstance(e, kinds.ImageBuildError):
        tail = talk.last() if talk else []
        shown = "".join(f"\n    {line}" for line in tail)
        hint = f"`modal image logs {e.image_id}` has the rest; configs/modal.toml has the image{shown}"
        return RemoteError(f"the image could not be built: {scrub(str(e).splitlines()[0])}", hint=hint)
    if isinstance(e, (kinds.ConnectionError, kinds.ServiceError)):
        return Unreachable(f"no connection to Modal ({text})", hint=_NETWORK)
    if isinstance(e, (kinds.ResourceExhaustedError, kinds.PermissionDeniedError)):
        return RemoteError(f"Modal does not grant it: {text}", hint="see your workspace's limits at modal.com/settings")
    if isinstance(e, kinds.NotFoundError):
        return RemoteError(f"Modal does not know it: {text}", hint="`gdn modal status` lists what there is")
    if "gpu" in text.lower():
        return RemoteError(f"Modal has no such GPU: {text}", hint=f"--gpu takes {', '.join(load().gpus.known)}")
    return RemoteError(f"Modal refused: {text}")


def _last(e: BaseException) -> str:
    """An exception's text in one line: the last line of the remote traceback that it quotes, else its first line."""
    text, quoted, trace = str(e).partition("remote traceback:")
    lines = [line.strip() for line in (trace if trace.strip() else text).splitlines() if line.strip()]
    if not lines:
        return type(e).__name__
    if quoted and not trace.strip():  # of a type that is unknown here, and without its traceback
        return " ".join(lines[:2])[:300]
    return (lines[-1] if quoted or lines[0].startswith("Traceback") else lines[0])[:300]


def _fate(text: str) -> str:
    if re.search(r"out of memory|\boom\b|exit code 137|memory limit", text, re.I) and "cuda" not in text.lower():
        return f"the container ran out of memory ({text}); configs/modal.toml gives it more"
    return f"the container failed: {text}"
