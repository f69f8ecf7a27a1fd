"""Wait for a condition, with a deadline."""

import time
from collections.abc import Callable

POLL_S = 0.02


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, describe: Callable[[], str] = lambda: ""
) -> None:
    """Return as soon as the condition is true; fail with a description after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still not true after {timeout_s:g} s: {describe()}"
        time.sleep(POLL_S)
