"""Modal's errors as ours: each one line with what to do next. What is the end of a
call, and what is a network or a server that may answer again in a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import traceback
from collections.abc import Iterator

from .. import bounded
from ..errors import GdnError, MissingError, RemoteError
from . import wire
from .settings import load

LOGIN = "run `modal setup`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
_SECRETS = (
    "token_id",
    "token_secret",
    "oauth_refresh_token",
    "oauth_client_secret",
    "oauth_jwt_key",
)


class UnreachableError(RemoteError):
    """No answer from Modal itself; it may be reachable again in a moment."""


class CallFailedError(Exception):
    """One call failed; the message says why, and the others may go on."""


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
def translated() -> Iterator[None]:
    """Every exception of Modal's client as one of ours, one line with what to do next.
    Only the client runs in the block.
    """
    try:
        yield
    except (GdnError, CallFailedError):
        raise
    except Exception as e:
        raise _error(e) from None


def verdict(e: Exception) -> UnreachableError:
    """What an exception of a request for a call's reply means for the network. Raises
    CallFailedError only if the call has ended: its container says so, or Modal.
    """
    from modal import exception as kinds

    if isinstance(e, kinds.FunctionTimeoutError):
        more = "--timeout or --max-minutes gives more"
        raise CallFailedError(f"Modal ended the container at its time limit; {more}")
    if isinstance(e, kinds.DeserializationError):
        raise CallFailedError(f"{wire.NOT}: it cannot be unpacked")
    if isinstance(e, kinds.OutputExpiredError):
        raise CallFailedError("Modal no longer has its result")
    text = scrub(_last(e))
    # of whatever type the other side has raised
    if from_container(e):
        memory = re.search(
            r"out of memory|\boom\b|exit code 137|memory limit", text, re.I
        )
        if memory and "cuda" not in text.lower():
            raise CallFailedError(
                f"the container ran out of memory ({text}); configs/modal.toml gives it more"
            )
        raise CallFailedError(f"the container failed: {text}")
    if isinstance(e, kinds.NotFoundError):
        raise CallFailedError(f"Modal does not know this call ({text})")
    # what a network can raise is an open list
    return unreachable(e)


def from_container(e: BaseException) -> bool:
    """Whether an exception was raised in the container: Modal's client raises those
    where it unpacks a result. A remote OSError or TimeoutError has the same type as one
    of the network here.
    """
    places = {frame.f_code.co_name for frame, _ in traceback.walk_tb(e.__traceback__)}
    return "_process_result" in places and "blob_download" not in places


def unreachable(e: BaseException) -> UnreachableError:
    from modal import exception as kinds

    text = getattr(e, "strerror", None) or scrub(_last(e))
    if isinstance(e, (kinds.AuthError, kinds.PermissionDeniedError)):
        return UnreachableError(f"Modal does not accept the token ({text})", hint=LOGIN)
    return UnreachableError(
        f"no connection to Modal ({text})",
        hint="check the network, or see https://status.modal.com",
    )


def _error(e: Exception) -> GdnError:
    from modal import exception as kinds

    text = scrub(_last(e))
    missing = "token missing" in text.lower() or "profile" in text.lower()
    if missing and isinstance(e, kinds.AuthError):
        return MissingError("not logged in to Modal", hint=LOGIN)
    limits = "see your workspace's limits at modal.com/settings"
    image = "its last lines are above; configs/modal.toml has the image"
    built = f"the image could not be built: {scrub(' '.join(str(e).split()))}"
    for kind, says, hint in (
        (kinds.AuthError, f"Modal does not accept the token: {text}", LOGIN),
        (kinds.ImageBuildError, built, image),
        (kinds.ResourceExhaustedError, f"Modal does not grant it: {text}", limits),
        (kinds.PermissionDeniedError, f"Modal does not grant it: {text}", limits),
        (kinds.NotFoundError, f"Modal does not know it: {text}", "`modal app list`"),
    ):
        if isinstance(e, kind):
            return RemoteError(says, hint=hint)
    if "gpu type" in text.lower():
        return RemoteError(
            f"Modal has no such GPU: {text}",
            hint=f"--gpu takes {', '.join(load().gpus.known)}",
        )
    served = (
        kinds.ConnectionError,
        kinds.ServiceError,
        kinds.InternalError,
        kinds.ClientClosed,
    )
    if isinstance(e, kinds.Error) and not isinstance(e, served):
        return RemoteError(f"Modal refused: {text}")
    libraries = {kind.__module__.partition(".")[0] for kind in type(e).__mro__}
    # grpclib raises an AttributeError for a stream that was cut
    network = isinstance(e, (*served, OSError, asyncio.TimeoutError, AttributeError))
    if network or libraries & {"grpclib", "h2", "aiohttp"}:
        return unreachable(e)
    return RemoteError(f"Modal's client failed: {text}", hint="pip install -U modal")


def _last(e: BaseException) -> str:
    """An exception's text in one line: the last line of the remote traceback that it
    quotes, else its first line.
    """
    text, _, trace = str(e).partition("remote traceback:")
    texts = (trace.strip() or text).splitlines()
    lines = [line.strip() for line in texts if line.strip()]
    if not lines:
        return type(e).__name__
    quoted = trace.strip() or lines[0].startswith("Traceback")
    return lines[-1 if quoted else 0][:300]
