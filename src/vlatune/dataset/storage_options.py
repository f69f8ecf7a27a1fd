"""`--dataset.storage_options`: what fsspec needs to reach a dataset, without what must stay secret.

A run's settings are written to config.json, to checkpoints and to the report, and are seen in a list of processes. So
secrets are refused here, by the names of their keys, and belong into the environment or a profile.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vlatune.outgoing import has_secret

SECRET_WORDS = ("key", "secret", "token", "pass", "sas", "credential", "connection_string", "auth", "cookie", "header")
"""Parts of names of options that hold secrets in the drivers of fsspec: key, account_key, sas_token, password, ..."""
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
    for name in _secret_names(options):
        raise ValueError(
            f"{FLAG}: '{name}' looks like a secret, and a run's settings are written to its folder; give it in the environment "
            f"(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...) or name a profile; see docs/remote_data.md"
        )
    return options


def _secret_names(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of options that are secrets, or URLs with a password in them, at any depth."""
    for name, value in options.items():
        full = f"{prefix}{name}"
        if _is_secret(name, value):
            yield full
        elif isinstance(value, Mapping):
            yield from _secret_names(value, f"{full}.")
        elif isinstance(value, list):
            nested = {str(number): one for number, one in enumerate(value) if isinstance(one, Mapping | str)}
            yield from _secret_names(nested, f"{full}.")


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or value in NO_SECRETS:
        return False
    return (isinstance(value, str) and has_secret(value)) or any(word in name.lower() for word in SECRET_WORDS)
