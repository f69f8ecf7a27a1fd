"""Text on its way out of the process: secrets are cut out of it, and a terminal shows it instead of obeying it.

Messages quote file names, sentences and addresses that strangers chose, and errors of libraries that quote requests.
All that is printed goes through `say` or `warn`; what is kept in logs goes through `redacted`. Bars are rich's, which is
imported when there is a terminal to draw one on.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

CUT = "***"
SECRET_WORDS = ("key", "secret", "token", "pass", "sas", "credential", "connection_string", "auth", "cookie", "header")
"""Parts of names of what is secret: options of fsspec's drivers (account_key, sas_token, ...), queries, variables."""
SHORT_WORDS = ("pw", "pwd", "jwt", "pem", "bearer", "sig")
"""The same, where they are a word of the name by themselves (`user_pw`): as parts they are in others (`pwm`, `sigma`)."""
NO_SECRETS = ("pwd", "oldpwd")
"""Variables of every shell."""
USER_AND_PASSWORD = re.compile(r"(://)[^/@\s'\"]*:(?!\d{1,5}(?:[/?#]|$))(?P<password>[^@\s'\"]*)@")
"""s3://key:sec/ret@bucket; not the port in http://host:8080/a@b."""
TOKEN_AS_USER = re.compile(r"\b((?:https?|s3a?|hf|gs|gcs)://)[^/:@\s'\"]+@")
"""https://TOKEN@host; in other schemes a name before the @ is a user's, or a container's (abfs)."""
_NAME = (
    rf"(?![\w-]*tokenizer)(?:[\w-]*(?:{'|'.join(SECRET_WORDS)})[\w-]*|(?:[\w-]*[_-])?(?:{'|'.join(SHORT_WORDS)})(?:[_-][\w-]*)?"
    r"|[\w-]*signature|googleaccessid)"
)
IN_QUERY = re.compile(rf"([?&;]{_NAME}=)[^&;\s'\"]+", re.IGNORECASE)
"""Presigned addresses of S3 and Google, SAS of Azure, its connection strings, and what others put into a query."""
AS_OPTION = re.compile(
    rf"((?:(?<=['\"]){_NAME}['\"]: ?|(?<![\w.-]){_NAME}=))(?P<quote>['\"])(?:(?!(?P=quote)).)+(?P=quote)", re.IGNORECASE
)
"""{'secret': 'x'} and secret='x', as errors show the options that they were given."""
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
IN_TEXT = re.compile(
    r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{12,}|(\b(?:accountkey|sharedaccesssignature)=)[^;\s'\"]+"
    r"|()\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)",
    re.IGNORECASE,
)
"""Headers, Azure's connection strings, and tokens that have a form of their own."""
MIN_SECRET_CHARS = 8
"""Shorter values of such variables are words like `true`; a path is where the secret is kept (SSH_AUTH_SOCK)."""


def is_secret_name(name: str) -> bool:
    low = name.lower()
    return any(word in low for word in SECRET_WORDS) or any(
        word in re.split(r"[^a-z0-9]+", low) for word in SHORT_WORDS
    )


def has_secret(url: str) -> bool:
    """Whether an address carries a password, a token or a signature."""
    return any(pattern.search(url) for pattern in (USER_AND_PASSWORD, TOKEN_AS_USER, IN_QUERY))


def redacted(text: str) -> str:
    """The text without what looks like a secret, or is one: the value of a variable such as AWS_SECRET_ACCESS_KEY."""
    for name, value in os.environ.items():
        if value in text and _is_secret_variable(name, value):
            text = text.replace(value, CUT)
    text = PRIVATE_KEY.sub(CUT, text)
    text = USER_AND_PASSWORD.sub(rf"\1{CUT}@", text)
    text = TOKEN_AS_USER.sub(rf"\1{CUT}@", text)
    text = IN_QUERY.sub(rf"\1{CUT}", text)
    text = AS_OPTION.sub(rf"\1\g<quote>{CUT}\g<quote>", text)
    return IN_TEXT.sub(lambda found: f"{found[1] or found[2] or ''}{CUT}", text)


def _is_secret_variable(name: str, value: str) -> bool:
    is_named_so = name.lower() not in NO_SECRETS and is_secret_name(name)
    return len(value) >= MIN_SECRET_CHARS and is_named_so and not _is_path(value)


def _is_path(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long for a name, as a key is
        return False


def printable(text: str) -> str:
    """Control characters and the like as '?': no escape sequence, no new line, no change of direction."""
    return "".join(one if one.isprintable() else "?" for one in text)


def say(text: str) -> None:
    """Lines for the person, to stdout."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Lines for the person, to stderr."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    lines = redacted(text).split("\n")
    stream.write("\n".join(printable(line) for line in lines) + "\n")
    stream.flush()


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """`show(done, total)` draws a bar on stderr, from its first call to the block's end; nothing where that is no terminal."""
    bars: list[Any] = []
    with ExitStack() as drawn:

        def show(done: int, total: int) -> None:
            if not bars:
                bars.append(drawn.enter_context(make_bar(sys.stderr)))
                bars[0].add_task(what, told="")
            bars[0].update(bars[0].task_ids[0], completed=done, total=total)

        yield show if sys.stderr.isatty() else lambda done, total: None


def make_view(stream: TextIO) -> Any:
    """rich's region at the end of a terminal that is drawn again and again, and gone when it ends; lines come above it, as
    with `make_bar`.
    """
    from rich.console import Console
    from rich.live import Live

    return Live(
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


def make_bar(stream: TextIO) -> Any:
    """rich's, with room for a text (`told`) behind it. Lines that are printed meanwhile to a terminal come above it; those
    to a file stay what they are.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=Console(file=stream),
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
