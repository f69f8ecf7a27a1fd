"""Terminal output with secrets redacted and control characters replaced.

Messages quote file names, instructions and addresses from untrusted sources, and library errors
that quote requests. All output goes through `say` or `warn`, logs through `redacted`. rich is
imported only if there is a terminal for a progress bar.
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
"""Substrings of secret names: fsspec options (account_key, sas_token, ...), queries, variables."""
SHORT_WORDS = ("pw", "pwd", "jwt", "pem", "bearer", "sig")
"""Secret names that count only as a separate word (`user_pw`, but not `pwm` or `sigma`)."""
NO_SECRETS = ("pwd", "oldpwd")
"""Shell variables that are not secret."""
USER_AND_PASSWORD = re.compile(r"(://)[^/@\s'\"]*:(?!\d{1,5}(?:[/?#]|$))(?P<password>[^@\s'\"]*)@")
"""Matches s3://key:sec/ret@bucket, but not the port in http://host:8080/a@b."""
TOKEN_AS_USER = re.compile(r"\b((?:https?|s3a?|hf|gs|gcs)://)[^/:@\s'\"]+@")
"""Matches https://TOKEN@host; in other schemes the part before @ is a user or container (abfs)."""
_NAME = (
    rf"(?![\w-]*tokenizer)(?:[\w-]*(?:{'|'.join(SECRET_WORDS)})[\w-]*|(?:[\w-]*[_-])?(?:{'|'.join(SHORT_WORDS)})(?:[_-][\w-]*)?"
    r"|[\w-]*signature|googleaccessid)"
)
IN_QUERY = re.compile(rf"([?&;]{_NAME}=)[^&;\s'\"]+", re.IGNORECASE)
"""Secrets in queries: presigned URLs of S3 and Google, SAS and connection strings of Azure, etc."""
AS_OPTION = re.compile(
    rf"((?:(?<=['\"]){_NAME}['\"]: ?|(?<![\w.-]){_NAME}=))(?P<quote>['\"])(?:(?!(?P=quote)).)+(?P=quote)", re.IGNORECASE
)
"""Matches {'secret': 'x'} and secret='x', as in errors that show options."""
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
IN_TEXT = re.compile(
    r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{12,}|(\b(?:accountkey|sharedaccesssignature)=)[^;\s'\"]+"
    r"|()\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)",
    re.IGNORECASE,
)
"""Matches headers, Azure connection strings, and tokens with a recognisable format."""
MIN_SECRET_CHARS = 8
"""Shorter values are words such as `true`."""


def is_secret_name(name: str) -> bool:
    low = name.lower()
    return any(word in low for word in SECRET_WORDS) or any(
        word in re.split(r"[^a-z0-9]+", low) for word in SHORT_WORDS
    )


def has_secret(url: str) -> bool:
    """True if a URL contains a password, a token or a signature."""
    return any(pattern.search(url) for pattern in (USER_AND_PASSWORD, TOKEN_AS_USER, IN_QUERY))


def redacted(text: str) -> str:
    """Replace everything that looks like a secret, and the values of secret variables."""
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
    if len(value) < MIN_SECRET_CHARS or name.lower() in NO_SECRETS or not is_secret_name(name):
        return False
    try:
        return not Path(value).exists()  # the path of a key is not secret
    except (OSError, ValueError):  # too long for a file name, as keys are
        return True


def printable(text: str) -> str:
    """Replace control characters by '?': no escape sequences, newlines or direction changes."""
    return "".join(one if one.isprintable() else "?" for one in text)


def say(text: str) -> None:
    """Print lines to stdout."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Print lines to stderr."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    lines = redacted(text).split("\n")
    stream.write("\n".join(printable(line) for line in lines) + "\n")
    stream.flush()


def is_terminal(stream: TextIO) -> bool:
    """True if the stream can redraw lines; the output of a notebook's `!command` can only append."""
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """Yield `show(done, total, text="")`, which shows a progress bar on stderr.

    Does nothing if stderr is not a terminal.
    """
    bars: list[Any] = []
    with ExitStack() as stack:

        def show(done: int, total: int, text: str = "") -> None:
            if not bars:
                bars.append(stack.enter_context(make_bar(sys.stderr)))
                bars[0].add_task(what, text="")
            bars[0].update(bars[0].task_ids[0], completed=done, total=total, text=printable(text))

        yield show if is_terminal(sys.stderr) else lambda *_: None


def make_bar(stream: TextIO, *, transient: bool = False) -> Any:
    """Return a rich progress bar with a field for text; other output appears above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(file=stream),
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
