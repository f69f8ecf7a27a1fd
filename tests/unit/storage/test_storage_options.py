"""`--dataset.storage_options`: a JSON object without secrets."""

import json
import traceback

import pytest

from vlatune.storage.remote_fs import parse_storage_options, secrets_in
from vlatune.storage.remote_retry import retried
from vlatune.storage.root import Root


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"endpoint_url": "https://store.example:9000"},
        {"anon": True, "client_kwargs": {"region_name": "eu-north-1"}},
        {"profile": "robots", "config_kwargs": {"read_timeout": 60, "s3": {"addressing_style": "path"}}},
        {"token": "anon"},
        {"key": None},
    ],
)
def test_options_without_secrets_are_accepted(options):
    assert parse_storage_options(json.dumps(options)) == options


def test_no_options():
    assert parse_storage_options(None) == {}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"key": "AKIAXYZ"}, "key"),
        ({"secret": "hunter2xyz"}, "secret"),
        ({"token": "hf_xyz"}, "token"),
        ({"token": {"private": "xyz"}}, "token.private"),
        ({"password": "xyz"}, "password"),
        ({"account_key": "xyz"}, "account_key"),
        ({"sas_token": "xyz"}, "sas_token"),
        ({"connection_string": "xyz"}, "connection_string"),
        ({"client_kwargs": {"aws_secret_access_key": "xyz"}}, "client_kwargs.aws_secret_access_key"),
        ({"endpoint_url": "https://me:xyz@store.example"}, "endpoint_url"),
        ({"proxies": ["https://me:xyz@store.example"]}, "proxies.0"),
    ],
)
def test_secret_options_are_rejected_without_printing_them(options, name):
    with pytest.raises(ValueError, match=f"--dataset.storage_options: '{name}' looks like a secret") as caught:
        parse_storage_options(json.dumps(options))
    assert "xyz" not in str(caught.value).lower()
    assert "set it in the environment" in str(caught.value)


@pytest.mark.parametrize("text", ["", "endpoint_url=xyz", "[]", "3", '{"key": "xyz"', "{'key': 'xyz'}"])
def test_other_values_are_rejected_without_printing_them(text):
    with pytest.raises(ValueError, match=r"--dataset.storage_options: expected a JSON object") as caught:
        parse_storage_options(text)
    assert "xyz" not in str(caught.value)


SECRETS = {
    "connection_string": "DefaultEndpointsProtocol=https;AccountName=robots;AccountKey=xyz1;",
    "sas": "xyz2",
    "credential": ["xyz3"],
    "headers": {"Authorization": "Bearer xyz4"},
    "client_kwargs": {"aws_secret_access_key": "xyz5"},
    "endpoint_url": "https://me:xyz6@store.example",
    "proxies": ["https://me:xyz7@store.example"],
}


@pytest.mark.parametrize("secret", [*(str(value) for value in SECRETS.values()), *(f"xyz{n}" for n in (1, 6))])
@pytest.mark.parametrize("error", [ConnectionError, ValueError, PermissionError, KeyError])
def test_secrets_are_removed_from_errors(secret, error, monkeypatch):
    """Flags and messages use one list: what a flag may not hold, no message shows."""
    monkeypatch.setattr("vlatune.storage.remote_retry.MAX_TRIES", 1)

    def fail() -> None:
        raise error("x" * 295 + secret)  # also where the message is cut short

    with pytest.raises(Exception, match=r"x+") as caught:
        retried(fail, "'s3://bucket/x'", secrets=secrets_in(SECRETS))
    assert not isinstance(caught.value.__cause__, error)
    assert "xyz" not in "".join(traceback.format_exception(caught.value))


def test_secrets_are_removed_from_errors_of_drivers(monkeypatch):
    def reject(*_, **options):
        raise ValueError(f"cannot parse {options['connection_string']}")

    monkeypatch.setattr("fsspec.url_to_fs", reject)
    with pytest.raises(ValueError, match=r"storage_options do not fit memory://") as caught:
        Root("memory://x", SECRETS).filesystem()
    assert "xyz" not in "".join(traceback.format_exception(caught.value))
