"""Modal itself: image, deployed function, calls, volumes. Only this module and
modal_errors.py import `modal`.

Known behaviour of its client, found by running it (1.6.4): `enable_output()` writes to
stdout; an unreachable server takes it a minute; `.get(timeout=)` raises the builtin
TimeoutError; a remote exception of a type that is unknown here arrives as
ExecutionError.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import msgspec

from .. import paths
from ..machine import locks
from ..text import display, unguarded
from . import container, wire
from .modal_errors import (
    UnreachableError,
    from_container,
    scrub,
    translated,
    unreachable,
    verdict,
)
from .settings import (
    CACHE,
    CLAIMS,
    DATA,
    RECORDS,
    Container,
    Gpu,
    Image,
    Settings,
    packages,
)

T = TypeVar("T")
# that a request for a reply stays open at Modal; its client asks anew after 55
_POLL_S = 50.0
# without a record, until the queue is opened anew; its client asks anew after 30
_FOLLOW_S = 600.0
# between two requests that failed: the first, doubled up to the last
_PAUSE_S, _LONGEST_S = 1.0, 30.0
# between attempts to send a call
_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0)
# for Modal to tell what it has kept
_SOON_S = 15.0
# for a container to start; Modal's own limit would be a call's
_STARTUP_S = 900
# files of gdn that are not sent: an algo's sources travel in the request
_IGNORED = ["**/__pycache__", "**/*.pyc", "algos", "configs"]


# --- declarations


def serve(data: bytes) -> bytes:
    """The function that Modal calls in a container."""
    import modal

    call = modal.current_function_call_id()
    if not call:
        return container.serve(data, commit)
    if (first_call := claimed(data, call)) != call:
        return wire.encode(wire.Reply(call=first_call))
    return container.serve(data, commit, keep=keeper(call), before=kept(call))


def claimed(data: bytes, call: str) -> str:
    """In a container: the call that does this parcel's work, which is the first to ask.
    There is a second one if Modal's answer to `spawn` was lost.
    """
    import modal

    key = hashlib.sha256(data).hexdigest()
    with contextlib.suppress(Exception):
        claims = modal.Dict.from_name(CLAIMS, create_if_missing=True)
        if not claims.put(key, call, skip_if_exists=True):
            return claims.get(key, call)
    return call


def keeper(call: str) -> Callable[[bytes], None]:
    """In a container: a function that puts records on gdn's queue, under the call's id.
    A thread does the sending: Modal must not delay what is being timed, and a record
    that is not kept costs nothing but itself.
    """
    import modal

    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send() -> None:
        to = modal.Queue.from_name(RECORDS, create_if_missing=True)
        while True:
            record = waiting.get()
            with contextlib.suppress(Exception):
                to.put(record, partition=call)

    threading.Thread(target=send, daemon=True).start()
    return waiting.put


def kept(call: str) -> list[bytes]:
    """The records that a call's container has kept, in order; none if Modal does not tell."""
    import modal

    def ask() -> list[bytes]:
        records = modal.Queue.from_name(RECORDS).iterate(partition=call)
        return [record for record in records if isinstance(record, bytes)]

    try:
        return _request(ask).result(_SOON_S)
    except Exception:
        return []


def app_name(settings: Settings, image: Image) -> str:
    """The name of the app at Modal. It has the hash of the image and of gdn's files, so
    a run finds the app that was deployed from the same ones, or none.
    """
    import modal

    facts = [image, packages(image), settings.volumes, settings.limits.idle]
    digest = hashlib.sha256(msgspec.json.encode(facts))
    ignored = modal.FilePatternMatcher(*_IGNORED)
    for path in sorted(paths.PACKAGE.rglob("*")):
        name = path.relative_to(paths.PACKAGE)
        if path.is_file() and not ignored(name):
            digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")

    return f"{settings.app}-{digest.hexdigest()[:12]}"


def declare(name: str, settings: Settings, image: Image) -> Any:
    """The app with its one function, `serve`. A run adds the GPU and the limits."""
    import modal

    built = modal.Image.from_registry(
        image.base, add_python=image.python or None
    ).entrypoint([])
    built = built.run_commands(*image.first) if image.first else built
    built = built.uv_pip_install(*packages(image)).run_commands(
        image.smoke, *image.then
    )
    # mounted last, so that a change rebuilds nothing; by default only .py files would be included
    built = built.add_local_python_source("gdn_cli", ignore=_IGNORED)
    app = modal.App(name, include_source=False)
    dataset = modal.Volume.from_name(settings.volumes.dataset, create_if_missing=True)
    cache = modal.Volume.from_name(settings.volumes.cache, create_if_missing=True)
    app.function(
        image=built,
        startup_timeout=_STARTUP_S,
        retries=0,
        scaledown_window=settings.limits.idle,
        volumes={DATA: dataset.with_mount_options(read_only=True), CACHE: cache},
        include_source=False,
    )(serve)
    return app


def deployed(
    name: str, settings: Settings, image: Image, say: Callable[[str], None]
) -> Any:
    """The function of the deployed app. Deploys it, and builds the image, if Modal has
    no app of this name; Modal prints to stderr meanwhile.
    """
    import modal

    # two runs that both deploy it would be two apps of one name
    lock = locks.shared(f"modal-{name}", say, f"the deployment of {name}")
    with translated(), lock:
        function = modal.Function.from_name(name, serve.__name__)
        try:
            return function.hydrate()
        except modal.exception.NotFoundError:
            say(
                f"{name}: deploying it with image {image.name}; a new image takes minutes"
            )

        with (
            contextlib.redirect_stdout(_Scrubbed(unguarded(sys.stderr))),
            modal.enable_output(),
        ):
            declare(name, settings, image).deploy()

        return function.hydrate()


def fitted(
    function: Any, container: Container, gpu: Gpu | None, limit_s: int, containers: int
) -> Any:
    """The function with a run's GPU and limits."""
    # Modal shares the containers of equal options, and their number. A few MiB more make
    # another run's options unlike these
    memory = container.memory + random.randrange(128)
    return function.with_options(
        gpu=str(gpu) if gpu else None,
        cpu=float(container.cpu),
        memory=memory,
        timeout=limit_s,
        max_containers=containers,
    )


# --- talking to it


def connect(seconds: float) -> None:
    """Contact Modal, so that a wrong token or a missing connection shows before
    anything is packed, built or paid for.
    """
    import logging

    import modal

    # they log as a traceback what Ctrl-C cuts short, and each heartbeat that fails
    for name in ("asyncio", "synchronicity", "modal-client", "modal-utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    try:
        _request(lambda: modal.Client.from_env().hello()).result(seconds)
    except futures.TimeoutError:
        raise unreachable(TimeoutError(f"no answer within {seconds:g} s")) from None


class Call:
    """One call of the function, under way at Modal. `trouble` is why Modal does not
    answer at the moment.
    """

    def __init__(self, call: Any, id: str) -> None:
        self._call = call
        self.id = id
        self._answer: futures.Future[bytes] | None = None
        self.trouble: UnreachableError | None = None
        # the records that its container has kept so far, from `listen` on
        self.records: list[bytes] = []

    def stop(self) -> None:
        self._call.cancel(terminate_containers=True)

    def listen(self) -> futures.Future[bytes]:
        """The reply, whenever it comes, or CallFailedError. A thread waits for it with one
        long request at a time, and another for the records.
        """
        if self._answer is None:
            self._answer = _request(self._get)
            _request(lambda: self._follow(self.listen()))
        return self._answer

    def _get(self, sleep: Callable[[float], None] = time.sleep) -> bytes:
        pause = _PAUSE_S
        while True:
            # a short request behind a failed one, to know soon that Modal answers again
            wait_s = _PAUSE_S if self.trouble else _POLL_S
            try:
                answer: bytes = self._call.get(timeout=wait_s)
                self.trouble = None
                return answer
            except Exception as e:
                if isinstance(e, TimeoutError) and not from_container(e):
                    self.trouble, pause = None, _PAUSE_S
                    continue
                self.trouble = verdict(e)
            # the call itself goes on
            sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    def _follow(self, answer: futures.Future[bytes]) -> None:
        """Add to `records` as they come, with one long request at a time. What this
        misses comes with the reply.
        """
        import modal

        while not answer.done():
            with contextlib.suppress(Exception):
                records = modal.Queue.from_name(RECORDS, create_if_missing=True)
                # always from the first
                every = records.iterate(partition=self.id, item_poll_timeout=_FOLLOW_S)
                for record in itertools.islice(every, len(self.records), None):
                    self.records.append(record)
            time.sleep(_PAUSE_S)


def _request(ask: Callable[[], T]) -> futures.Future[T]:
    """What Modal's client gets, in a thread: it may wait without limit."""
    answer: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            with translated():
                answer.set_result(ask())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return answer


def spawn(function: Any, parcel: bytes) -> futures.Future[Call]:
    """The call of a fitted function, once Modal has it. If its answer is lost the
    parcel is sent again: `claimed` has only one of the two do the work.
    """

    def send() -> Call:
        for pause in _AGAIN_S:
            try:
                with translated():
                    call = function.spawn(parcel)
                    return Call(call, call.object_id)
            except UnreachableError as e:
                trouble = e
                time.sleep(pause)
        raise trouble

    return _request(send)


def cancel(calls: Sequence[Call], seconds: float) -> list[Call]:
    """Stop calls and their containers. Returns those for which Modal confirms it within
    `seconds`.
    """
    answers = {call: _request(call.stop) for call in calls}
    futures.wait(answers.values(), seconds)
    return [
        c for c, answer in answers.items() if answer.done() and not answer.exception()
    ]


def first(calls: Sequence[Call], seconds: float) -> list[Call]:
    """The calls that have ended, as soon as there is one; none if there is none within
    `seconds`.
    """
    futures.wait([call.listen() for call in calls], seconds, futures.FIRST_COMPLETED)
    return [call for call in calls if call.listen().done()]


def recall(id: str) -> Call:
    """A call that an earlier command sent."""
    import modal

    with translated():
        return Call(modal.FunctionCall.from_id(id), id)


class _Scrubbed:
    """A stream that shows what is written to it without secrets and control sequences."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(display(scrub(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# --- volumes


def commit(volume: str) -> None:
    """In a container: make changes on the volume permanent. Modal also does so in the
    background at some point; a loss only costs a build.
    """
    import modal

    with contextlib.suppress(Exception):
        modal.Volume.from_name(volume).commit()


def volume(name: str) -> Any:
    """A volume, created if it does not exist."""
    import modal

    with translated():
        return modal.Volume.from_name(name, create_if_missing=True).hydrate()


def files(name: str) -> list[str]:
    """The path of every file on a volume."""
    import modal

    with translated(), contextlib.suppress(modal.exception.NotFoundError):
        entries = volume(name).listdir("/", recursive=True)
        return [e.path.lstrip("/") for e in entries if e.type.name == "FILE"]
    # nothing was ever written to it
    return []
