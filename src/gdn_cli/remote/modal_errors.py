"""Modal's errors as ours: each one line with what to do next. What is the end of a
call, and what is a network or a server that may answer again in a moment.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator

from .. import bounded
from ..errors import GdnError, MissingError, RemoteError, one_line
from .settings import load

LOGIN = "run `modal setup`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
_SECRETS = (
    "token_id",
    "token_secret",
    "oauth_refresh_token",
    "oauth_client_secret",
    "oauth_jwt_key",
)


class Unreachable(RemoteError):
    """No answer from Modal itself; it may be reachable again in a moment."""


UNSTOPPED = "the app could not be stopped"


class CallFailed(Exception):
    """One call failed; the message says why, and the others may go on."""


class TimedOut(CallFailed):
    """Modal has ended a call at its time limit."""


def scrub(text: str) -> str:
    """A text from Modal or from a container without the secrets that Modal's client
    has, and of a limited size.
    """
    from modal.config import config

    for name in _SECRETS:
        value = config.get(name, use_env=True)
        if value and len(str(value)) > 3:
            text = text.replace(str(value), "***")
    return bounded.clip(text)


@contextlib.contextmanager
def translated(
    last: Callable[[], list[str]] = list, anything: bool = False
) -> Iterator[None]:
    """Modal's exceptions as ours, each one line with what to do next; with `anything`,
    only Modal's client runs in the block, so that every exception from it is Modal's.
    """
    import modal

    try:
        yield
    except (GdnError, CallFailed):
        raise
    except modal.exception.Error as e:
        raise _said(e, last) from None
    except Exception as e:
        if _transport(e):
            raise _unreachable(e) from None
        if not anything:
            raise
        raise RemoteError(
            f"Modal's client failed: {scrub(one_line(e))}", hint="pip install -U modal"
        ) from None


_NETWORK = "check the network, or see https://status.modal.com"


def verdict(e: Exception) -> Exception:
    """What an exception of a request for a call's reply means: CallFailed only if the
    call has ended, and not if anything between here and there has failed.
    """
    import modal

    kinds = modal.exception
    if isinstance(e, kinds.FunctionTimeoutError):
        return TimedOut("Modal ended the container at its time limit")
    if isinstance(e, kinds.DeserializationError):
        return CallFailed(
            "what came back from Modal is not a reply of gdn: it cannot be unpacked"
        )
    if isinstance(e, kinds.OutputExpiredError):
        return CallFailed("Modal no longer has its result")
    if not from_container(e):
        if isinstance(e, kinds.NotFoundError):
            return CallFailed(f"Modal does not know this call ({scrub(_last(e))})")
        if isinstance(e, (kinds.AuthError, kinds.PermissionDeniedError)):
            return _said(e, list)
        if _transport(e):
            return _unreachable(e)
    # of whatever type the other side has raised
    return CallFailed(_fate(scrub(_last(e))))


def from_container(e: BaseException) -> bool:
    """Whether an exception was raised in the container: Modal's client raises those
    where it unpacks a result. A remote OSError or TimeoutError has the same type as one
    of the network here.
    """
    places = {frame.f_code.co_name for frame, _ in traceback.walk_tb(e.__traceback__)}
    return "_process_result" in places and "blob_download" not in places


def _transport(e: BaseException) -> bool:
    """Whether it comes from the network, or from Modal's servers as such."""
    import modal

    kinds = modal.exception
    # a large reply is fetched from a store of files
    if isinstance(e, kinds.ExecutionError):
        return str(e).startswith("Get from url failed")
    if type(e).__module__.startswith("modal."):
        served = (kinds.ConnectionError, kinds.ClientClosed, kinds._GRPCErrorWrapper)
        return isinstance(e, served)
    libraries = {kind.__module__.partition(".")[0] for kind in type(e).__mro__}
    # grpclib up to 0.4.7 raises this AttributeError for a stream that was cut
    cut = isinstance(e, AttributeError) and "_write_appdata" in str(e)
    return (
        isinstance(e, (OSError, TimeoutError))
        or bool(libraries & {"grpclib", "h2", "aiohttp"})
        or cut
    )


def _unreachable(e: BaseException) -> Unreachable:
    text = getattr(e, "strerror", None) or scrub(_last(e))
    return Unreachable(f"no connection to Modal ({text})", hint=_NETWORK)


def _said(e: Exception, last: Callable[[], list[str]]) -> GdnError:
    import modal

    kinds = modal.exception
    text = scrub(_last(e))
    if isinstance(e, kinds.AuthError):
        if "token missing" in str(e).lower() or "profile" in str(e).lower():
            return MissingError("not logged in to Modal", hint=LOGIN)
        return RemoteError(f"Modal does not accept the token: {text}", hint=LOGIN)
    if isinstance(e, kinds.ImageBuildError):
        tail = last()
        shown = "".join(f"\n    {line}" for line in tail)
        hint = (
            f"`modal image logs {e.image_id}` has the rest; configs/modal.toml has the"
            f" image{shown}"
        )
        return RemoteError(
            f"the image could not be built: {scrub(str(e).splitlines()[0])}", hint=hint
        )
    if isinstance(
        e,
        (
            kinds.ConnectionError,
            kinds.ServiceError,
            kinds.InternalError,
            kinds.ClientClosed,
        ),
    ):
        return _unreachable(e)
    if isinstance(e, (kinds.ResourceExhaustedError, kinds.PermissionDeniedError)):
        return RemoteError(
            f"Modal does not grant it: {text}",
            hint="see your workspace's limits at modal.com/settings",
        )
    if isinstance(e, kinds.NotFoundError):
        return RemoteError(
            f"Modal does not know it: {text}",
            hint="`modal app list` has the apps",
        )
    if "gpu" in text.lower():
        return RemoteError(
            f"Modal has no such GPU: {text}",
            hint=f"--gpu takes {', '.join(load().gpus.known)}",
        )
    return RemoteError(f"Modal refused: {text}")


def _last(e: BaseException) -> str:
    """An exception's text in one line: the last line of the remote traceback that it
    quotes, else its first line.
    """
    text, quoted, trace = str(e).partition("remote traceback:")
    lines = [
        line.strip()
        for line in (trace if trace.strip() else text).splitlines()
        if line.strip()
    ]
    if not lines:
        return type(e).__name__
    # of a type that is unknown here, and without its traceback
    if quoted and not trace.strip():
        return " ".join(lines[:2])[:300]
    return (lines[-1] if quoted or lines[0].startswith("Traceback") else lines[0])[:300]


def _fate(text: str) -> str:
    if (
        re.search(r"out of memory|\boom\b|exit code 137|memory limit", text, re.I)
        and "cuda" not in text.lower()
    ):
        return f"the container ran out of memory ({text}); configs/modal.toml gives it more"
    return f"the container failed: {text}"
