"""fsspec filesystems, one per process and set of options, and `--dataset.storage_options`, which make them.

Instances are shared by the threads of a process, so that connections are reused, and never cross a fork. Listings
are not cached: what is in the store now is what is seen. Retries are ours alone (remote_retry.py): those of botocore
and s3fs are off, as three loops inside each other would try 200 times.

A run's settings are written to config.json, to checkpoints and to the report, and are seen in a list of processes. So
secrets are refused among the options, by the names of their keys, and belong into the environment or a profile. Where they
are allowed (`read_lerobot`), the same names say what is cut out of messages.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec
from fsspec.dircache import DirCache
from fsspec.utils import tokenize

from vlatune.console import CUT, USER_AND_PASSWORD, has_secret, is_secret_name
from vlatune.errors import did_you_mean

NO_SECRETS = ("anon", "google_default", "cloud", "cache")
"""Values of `token` that name a way to find credentials (gcsfs)."""
FLAG = "--dataset.storage_options"


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """The JSON object in a flag; its text is never part of a message, as it may hold what should not be there."""
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ValueError(f'{FLAG}: expected a JSON object, as {{"endpoint_url": "https://store.example"}}')
    for name, _ in _secrets(options):
        raise ValueError(
            f"{FLAG}: '{name}' looks like a secret, and a run's settings are written to its folder; give it in the environment "
            f"(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...) or name a profile; see docs/remote_data.md"
        )
    return options


def secrets_in(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts that no message may show, the longest first: one may be part of another."""
    found = {part for _, value in _secrets(options) for text in _texts(value) for part in (text, *_inner(text))}
    return tuple(sorted(found, key=lambda text: (-len(text), text)))


def cut_out(secrets: Iterable[str], text: str) -> str:
    for secret in secrets:
        text = text.replace(secret, CUT)
    return text


def _inner(text: str) -> Iterator[str]:
    """Secrets in a secret, which a message may show alone: a URL's password, AccountKey in a connection string."""
    found = USER_AND_PASSWORD.search(text)
    if found and found["password"]:
        yield found["password"]
    for part in text.split(";") if ";" in text else ():
        name, _, value = part.partition("=")
        if value and _is_secret(name, value):
            yield value


def _secrets(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options that are secrets, or URLs with a password in them, at any depth, with their values."""
    for name, value in options.items():
        full = f"{prefix}{name}"
        if _is_secret(str(name), value):
            yield full, value
        elif isinstance(value, Mapping):
            yield from _secrets(value, f"{full}.")
        elif isinstance(value, list | tuple):
            nested = {str(number): one for number, one in enumerate(value) if isinstance(one, Mapping | str)}
            yield from _secrets(nested, f"{full}.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, Mapping):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in _texts(one))


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in NO_SECRETS):
        return False
    return (isinstance(value, str) and has_secret(value)) or is_secret_name(name)


EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Scheme -> the extra of vlatune that installs its driver."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
"""Longest silence of an S3 server; `storage_options={"config_kwargs": {"read_timeout": ...}}` overrides it."""

CREDENTIALS = ("AWS_", "GOOGLE_", "GCSFS_", "AZURE_", "HF_", "FSSPEC_")
"""Beginnings of the variables that drivers find credentials, profiles and addresses in."""

_instances: dict[tuple, Any] = {}
"""By all that they were made of."""


def filesystem_for(url: str, options: Mapping[str, Any]) -> Any:
    """The process's filesystem for a URL."""
    kind = _filesystem_class(url)
    thread = 0 if kind.async_impl else threading.get_ident()  # the async ones do their work on a thread of their own
    start = url if "::" in url else (scheme_of(url), kind._get_kwargs_from_urls(url))
    variables = sorted(one for one in os.environ.items() if one[0].startswith(CREDENTIALS))
    key = (os.getpid(), thread, tokenize(start, dict(options), variables))
    if key not in _instances:
        _instances.setdefault(key, _make(url, options))  # of two threads that come at once, one makes it in vain
    return _instances[key]


def scheme_of(url: str) -> str:
    """`s3` for s3://..., `simplecache` for simplecache::s3://..."""
    return url.partition("://")[0].partition("::")[0]


def version_tag(info: Mapping[str, Any]) -> str | None:
    """What tells two versions of an object apart, from what `fs.info` says of it; None when it says nothing."""
    for name in (
        "ETag",
        "etag",
        "generation",
        "md5Hash",
        "blob_id",
        "LastModified",
        "last_modified",
        "mtime",
        "updated",
        "created",
    ):
        if info.get(name):
            return f"{info[name]}-{info.get('size')}"
    return None


def _filesystem_class(url: str) -> Any:
    scheme = scheme_of(url)
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        name = EXTRAS.get(scheme)
        remedy = f"pip install 'vlatune[{name}]'" if name else str(error)
        raise RuntimeError(f"dataset '{url}': the driver for {scheme}:// is not installed: {remedy}") from error
    except ValueError as error:
        hint = did_you_mean(scheme, fsspec.available_protocols())
        raise ValueError(
            f"dataset '{url}': the scheme '{scheme}' is not known{hint or '; use a folder, s3://, gs:// or hf://'}"
        ) from error


def _make(url: str, options: Mapping[str, Any]) -> Any:
    is_s3 = scheme_of(url) in ("s3", "s3a")
    options = _s3_options(options) if is_s3 else options
    try:
        made, _ = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    except (TypeError, ValueError) as error:  # its text may hold the options
        cause = cut_out(secrets_in(options), str(error))
        cut = cause != str(error)
        raise ValueError(f"dataset '{url}': storage_options do not fit {scheme_of(url)}:// ({cause})") from (
            None if cut else error
        )
    if is_s3:
        made.retries = 1
    if isinstance(getattr(made, "dircache", None), DirCache):
        made.dircache.use_listings_cache = False
    return made


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
    }
    return {**options, "config_kwargs": config | dict(options.get("config_kwargs", {}))}
