"""Hub repositories: the one place that may touch the network, and only for a name the user gave.

The token comes from the environment (HF_TOKEN or a stored login) inside huggingface_hub and is never passed
on, printed or stored. HF_HUB_OFFLINE is honoured: by the library where something is fetched, here where something is pushed.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def fetch_dataset(repository: str, revision: str | None) -> Path:
    """A dataset repository as a snapshot in the hub's cache."""
    return fetch(repository, lambda hub: hub.snapshot_download(repository, repo_type="dataset", revision=revision))


def fetch(repository: str, call: Callable[[Any], str]) -> Path:
    """What `call` makes of huggingface_hub; every way in which that fails is explained in one line."""
    import huggingface_hub

    try:
        return Path(call(huggingface_hub))
    except Exception as error:  # the library raises many kinds; each means: this repository cannot be had now
        raise ValueError(
            f"hub repository '{repository}' cannot be fetched: {_why(error, repository)}; or give a local folder"
        ) from error


def _why(error: Exception, repository: str) -> str:
    """The reason and what to do about it, in one line; of a token only whether there is one."""
    import huggingface_hub
    from huggingface_hub import errors

    token = "the token that is set does not suffice" if huggingface_hub.get_token() else "no token is set"
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated and {token}; ask for access on its page and set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub does not know it, or it is private and {token}; check the name, and set HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; check --policy.revision (a branch, a tag or a commit)"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"a file is missing in it ({_first_line(error)}); check the name"
    answer = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
    if isinstance(answer, errors.HfHubHTTPError):
        return f"the hub answered {answer.response.status_code}; check HF_TOKEN ({token}), or try again later"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "the hub cannot be reached, nor is all of it in the cache; check the network, HF_HUB_OFFLINE and HF_HOME"
    return f"{type(error).__name__}: {_first_line(error)}; check the name, the network and HF_TOKEN ({token})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_pushable(repository: str) -> None:
    """Refuse what cannot be pushed, without a request: a name that is none, offline mode, no token."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    flag = f"--push_to_hub={repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{flag}: no name of a hub repository ({_first_line(error)}); give owner/name") from None
    if "/" not in repository:
        raise ValueError(f"{flag}: whose? give owner/name, as me/{repository}")
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"{flag}: HF_HUB_OFFLINE is set, so nothing is sent; unset it, or leave the flag out and push the folder from elsewhere"
        )
    if not huggingface_hub.get_token():
        raise ValueError(f"{flag}: no token is set; set HF_TOKEN to one that may write to it, or run `hf auth login`")


def open_repository(repository: str, *, private: bool) -> None:
    """Make the model repository where there is none; one that others can read is refused where a private one is wanted."""

    def create(hub: Any) -> bool:
        hub.create_repo(repository, private=private, exist_ok=True)
        return bool(hub.model_info(repository).private)

    if not _pushing(repository, create) and private:
        raise ValueError(
            f"--push_to_hub={repository}: it is there and everybody can read it; give --hub_private=false if that is meant, or another name"
        )


def push(repository: str, files: Mapping[str, Path], message: str) -> str:
    """All files in one commit, under the names that they have as keys; the address of the repository."""
    from huggingface_hub import constants

    def send(hub: Any) -> str:
        added = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        hub.create_commit(repository, added, commit_message=message)
        return f"{constants.ENDPOINT}/{repository}"

    return _pushing(repository, send)


def _pushing[T](repository: str, call: Callable[[Any], T]) -> T:
    """What `call` makes of huggingface_hub; every way in which that fails is explained in one line."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return call(huggingface_hub)
    except Exception as error:  # the library raises many kinds; each means: nothing is pushed now
        raise RuntimeError(f"hub repository '{repository}': cannot be pushed to: {_why_not_pushed(error)}") from error


def _why_not_pushed(error: Exception) -> str:
    from huggingface_hub import errors

    answer = next((one for one in (error, error.__cause__) if isinstance(one, errors.HfHubHTTPError)), None)
    status = answer.response.status_code if answer else None
    if status == 401:
        return "the hub does not know the token; set HF_TOKEN to one that may write to it"
    if status in (403, 404):
        return "the token may not write there; check the owner's name, and set HF_TOKEN to a token with write access"
    if status is not None:
        return f"the hub answered {status}; try again later"
    return f"{type(error).__name__}: {_first_line(error)}; check the network and HF_ENDPOINT, and try again"
