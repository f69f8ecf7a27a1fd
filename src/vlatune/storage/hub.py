"""Access to Hugging Face Hub repositories that the user names.

The token comes from the environment (HF_TOKEN or a stored login) inside huggingface_hub and is
never passed on, printed or stored. HF_HUB_OFFLINE applies to fetching (in the library) and to
pushing (here).
"""

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlatune.console import warn
from vlatune.errors import RejectedAnswerError

MAX_UNSTATED_BYTES = 64 << 20


def fetch_dataset(repository: str, revision: str | None) -> Path:
    """Fetch a dataset repository into the hub's cache."""
    return fetch(repository, lambda hub: hub.snapshot_download(repository, repo_type="dataset", revision=revision))


def fetch(repository: str, call: Callable[[Any], str]) -> Path:
    """Return the path that `call` fetches; any failure becomes a one-line message."""
    import huggingface_hub

    _limit_responses()
    try:
        with _retries_in_one_line(repository):
            return Path(call(huggingface_hub))
    except Exception as error:  # the library raises many types; each means that the repository is unavailable
        raise ValueError(
            f"hub repository '{repository}' cannot be fetched: {_why(error)}; or give a local folder"
        ) from error


def _limit_responses() -> None:
    """Limit responses without a stated length; files on the hub state theirs."""
    import httpx
    import huggingface_hub

    class LimitedStream(httpx.SyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream, self.close = stream, stream.close

        def __iter__(self) -> Iterator[bytes]:
            total = 0
            for part in self._stream:
                total += len(part)
                if total > MAX_UNSTATED_BYTES:
                    raise RejectedAnswerError(
                        f"the hub's response exceeds the limit of {MAX_UNSTATED_BYTES:,} bytes without a stated length"
                    )
                yield part

    def limit(response: httpx.Response) -> None:
        if "Content-Length" not in response.headers:
            response.stream = LimitedStream(response.stream)

    session = huggingface_hub.get_session()
    others = [hook for hook in session.event_hooks["response"] if hook.__qualname__ != limit.__qualname__]
    session.event_hooks = {**session.event_hooks, "response": [*others, limit]}


@contextmanager
def _retries_in_one_line(repository: str) -> Iterator[None]:
    """Log one line for all retries of huggingface_hub; show progress bars only on a terminal."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as library

    if not sys.stderr.isatty():
        disable_progress_bars()
    number = itertools.count()  # called from several threads; next() is atomic

    def is_other(record: logging.LogRecord) -> bool:
        if not record.name.endswith("._http"):
            return True
        if next(number) == 0:
            reason = record.getMessage().partition(" thrown while requesting")[0].strip("'")
            warn(f"vlatune: hub repository '{repository}': {reason}; retrying for up to half a minute")
        return False

    handlers = library.get_logger().handlers
    for handler in handlers:
        handler.addFilter(is_other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)


def _why(error: Exception) -> str:
    """Return the reason and remedy in one line, and of the token only whether it is set."""
    import huggingface_hub
    from huggingface_hub import errors

    token = "the token that is set has no access" if huggingface_hub.get_token() else "no token is set"
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated and {token}; request access on its page and set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"it does not exist, or it is private and {token}; check the name, and set HF_TOKEN if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; check --policy.revision (a branch, a tag or a commit)"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"a file is missing in it ({_first_line(error)}); check the name"
    if status := _status(error):
        return f"the hub returned status {status}; check HF_TOKEN ({token}), or try again later"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "the hub cannot be reached and the cache is incomplete; check the network, HF_HUB_OFFLINE and HF_HOME"
    return f"{type(error).__name__}: {_first_line(error)}; check the name, the network and HF_TOKEN ({token})"


def _why_not_pushed(error: Exception) -> str:
    status = _status(error)
    if status in (401, 403, 404):
        return "the token has no write access; check the owner's name, and set HF_TOKEN to a token that may write to it"
    if status is not None:
        return f"the hub returned status {status}; try again later"
    return f"{type(error).__name__}: {_first_line(error)}; check the network and HF_ENDPOINT, and try again"


def _status(error: Exception) -> int | None:
    from huggingface_hub.errors import HfHubHTTPError

    found = next((one for one in (error, error.__cause__) if isinstance(one, HfHubHTTPError)), None)
    return found.response.status_code if found else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_pushable(repository: str) -> None:
    """Reject an invalid name, offline mode or a missing token, without a request."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    flag = f"--push_to_hub={repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{flag}: invalid repository name ({_first_line(error)}); use owner/name") from None
    if "/" not in repository:
        raise ValueError(f"{flag}: the owner is missing; use owner/name, e.g. me/{repository}")
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"{flag}: HF_HUB_OFFLINE is set; unset it, or omit the flag and push the folder from another machine"
        )
    if not huggingface_hub.get_token():
        raise ValueError(
            f"{flag}: no token is set; set HF_TOKEN to a token that may write to it, or run `hf auth login`"
        )


def open_repository(repository: str, *, private: bool) -> None:
    """Create the model repository if needed; reject a public one if `private` is set."""

    def create(hub: Any) -> bool:
        hub.create_repo(repository, private=private, exist_ok=True)
        return bool(hub.model_info(repository).private)

    if not _pushing(repository, create) and private:
        raise ValueError(
            f"--push_to_hub={repository}: the repository exists and is public; use --hub_private=false or another name"
        )


def push(repository: str, files: Mapping[str, Path], message: str) -> str:
    """Push all files (by name in the repository) in one commit; return the repository's address."""
    from huggingface_hub import constants

    def send(hub: Any) -> str:
        added = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        hub.create_commit(repository, added, commit_message=message)
        return f"{constants.ENDPOINT}/{repository}"

    return _pushing(repository, send)


def _pushing[T](repository: str, call: Callable[[Any], T]) -> T:
    """Return the result of `call`; any failure becomes a one-line message."""
    import huggingface_hub

    try:
        with _retries_in_one_line(repository):
            return call(huggingface_hub)
    except Exception as error:  # the library raises many types; each means that nothing was pushed
        raise RuntimeError(f"hub repository '{repository}': cannot be pushed to: {_why_not_pushed(error)}") from error
