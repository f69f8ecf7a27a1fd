"""fsspec filesystems with limited responses, and `--dataset.storage_options`.

Listings are not cached. Retries happen only in remote_retry.py; the retries of botocore and s3fs are disabled, because nested retries multiply.

s3fs, gcsfs and fsspec's HTTP use aiohttp and read bodies of any length. Here the connection is closed if a body is
too long or takes too long, and redirects to another scheme, host or port are rejected.

A run's settings appear in config.json, checkpoints, reports and process lists. Options whose keys look like secrets
are therefore rejected and belong in the environment or a profile. Where they are allowed (`read_lerobot`), the same
keys determine what is removed from messages.
"""

import asyncio
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec
from fsspec.dircache import DirCache

from vlatune.console import CUT, USER_AND_PASSWORD, has_secret, is_secret_name
from vlatune.errors import RejectedAnswerError, did_you_mean

FLAG = "--dataset.storage_options"
NO_SECRETS = ("anon", "google_default", "cloud", "cache")
"""Values of gcsfs's `token` that name a method and are not secret."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Maps a URL scheme to the extra of vlatune that installs its driver."""
SESSION_OPTIONS = {"http": "client_kwargs", "https": "client_kwargs", "gs": "session_kwargs", "gcs": "session_kwargs"}
"""Maps a URL scheme to the driver's option for arguments of the aiohttp session."""
VERSION_KEYS = ("ETag", "etag", "generation", "md5Hash", "blob_id")
TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
"""Read timeout of S3; override: `storage_options={"config_kwargs": {"read_timeout": ...}}`."""
MAX_BODY_BYTES = 32 << 20
"""Exceeds the longest requested range (8 MiB) and a page of a listing (about 1 MB)."""
MAX_BODY_S = 120.0


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of a flag; messages omit its text, which may contain secrets."""
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ValueError(f'{FLAG}: expected a JSON object, e.g. {{"endpoint_url": "https://store.example"}}')
    for name, _ in _secrets(options):
        raise ValueError(
            f"{FLAG}: '{name}' looks like a secret, and a run's settings are written to its folder; set it in the environment "
            f"(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...) or name a profile; see docs/remote_data.md"
        )
    return options


def secrets_in(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts to remove from messages, longest first, because one may contain another."""
    found: set[str] = set()
    for _, text in _secrets(options):
        found.add(text)
        if password := USER_AND_PASSWORD.search(text):
            found.add(password["password"])
        # e.g. the AccountKey of a connection string
        found |= {value for name, _, value in (part.partition("=") for part in text.split(";")) if is_secret_name(name)}
    return tuple(sorted(found - {""}, key=lambda text: (-len(text), text)))


def cut_out(secrets: Iterable[str], text: str) -> str:
    """Replace every secret in a text."""
    for secret in secrets:
        text = text.replace(secret, CUT)
    return text


def _secrets(value: Any, name: str = "", *, is_secret: bool = False) -> Iterator[tuple[str, str]]:
    """Yield names and texts of options that are secrets or URLs with passwords, at any depth."""
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            path = f"{name}.{key}" if name else str(key)
            yield from _secrets(inner, path, is_secret=is_secret or is_secret_name(str(key)))
    elif value is None or isinstance(value, bool) or value in NO_SECRETS:
        return
    elif is_secret or has_secret(str(value)):
        yield name, str(value)


def version_tag(info: Mapping[str, Any]) -> str | None:
    """Return a tag of an object's version from `fs.info`, or None if it has none."""
    return next((f"{info[key]}-{info.get('size')}" for key in (*VERSION_KEYS, *TIME_KEYS) if info.get(key)), None)


def filesystem_for(url: str, options: Mapping[str, Any]) -> Any:
    """Return the filesystem of this process and thread for a URL; fsspec caches it."""
    scheme = url.partition("://")[0].partition("::")[0]  # simplecache of simplecache::s3://...
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        remedy = f"pip install 'vlatune[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(error)
        raise RuntimeError(f"dataset '{url}': the driver for {scheme}:// is not installed: {remedy}") from error
    except ValueError as error:
        hint = did_you_mean(scheme, fsspec.available_protocols()) or "; use a folder, s3://, gs:// or hf://"
        raise ValueError(f"dataset '{url}': unknown scheme '{scheme}'{hint}") from error
    limited = dict(options)
    if scheme in ("s3", "s3a"):
        config = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "http_session_cls": _limited_s3_session(),
        }
        limited["config_kwargs"] = config | dict(options.get("config_kwargs", {}))
    elif name := SESSION_OPTIONS.get(scheme):
        limited[name] = dict(options.get(name, {})) | _session_limits()
    try:
        made, _ = fsspec.url_to_fs(url, **limited)
    except (TypeError, ValueError) as error:  # its text may contain the options
        cause = cut_out(secrets_in(options), str(error))
        raise ValueError(f"dataset '{url}': storage_options do not fit {scheme}:// ({cause})") from (
            error if cause == str(error) else None
        )
    if scheme in ("s3", "s3a"):
        made.retries = 1
    if isinstance(getattr(made, "dircache", None), DirCache):
        made.dircache.use_listings_cache = False
    return made


class LimitedReader:
    """Wraps aiohttp's StreamReader and limits reads to the end of the body."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def read(self, n: int = -1) -> bytes:
        if n >= 0:
            return await self._reader.read(n)
        body = bytearray()
        async with asyncio.timeout(MAX_BODY_S):
            while part := await self._reader.readany():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise RejectedAnswerError(f"the store's response exceeds the limit of {MAX_BODY_BYTES:,} bytes")
        return bytes(body)


async def _reject_redirect_to_other_host(_session: Any, _context: Any, params: Any) -> None:
    here, headers = params.url, params.response.headers
    to = here.join(type(here)(headers.get("Location") or headers.get("URI") or ""))  # as aiohttp reads them
    if (to.scheme, to.host, to.port) != (here.scheme, here.host, here.port):
        raise RejectedAnswerError(
            f"the store redirects to '{to.scheme}://{to.host}', and redirects to another scheme or host are not followed; "
            f"if you trust it, use that address"
        )


@functools.cache
def _session_limits() -> dict[str, Any]:
    """Return arguments of an aiohttp.ClientSession; only the drivers of remote stores import aiohttp."""
    import aiohttp

    class LimitedResponse(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            self.content = LimitedReader(self.content)  # pyright: ignore[reportAttributeAccessIssue]
            return self

    redirects = aiohttp.TraceConfig()
    redirects.on_request_redirect.append(_reject_redirect_to_other_host)
    redirects.freeze()
    return {"response_class": LimitedResponse, "trace_configs": [redirects]}


@functools.cache
def _limited_s3_session() -> type:
    """Return an `http_session_cls` with the limits, for which aiobotocore has no option."""
    from aiobotocore.httpsession import AIOHTTPSession

    class LimitedSession(AIOHTTPSession):
        async def _get_session(self, proxy_url: Any) -> Any:
            session = await super()._get_session(proxy_url)
            limits = _session_limits()
            if session._response_class is not limits["response_class"]:
                session._response_class = limits["response_class"]
                session.trace_configs.extend(limits["trace_configs"])
            return session

    return LimitedSession
