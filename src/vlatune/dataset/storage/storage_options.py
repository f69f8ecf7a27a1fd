"""`--dataset.storage_options`: what fsspec needs to reach a dataset, without what must stay secret.

A run's settings are written to config.json, to checkpoints and to the report, and are seen in a list of processes. So
secrets are refused here, by the names of their keys, and belong into the environment or a profile. Where they are
allowed (`read_lerobot`), the same names say what is cut out of messages.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vlatune.outgoing import CUT, USER_AND_PASSWORD, has_secret, is_secret_name

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
