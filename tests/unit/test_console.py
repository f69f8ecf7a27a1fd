"""Terminal output: secrets are redacted, control characters replaced; progress bars."""

import io
import sys

import pytest

from vlatune import cli
from vlatune.console import SECRET_WORDS, SHORT_WORDS, has_secret, printable, progress_bar, redacted, say, warn
from vlatune.storage.remote_fs import secrets_in

SECRET = "aaBBcc11dd22ee33ff44"
WITH_SECRET = [
    f"s3://AKIAXYZ:{SECRET}@bucket/x",
    f"s3://AKIAXYZ:aa/BB{SECRET}@bucket/x",
    f"https://{SECRET}@host/x",
    f"https://user:{SECRET}@host:8443/x",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Credential=AKIA&X-Amz-Signature={SECRET}&X-Amz-Date=1",
    f"https://storage.googleapis.com/x?X-Goog-Signature={SECRET}",
    f"https://acct.blob.core.windows.net/c/x?sv=2024-01-01&se=2030&sig={SECRET}",
    f"https://host/x?access_token={SECRET}",
    *(
        f"https://host/x?a=1&{name}={SECRET}"
        for name in ("pw", "user_pw", "pwd", "bearer", "jwt", "pem", "connection_string")
    ),
]
WITHOUT = [
    "s3://bucket/a@2x/b",
    "hf://datasets/owner/name@main/data",
    "abfs://container@account.dfs.core.windows.net/x",
    "http://host:8080/a@b",
    "/data/user:name@host",
    "sftp://me@host/x",
    "https://host/x?revision=main",
    "https://host/x?sigma=1&pwm=2&tokenizer=3",
]


@pytest.mark.parametrize("url", WITH_SECRET)
def test_a_url_with_a_secret_is_redacted(url) -> None:
    assert has_secret(url)
    text = redacted(f"could not read '{url}': 403")
    assert SECRET not in text
    assert "***" in text
    assert text.endswith("': 403")


@pytest.mark.parametrize("url", WITHOUT)
def test_a_url_without_a_secret_is_unchanged(url) -> None:
    assert not has_secret(url)
    assert redacted(f"could not read '{url}': 403") == f"could not read '{url}': 403"


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={SECRET}==;EndpointSuffix=y",
        f"token hf_{SECRET}",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.aaBBcc11dd22ee33ff44",
        f"got {{'anon': False, 'pw': '{SECRET}'}}",
        f'got {{"client_secret": "{SECRET}", "region": "x"}}',
        f"S3FileSystem(key='x', connection_string='{SECRET}')",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
    ],
)
def test_tokens_in_text_are_redacted(text) -> None:
    assert SECRET not in redacted(text)


def test_values_of_secret_variables_are_redacted(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "short")
    assert redacted(f"a{SECRET}b, short") == "a***b, short"


def test_the_path_of_a_secret_is_not_redacted(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    assert redacted(f"no key in {tmp_path}") == f"no key in {tmp_path}"


@pytest.mark.parametrize(
    "text",
    [
        "policy 'x': its key: 'features' is not known",
        "{'tokenizer_name': 'google/paligemma-3b-pt-224'}",
        '--rename_map=\'{"state": "observation.state"}\'',
    ],
)
def test_similar_words_are_not_redacted(text) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("word", [*SECRET_WORDS, *SHORT_WORDS])
def test_every_secret_word_applies_to_urls_variables_and_options(word, monkeypatch) -> None:
    url = f"https://host/x?my_{word}={SECRET}"
    assert has_secret(url)
    assert SECRET not in redacted(url)
    monkeypatch.setenv(f"MY_{word.upper()}", SECRET)
    assert redacted(f"a {SECRET} b") == "a *** b"
    assert secrets_in({f"my_{word}": SECRET}) == (SECRET,)


def test_control_characters_are_replaced(capsys) -> None:
    assert printable("a\x1b[31mb\x9b2Jc\rd\u202ee\x07") == "a?[31mb?2Jc?d?e?"
    say("one\x1b[2J\ntwo é 手")
    assert capsys.readouterr().out == "one?[2J\ntwo é 手\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SHOW_CURSOR = "\x1b[?25h"


def test_a_terminal_shows_a_progress_bar(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    small = ["--episodes=2", "--frames=2", "--cameras=1", "--height=64", "--width=64"]
    assert cli.main(["make-dataset", str(tmp_path / "dataset"), *small]) == 0
    shown = terminal.getvalue()
    assert "episodes" in shown
    assert "2/2" in shown
    assert capsys.readouterr().out == f"{tmp_path / 'dataset'}: 2 episodes\n"


def test_a_failure_restores_the_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def work() -> None:
        with progress_bar("files [bold]x") as show:
            show(1, 3)
            warn("a line in between")
            say("for the pipe")
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        work()
    assert sys.stderr is terminal
    assert "files [bold]x" in terminal.getvalue()  # text, no markup
    assert "a line in between" in terminal.getvalue()
    assert SHOW_CURSOR in terminal.getvalue().splitlines()[-1]
    assert capsys.readouterr().out == "for the pipe\n"
