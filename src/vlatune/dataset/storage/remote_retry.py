"""Calls to a remote filesystem: tried again when the world is to blame, one clear message when it is not.

Throttling, 5xx, timeouts, broken connections and short bodies are transient: tried again with exponential backoff
and full jitter, at most MAX_TRIES times and MAX_RETRY_S seconds. What cannot get better (no such object, no permission,
no credentials, an object that changed) fails at once. Every message names the object; secrets are cut out of it.
"""

import logging
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from vlatune.console import redacted
from vlatune.dataset.storage.remote_fs import cut_out

MAX_TRIES = 8
"""Calls in all, the first included."""
MAX_RETRY_S = 120.0
"""No new try begins later than this after the first one began."""
FIRST_BACKOFF_S = 0.2
"""Longest pause after the first failure; doubled after each further one."""
MAX_BACKOFF_S = 10.0
"""Longest pause of all. The pause itself is drawn evenly from 0 to the longest one (full jitter)."""

THROTTLING = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
"""Error codes that mean "slower"; some servers send them with status 400."""
TRANSIENT_TYPES = {
    "aiohttp.ClientConnectionError",
    "aiohttp.ClientPayloadError",
    "botocore.HTTPClientError",
    "botocore.IncompleteReadError",
    "botocore.ResponseParserError",
    "google.TransportError",
    "http.HTTPException",
    "httpx.TransportError",
    "requests.ChunkedEncodingError",
    "requests.ConnectionError",
    "requests.Timeout",
    "urllib3.HTTPError",
}
"""Base classes of broken connections and timeouts, by name: the libraries are extras and may not be installed."""
CREDENTIALS_TYPES = {
    "botocore.CredentialRetrievalError",
    "botocore.NoCredentialsError",
    "botocore.PartialCredentialsError",
    "botocore.ProfileNotFound",
    "botocore.SSOError",
    "google.DefaultCredentialsError",
    "google.RefreshError",
}

_jitter = random.SystemRandom()  # not the global generator: training depends on that one; not seeded: forks differ
_log = logging.getLogger(__name__)


class ShortBodyError(Exception):
    """A body that has not the length that was asked for."""


def retried[T](call: Callable[[], T], where: str, *, secrets: tuple[str, ...] = ()) -> T:
    """What `call` returns; `where` names the object in messages, and `secrets` never appear in them."""
    begin_s = time.monotonic()
    tries = 0
    while True:
        tries += 1
        try:
            return call()
        except Exception as error:
            cause, shown = _cause(error, secrets)
            if not is_transient(error):
                clear = explained(error, where, cause)
                if clear is error and shown:
                    raise
                if clear is error:
                    clear = RuntimeError(f"{where}: {cause}")
                raise clear from (error if shown else None)
            pause_s = backoff_s(tries)
            waited_s = time.monotonic() - begin_s
            if tries >= MAX_TRIES or waited_s + pause_s > MAX_RETRY_S:
                message = f"{where}: gave up after {tries} tries in {waited_s:.1f} s; the last failed with {cause}"
                raise RuntimeError(message + _remedy(error)) from (error if shown else None)
            _log.info("%s: try %d failed with %s; the next in %.1f s", where, tries, cause, pause_s)
        time.sleep(pause_s)


def backoff_s(tries: int) -> float:
    """The pause after `tries` failures."""
    return _jitter.uniform(0.0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (tries - 1)))


def is_transient(error: BaseException) -> bool:
    """May the same call succeed a moment later?"""
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    if any(_is_broken_connection(one) or _code(one) in THROTTLING for one in chain(error)):
        return True
    status = status_of(error)
    return status is not None and (status in (408, 429) or status >= 500)


def explained(error: Exception, where: str, cause: str) -> Exception:
    """The error to raise for one that no retry can help; errors that are not the world's come back as they are."""
    status = status_of(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(f"{where}: there is no such object")
    if any(_is_a(one, CREDENTIALS_TYPES) for one in chain(error)):
        return PermissionError(
            f"{where}: no usable credentials ({cause}); set those of the environment (docs/remote_data.md) or storage_options, "
            f"for a public bucket storage_options {{'anon': True}}"
        )
    if isinstance(error, PermissionError) or status in (401, 403) or str(error).startswith("Forbidden"):
        return PermissionError(
            f"{where}: access denied ({cause}); check the credentials and their permissions: read the object, list the bucket"
        )
    if status == 412:
        return changed(where)
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return ValueError(f"{where}: storage_options has a key that the filesystem does not know ({cause})")
    if status is not None:
        return RuntimeError(
            f"{where}: refused ({cause}); check the address, the region, the credentials and storage_options"
        )
    return error


def changed(where: str) -> RuntimeError:
    return RuntimeError(
        f"object {where} changed while it was read; what was read is of two versions and was thrown away: "
        f"let the upload finish, then start again"
    )


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, as botocore, aiohttp, gcsfs, requests and httpx keep it."""
    for one in chain(error):
        if _is_broken_connection(one):  # no answer; aiohttp gives the parser's error behind it a status of its own
            return None
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        elif response is not None:
            status = getattr(response, "status_code", None)
        else:
            status = getattr(one, "status", None) or getattr(one, "code", None)
        if isinstance(status, int | str) and str(status).isdecimal():
            return int(status)
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, what that came from."""
    seen: set[int] = set()  # the chain may be a ring: nothing in Python forbids it
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_broken_connection(error: BaseException) -> bool:
    known = isinstance(error, ConnectionError | TimeoutError | ShortBodyError | socket.gaierror)
    return known or _is_a(error, TRANSIENT_TYPES)


def _code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, Mapping) else None


def _is_a(error: BaseException, names: set[str]) -> bool:
    """Is one of the error's classes named, as `package.Class`?"""
    return any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in names for kind in type(error).__mro__)


def _cause(error: BaseException, secrets: tuple[str, ...]) -> tuple[str, bool]:
    """What to say of an error, and whether the error itself may be shown: not when a secret had to be cut out."""
    status = status_of(error)
    text = " ".join(cut_out(secrets, str(error)).split())[:300] or "no message"
    said = f"{type(error).__name__}: {text}" + (f" (status {status})" if status else "")
    whole = " ".join(str(one) for one in chain(error))
    return redacted(said), redacted(cut_out(secrets, whole)) == whole


def _remedy(error: BaseException) -> str:
    if any(isinstance(one, socket.gaierror) for one in chain(error)):
        return "; the host's name cannot be resolved: check the address (endpoint_url) and the network"
    return "; check the network and the store's health, then start again"
