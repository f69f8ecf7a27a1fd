"""A command in a session of its own: who belongs to it, and the end of all of them.

Ray starts a dozen processes below a driver, and some outlive it for seconds. They may lose their parent and change
their title, but they stay in the session that the command was started in.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

POLL_S = 0.1
END_S = 30.0
"""How long killed processes may take to be gone."""
TAIL_LINES = 15


def processes_in(session: int) -> dict[int, str]:
    """Pid -> title of what lives in a session, in the order of pids; the dead that nobody waited for are left out."""
    titles = {}
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # gone meanwhile
            if os.getsid(pid) == session and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                titles[pid] = " ".join(process.cmdline()).strip()
    return titles


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Inside, a request to end (SIGTERM, a closed terminal) is a KeyboardInterrupt: what was started is ended first."""
    if threading.current_thread() is not threading.main_thread():  # python allows handlers there only
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """One start of a command, and everything that it starts in turn; `close` ends all of them.

    The command's own process is not waited for before that: so its number stays taken, and no stranger's session can
    have it.
    """

    def __init__(self, command: Sequence[str], output: Path, *, env: Mapping[str, str]) -> None:
        self._output = output
        self.begin_s = time.time()
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )
        self.pid = self._process.pid

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, title: str) -> list[int]:
        """Pids of the processes that have this in their title."""
        return [pid for pid, found in processes_in(self.pid).items() if title in found]

    def exit_code(self) -> int | None:
        """None while the command runs; below 0 the signal that ended it."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def kill_command(self) -> None:
        """SIGKILL to the command alone; what it started is left as a crash would leave it."""
        os.kill(self.pid, signal.SIGKILL)
        while self.exit_code() is None:
            time.sleep(0.01)

    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        until_s = time.monotonic() + END_S
        while left := processes_in(self.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until_s:
                raise RuntimeError(f"processes {sorted(left)} live {END_S:g} s after SIGKILL; end them by hand")
            time.sleep(POLL_S)
        self._process.wait()
