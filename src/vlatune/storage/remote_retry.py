"""Retries and error messages for calls to a remote filesystem.

Throttling, 5xx, timeouts, broken connections and short bodies are retried with exponential backoff
and full jitter, at most MAX_TRIES times and MAX_RETRY_S seconds. Permanent errors (missing object,
no permission, no credentials, changed object) fail immediately. Every message names the object and
has secrets removed.
"""

import logging
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from vlatune.console import redacted
from vlatune.errors import RejectedAnswerError
from vlatune.storage.remote_fs import cut_out

MAX_TRIES = 8
"""Maximum number of calls, including the first."""
MAX_RETRY_S = 120.0
"""No retry starts later than this after the first call."""
FIRST_BACKOFF_S = 0.2
"""Maximum pause after the first failure; doubled after each further one."""
MAX_BACKOFF_S = 10.0
"""Upper limit of the pause, which is sampled uniformly from 0 to the maximum (full jitter)."""

THROTTLING = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
"""Error codes that mean throttling; some servers send them with status 400."""
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
"""Base classes of transient errors, by name, because the optional libraries may be missing."""
CREDENTIALS_TYPES = {
    "botocore.CredentialRetrievalError",
    "botocore.NoCredentialsError",
    "botocore.PartialCredentialsError",
    "botocore.ProfileNotFound",
    "botocore.SSOError",
    "google.DefaultCredentialsError",
    "google.RefreshError",
}

_jitter = random.SystemRandom()  # not the global generator, on which training depends; unseeded, so that forks differ
_log = logging.getLogger(__name__)


class ShortBodyError(Exception):
    """Raised if a body is shorter than requested."""


def retried[T](call: Callable[[], T], where: str, *, secrets: tuple[str, ...] = ()) -> T:
    """Return the result of `call`; `where` names the object in messages, `secrets` are removed."""
    begin_s = time.monotonic()
    for tries in range(1, MAX_TRIES + 1):
        try:
            return call()
        except Exception as error:
            cause, is_clean = _cause(error, secrets)
            pause_s = _jitter.uniform(0.0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (tries - 1)))
            waited_s = time.monotonic() - begin_s
            if not is_transient(error):
                clear = _explained(error, where, cause)
                if clear is error and is_clean:
                    raise
                raise (RuntimeError(f"{where}: {cause}") if clear is error else clear) from (
                    error if is_clean else None
                )
            if tries == MAX_TRIES or waited_s + pause_s > MAX_RETRY_S:
                raise RuntimeError(
                    f"{where}: gave up after {tries} tries in {waited_s:.1f} s; the last failed with {cause}; check the "
                    f"address (endpoint_url), the network and the store's health, then start again"
                ) from (error if is_clean else None)
            if tries == 1:
                _log.info("%s: %s; retrying up to %d times in %.0f s", where, cause, MAX_TRIES - 1, MAX_RETRY_S)
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """True if the same call may succeed later."""
    if isinstance(error, FileNotFoundError | PermissionError) or _rejected(error):
        return False
    if any(_is_broken_connection(one) or _code(one) in THROTTLING for one in chain(error)):
        return True
    status = status_of(error)
    return status is not None and (status in (408, 429) or status >= 500)


def _explained(error: Exception, where: str, cause: str) -> Exception:
    """Return the error to raise for a permanent failure; unrelated errors are unchanged."""
    if (rejected := _rejected(error)) is not None:
        return RuntimeError(f"{where}: {rejected}")
    status = status_of(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(f"{where}: there is no such object")
    if any(_is_a(one, CREDENTIALS_TYPES) for one in chain(error)):
        return PermissionError(
            f"{where}: no usable credentials ({cause}); set them in the environment (docs/remote_data.md) or in storage_options; "
            f"for a public bucket use storage_options {{'anon': True}}"
        )
    if isinstance(error, PermissionError) or status in (401, 403) or str(error).startswith("Forbidden"):
        return PermissionError(
            f"{where}: access denied ({cause}); check the credentials and their permissions: read the object, list the bucket"
        )
    if status == 412:
        return object_changed(where)
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return ValueError(f"{where}: storage_options has a key that the filesystem does not know ({cause})")
    if status is not None:
        return RuntimeError(
            f"{where}: request rejected ({cause}); check the address, the region, the credentials and storage_options"
        )
    return error


def _rejected(error: BaseException) -> RejectedAnswerError | None:
    return next((one for one in chain(error) if isinstance(one, RejectedAnswerError)), None)


def object_changed(where: str) -> RuntimeError:
    return RuntimeError(
        f"object {where} changed while it was read, and the data was discarded; let the upload finish, then start again"
    )


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error from botocore, aiohttp, gcsfs, requests or httpx."""
    for one in chain(error):
        if _is_broken_connection(one):  # no response; aiohttp's parser error has an unrelated status
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
    """Yield an error and its chain of causes."""
    seen: set[int] = set()  # the chain may be cyclic
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
    """True if a class of the error is in `names`, as `package.Class`."""
    return any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in names for kind in type(error).__mro__)


def _cause(error: BaseException, secrets: tuple[str, ...]) -> tuple[str, bool]:
    """Return the description of an error, and whether the error itself contains no secrets."""
    status = status_of(error)
    text = " ".join(cut_out(secrets, str(error)).split())[:300] or "no message"
    cause = f"{type(error).__name__}: {text}" + (f" (status {status})" if status else "")
    messages = " ".join(str(one) for one in chain(error))
    return redacted(cause), redacted(cut_out(secrets, messages)) == messages
