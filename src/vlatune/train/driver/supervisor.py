"""[ray] The driver's eye on a worker group while Ray Train runs it.

Ray Train tells when a worker is dead. What it does not tell: that one hangs or is stopped (the group is ended, with all
stacks in logs/), that this process was asked to end (SIGTERM, Ctrl-C: the workers save and stop), that a node is about to be
taken away (the workers save and go on), that a part of our own cluster died without which no other can go on.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlatune.bounded_queue import BoundedQueue
from vlatune.config import RunConfig
from vlatune.errors import TerminatedError
from vlatune.files import write_text
from vlatune.ray_internals import FIT_THREAD, draining_nodes
from vlatune.report.run_folder import RunFolder
from vlatune.train.driver.cluster import Cluster
from vlatune.train.failures import dump_and_kill, root_cause
from vlatune.train.heartbeat import NO_REQUEST, RankState, Request, remove_empty_stacks, stacks_file, start_monitor

LOOK_S = 1.0
STARTING = 3
"""Before its first micro-batch a worker may be still for so many times `hang_timeout_s`: it loads the model."""
END_S = 60.0
"""How long Ray Train may take to notice that the workers were killed, and a node to answer."""
LOSE_S = 20.0
"""The same after its cluster died. Ray ends a process that has heard nothing from its server for a minute."""
CANCEL_S = 5.0
"""How long Ray Train may take to end by itself where nobody waits for its workers."""
RUNNING = object()


class Ending(threading.Event):
    """Set when this process was asked to end."""

    number = signal.SIGTERM
    """The signal that asked first."""
    is_urgent = False
    """A Ctrl-C came after that."""

    @property
    def asked(self) -> str:
        return f"asked to end by {'Ctrl-C' if self.number == signal.SIGINT else 'SIGTERM'}"

    def error(self, text: str) -> TerminatedError:
        return TerminatedError(f"{self.asked}{text}", self.number)


class Supervisor:
    """One for all attempts of a run."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        cluster: Cluster,
        terminated: Ending,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.monitor = start_monitor()
        self._config, self._folder, self._cluster, self._say = config, folder, cluster, say
        self._attempt, self._requested, self._began = 0, NO_REQUEST, False
        self._terminated = terminated
        self._told_nodes: set[str] = set()
        self.states: Sequence[RankState] = ()
        """The workers of this attempt, as last heard of; none before they began."""

    def run(self, fit: Callable[[], object], attempt: int, *, cancel: Callable[[], None]) -> None:
        """Call `fit` and watch; raises what it raises, or why the group was ended. `cancel` has `fit` end soon."""
        self._attempt, self._requested, self._began, self.states = attempt, NO_REQUEST, False, ()
        with signals_set(self._terminated):  # a cluster that was started anew has put Ray's handler there again
            outcome = _on_thread(fit)
            try:
                error = self._watch(outcome)
            except BaseException:
                # Whoever asks Ray something after its end, on whatever thread, is ended by it without a word.
                cancel()
                _wait(outcome, CANCEL_S)
                raise
        remove_empty_stacks(self._folder.path)
        if self._terminated.is_set() and self._folder.summary() is None:
            raise self._terminated.error(f"; {_what_is_saved(error)}")
        if error is not None:
            raise error

    def _watch(self, outcome: BoundedQueue) -> BaseException | None:
        """Until `fit` has ended; its error."""
        looked_s, stop_by_s, asked = 0.0, float("inf"), None
        while (error := _poll(outcome)) is RUNNING:
            now_s = time.monotonic()
            if self._terminated.is_urgent:
                raise KeyboardInterrupt
            if now_s > stop_by_s:
                raise self._terminated.error(
                    f"; no checkpoint within --grace_s={self._config.grace_s:g}; the same command goes on from the one before"
                )
            if part := self._cluster.lost_part():
                return self._lose(part, outcome)
            if asked is None and now_s - looked_s >= LOOK_S:
                asked, looked_s = self.monitor.look.remote(self._attempt, self._requested), now_s
            if asked is None or not ray.wait([asked], timeout=0)[0]:
                continue
            states, asked = _answer(asked), None
            self.states = states
            self._began = self._began or bool(states)
            if self._terminated.is_set() and stop_by_s == float("inf"):
                stop_by_s, looked_s = now_s + self._stop(), 0.0
            self._save_before_nodes_go(states)
            if find_hung(states, self._config.hang_timeout_s):
                return self._end(states, outcome)
        return error  # pyright: ignore[reportReturnType]

    def _stop(self) -> float:
        """Have the workers save and stop; how long that may take. What they last told may be two seconds old."""
        if not self._began:
            raise self._terminated.error(" before the workers began; there is nothing new to save")
        again = "; Ctrl-C again ends at once" if self._terminated.number == signal.SIGINT else ""
        self._say(f"{self._terminated.asked}: saving a checkpoint, for at most {self._config.grace_s:g} s{again}")
        self._request(Request.STOP)
        return self._config.grace_s

    def _save_before_nodes_go(self, states: Sequence[RankState]) -> None:
        going = draining_nodes() & {state.node_id for state in states} - self._told_nodes
        if going and not self._terminated.is_set():
            self._told_nodes |= going
            self._say(f"{len(going)} of the workers' nodes will be taken away: saving a checkpoint")
            self._request(Request.SAVE)

    def _request(self, request: Request) -> None:
        """Told with the next look, and with every one after it."""
        self._requested = (self._requested[0] + 1, request)

    def _end(self, states: Sequence[RankState], outcome: BoundedQueue) -> RuntimeError:
        """Kill all workers of the group, which Ray Train then sees, after they have told where they are."""
        texts = {state.rank: self._dump_and_kill(state) for state in states}
        file = self._folder.new_log("hang")
        write_text(file, "\n\n".join(f"rank {rank}: {text}" for rank, text in texts.items()))
        _wait(outcome, END_S)
        how = {rank: text.splitlines()[0] for rank, text in texts.items()}
        hung = find_culprit(states, how)
        return RuntimeError(
            f"rank {hung.rank} did nothing for {hung.still_s:.0f} s (--hang_timeout_s={self._config.hang_timeout_s:g}; "
            f"its process was {how[hung.rank]}); the stacks of all workers are in {file}"
        )

    def _lose(self, part: str, outcome: BoundedQueue) -> RuntimeError:
        self._cluster.end()
        _wait(outcome, LOSE_S)
        return RuntimeError(f"Ray's {part} died")

    def _dump_and_kill(self, state: RankState) -> str:
        here = NodeAffinitySchedulingStrategy(state.node_id, soft=False)
        task = ray.remote(dump_and_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        file: Path = stacks_file(self._folder.path.resolve(), self._attempt, state.rank)
        try:
            return ray.get(task.remote(state.pid, file), timeout=END_S)
        except RayError as error:
            return f"out of reach ({type(error).__name__})"


def _what_is_saved(error: BaseException | None) -> str:
    if error is None:
        return "all is saved, and the same command goes on from there"
    return f"the workers failed while they saved ({root_cause(error)}); the same command goes on from the checkpoint before"


def _answer(asked: Any) -> list[RankState]:
    try:
        return ray.get(asked)
    except RayError:  # the monitor died; it comes back, and the next look will tell
        return []


def find_hung(states: Sequence[RankState], timeout_s: float) -> list[RankState]:
    """Workers that have been still for too long; one that still loads gets more time."""
    return [one for one in states if 0 < timeout_s * (1 if one.moves else STARTING) < one.still_s]


def find_culprit(states: Sequence[RankState], how: Mapping[int, str]) -> RankState:
    """Where one stands, the others wait for it: one that is not running, else the one that has done least."""
    return min(states, key=lambda state: (how[state.rank] == "running", state.moves, -state.still_s))


def _on_thread(call: Callable[[], object]) -> BoundedQueue:
    """Run `call` beside this thread; its error, or None, comes out of the queue. On the main thread Ray Train would catch
    Ctrl-C itself and take its time.
    """
    outcome = BoundedQueue(1)

    def run() -> None:
        try:
            call()
            outcome.put(None)
        except BaseException as error:  # carried over to the waiting thread
            outcome.put(error)

    threading.Thread(target=run, name=FIT_THREAD, daemon=True).start()
    return outcome


def _poll(outcome: BoundedQueue) -> Any:
    """The outcome, or RUNNING; with a timeout, so that Python gets to see signals."""
    try:
        return outcome.take(timeout_s=0.2)
    except TimeoutError:
        return RUNNING


def _wait(outcome: BoundedQueue, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while _poll(outcome) is RUNNING and time.monotonic() < until_s:
        pass


@contextmanager
def signals_set(terminated: Ending) -> Iterator[None]:
    """The event instead of the end of the process; a Ctrl-C after that is the end, at the next look, and one more wherever
    this thread is: inside of a call of Ray's that may end the process without a word. Ray has put its own handler for SIGTERM
    there; it returns afterwards.
    """
    if threading.current_thread() is not threading.main_thread():  # python allows handlers there only
        yield
        return

    def asked(number: int, _: object) -> None:
        if terminated.is_urgent:
            raise KeyboardInterrupt
        if not terminated.is_set():
            terminated.number = signal.Signals(number)
        elif number == signal.SIGINT:
            terminated.is_urgent = True
        terminated.set()

    # A shell without job control starts `vlatune train &` with Ctrl-C ignored: it is meant for others then.
    heard = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, asked) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(TypeError):  # one that was not set from python cannot be put back
                signal.signal(number, handler)
