"""fsspec filesystems, one per process and set of options, made for reading datasets.

Instances are shared by the threads of a process, so that connections are reused, and never cross a fork. Listings
are not cached: what is in the store now is what is seen. Retries are ours alone (remote_retry.py): those of botocore
and s3fs are off, as three loops inside each other would try 200 times.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.dircache import DirCache
from fsspec.utils import tokenize

from vlatune.dataset.storage.storage_options import cut_out, secrets_in
from vlatune.errors import did_you_mean

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
