"""Hub repositories: the one place that may touch the network, and only for a name the user gave.

The token comes from the environment (HF_TOKEN or a stored login) inside huggingface_hub and is never passed
on, printed or stored. HF_HUB_OFFLINE is honoured by the library.
"""

from collections.abc import Callable
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
