"""[ray] Supervise a worker group while Ray Train runs it.

Ray Train reports dead workers. The supervisor handles the rest: a worker that hangs or is stopped
(kill the group, stacks in logs/), SIGTERM and Ctrl-C (save and stop), nodes about to be removed
(save and continue), lost nodes, and dead processes of the local cluster.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlatune.config.settings import RunConfig
from vlatune.errors import TerminatedError
from vlatune.feed.sizing import Node, Sizing, find_shortage
from vlatune.ray_internals import CALL_THREAD, job_groups, remove_group
from vlatune.run.run_folder import new_log
from vlatune.run.summary import read_summary
from vlatune.storage.files import write_text
from vlatune.storage.lease import Lease
from vlatune.train.driver.ray_cluster import Cluster, read_nodes, worker_resources
from vlatune.train.driver.ray_health import answers, find_silent_nodes, wait_for_resources
from vlatune.train.driver.ray_trainer import make_trainer
from vlatune.train.failures import dump_and_kill, root_cause
from vlatune.train.heartbeat import NO_REQUEST, HeartbeatMonitor, RankState, Request
from vlatune.train.records import RunWriter
from vlatune.train.worker_job import WorkerJob

POLL_S = 0.2
"""Short, because Python handles signals between polls."""
STARTUP_FACTOR = 3
"""Factor on `hang_timeout_s` before a worker's first micro-batch, while it loads the model."""
GROUP_END_S = 60.0
"""Maximum wait for Ray Train to notice killed workers, and for a node to respond."""
JOIN_MORE_S = 10.0
"""Seconds to wait for further nodes before an elastic run continues in a larger group."""
CLUSTER_END_S = 20.0
"""Maximum wait after the cluster died; Ray exits the process a minute after losing the GCS."""


class Termination(threading.Event):
    """Set when this process received SIGTERM or Ctrl-C."""

    number = signal.SIGTERM
    """The first signal received."""
    is_urgent = False
    """True after a further Ctrl-C."""
    lease: Lease | None = None
    """If it is lost, another driver has taken the run over, and nothing may be written."""

    @property
    def cause(self) -> str:
        return f"received {'Ctrl-C' if self.number == signal.SIGINT else 'SIGTERM'}"

    def check(self) -> None:
        """Raise if the run must end and no worker has anything to save."""
        if self.lease and self.lease.lost:
            raise self.lease.lost
        if self.is_set():
            raise self.error(" before the workers started; nothing new to save")

    def error(self, text: str) -> TerminatedError:
        return TerminatedError(f"{self.cause}{text}", self.number)


class Supervisor:
    """Supervises all attempts of a run."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        cluster: Cluster,
        termination: Termination,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._monitor = start_monitor()
        self._config, self._folder, self._cluster, self._say = config, folder, cluster, say
        self._attempt, self._requested, self._began = 0, NO_REQUEST, False
        self._termination = termination
        self._num_workers, self._is_resizing, self._has_asked = 0, False, False
        self._announced_nodes: set[str] = set()
        self._groups = job_groups() if cluster.head else set[str]()
        """Placement groups that a caller of `train` in this process has made."""
        self.states: Sequence[RankState] = ()
        """Latest state of the workers of this attempt; empty before they start."""

    def run(self, job: WorkerJob, writer: RunWriter) -> bool:
        """Run the workers and write their records; False if they have stopped to continue in a group of another size.

        Raises their error, or the reason why they were killed.
        """
        resources = worker_resources(self._cluster.sizing)
        self._num_workers, self._is_resizing = job.num_workers, False
        trainer = make_trainer(
            job,
            self._monitor,
            resources=resources,
            is_local=self._cluster.is_local,
            name=f"attempt-{os.getpid()}-{job.restarts}",
        )
        try:
            self.watch(trainer.fit, job.restarts, writer)
        finally:
            if self._cluster.head:
                self._cluster.head.release()
        return not self._is_resizing or read_summary(self._folder) is not None

    def wait_for_resources(self) -> Sizing:
        """Wait until there are resources for a worker group, and return its plan."""
        head, sizing = self._cluster.head, self._cluster.sizing
        if head is None:  # a local cluster has what was planned
            return sizing
        if head.is_answering:
            for left in job_groups() - self._groups:  # of a worker group whose controller was killed
                remove_group(left)

        def check() -> None:
            self._termination.check()
            if head.lost:
                raise head.lost

        return wait_for_resources(head, sizing, worker_resources(sizing), self._read_nodes, check, self._say)

    def _read_nodes(self) -> list[Node]:
        """Return the nodes that answer and will not be removed."""
        leaving = self._cluster.head.draining if self._cluster.head else set[str]()
        return read_nodes(
            lambda node: (
                node["NodeID"] not in leaving and answers(node["NodeManagerAddress"], node["NodeManagerPort"], POLL_S)
            )
        )

    def watch(self, fit: Callable[[], object], attempt: int, writer: RunWriter) -> None:
        """Call `fit` on a thread and supervise the workers that it starts."""
        self._attempt, self._requested, self._began, self.states = attempt, NO_REQUEST, False, ()
        self._has_asked = False
        with handle_signals(self._termination):  # a restarted cluster has set Ray's handler again
            outcome = _run_on_thread(fit)
            killed = self._poll_until_done(outcome, writer)
        error = killed or outcome.exception()
        if self._termination.is_set() and read_summary(self._folder) is None:
            saved = "a checkpoint is saved; run the same command again to resume"
            if error is not None:
                saved = f"the workers failed while saving ({root_cause(error)}); the same command resumes from the previous checkpoint"
            raise self._termination.error(f"; {saved}")
        if error is not None:
            raise error

    def _poll_until_done(self, outcome: Future[None], writer: RunWriter) -> RuntimeError | None:
        """Wait until `fit` has ended; return the reason if the workers were killed."""
        stop_by_s, reply = float("inf"), None
        while not outcome.done():
            now_s = time.monotonic()
            if self._termination.is_urgent:
                raise KeyboardInterrupt
            if self._termination.lease and self._termination.lease.lost:
                raise self._termination.lease.lost
            if self._cluster.head and self._cluster.head.lost:
                raise self._cluster.head.lost
            if now_s > stop_by_s:
                raise self._termination.error(
                    f"; no checkpoint was saved within --grace_s={self._config.grace_s:g}; the same command resumes from "
                    f"the previous one"
                )
            if part := self._cluster.lost_part():
                self._cluster.kill()
                wait([outcome], CLUSTER_END_S)
                return RuntimeError(f"Ray's {part} died")
            reply = reply or self._monitor.poll.remote(
                self._attempt, self._requested, writer.received, writer.acknowledged
            )
            if not ray.wait([reply], timeout=POLL_S)[0]:
                continue
            try:
                self.states, parcel = ray.get(reply)
                writer.write(parcel)
            except RayError:  # the monitor died and is restarted
                self.states = ()
                wait([outcome], POLL_S)
            reply = None
            self._began = self._began or bool(self.states)
            if self._termination.is_set() and stop_by_s == float("inf"):
                self._request_stop()
                stop_by_s = now_s + self._config.grace_s
            self._save_before_nodes_are_removed()
            self._grow_if_nodes_joined()
            if lost := self._find_lost_node():
                return self._kill_rest_of_group(outcome, lost)
            if find_hung(self.states, self._config.hang_timeout_s):
                return self._kill_hung_group(outcome)
        return None

    def _find_lost_node(self) -> str | None:
        """Return a node that sends no heartbeats and accepts no connections."""
        places: Mapping[str, tuple[str, int]] = self._cluster.head.places if self._cluster.head else {}
        silent = [node_id for node_id in find_silent_nodes(self.states) if node_id in places]
        return next((node_id for node_id in silent if not answers(*places[node_id])), None)

    def _kill_rest_of_group(self, outcome: Future[None], lost: str) -> RuntimeError:
        """Kill the workers on other nodes, which Ray Train notices before Ray notices the lost node."""
        assert self._cluster.head
        address, _ = self._cluster.head.places[lost]
        ranks = ", ".join(str(state.rank) for state in self.states if state.node_id == lost)
        text = f"node {address} with rank {ranks} does not answer"
        self._say(f"{text}: ending the other workers")
        for state in self.states:
            if state.node_id != lost:
                self._dump_and_kill(state)
        wait([outcome], GROUP_END_S)
        return RuntimeError(text)

    def _request_stop(self) -> None:
        """Ask the workers to save and stop."""
        if not self._began:
            self._termination.check()
        again = "; press Ctrl-C again to exit at once" if self._termination.number == signal.SIGINT else ""
        self._say(f"{self._termination.cause}: saving a checkpoint (at most {self._config.grace_s:g} s){again}")
        self._request(Request.STOP)

    def _save_before_nodes_are_removed(self) -> None:
        draining = self._cluster.head.draining if self._cluster.head else set[str]()
        removed = draining & {state.node_id for state in self.states} - self._announced_nodes
        if removed and not self._termination.is_set():
            self._announced_nodes |= removed
            text = f"{len(removed)} of the workers' nodes will be removed: saving a checkpoint"
            nodes, sizing = self._read_nodes(), self._cluster.sizing
            if any(not find_shortage(nodes, sizing, size) for size in sizing.run.sizes):
                self._resize(f"{text}, and continuing on other nodes")
            else:
                self._say(text)
                self._request(Request.SAVE)

    def _grow_if_nodes_joined(self) -> None:
        """Continue an elastic run in a larger group once Ray has reserved the resources of more workers."""
        head, sizing = self._cluster.head, self._cluster.sizing
        larger = [size for size in sizing.run.sizes if size > self._num_workers]
        if not (head and larger and self.states and head.is_answering) or self._is_resizing:
            return
        if not self._has_asked:
            self._has_asked = True
            head.reserve([worker_resources(sizing)] * (larger[-1] - self._num_workers))
        elif head.has_room_since_s and time.monotonic() - head.has_room_since_s >= JOIN_MORE_S:
            self._resize("there are resources for more workers: saving a checkpoint to continue with them")

    def _resize(self, text: str) -> None:
        self._say(text)
        self._is_resizing = True
        self._request(Request.STOP)

    def _request(self, request: Request) -> None:
        """Set the request to send with this and all later polls."""
        self._requested = (self._requested[0] + 1, request)

    def _kill_hung_group(self, outcome: Future[None]) -> RuntimeError:
        """Dump the stacks of all workers and kill them, which Ray Train then notices."""
        states = self.states
        texts = {state.rank: self._dump_and_kill(state) for state in states}
        file = new_log(self._folder, "hang")
        write_text(file, "\n\n".join(f"rank {rank}: {text}" for rank, text in texts.items()))
        wait([outcome], GROUP_END_S)
        status = {rank: text.splitlines()[0] for rank, text in texts.items()}
        hung = find_culprit(states, status)
        return RuntimeError(
            f"rank {hung.rank} made no progress for {hung.idle_s:.0f} s after '{hung.last_event}' "
            f"(--hang_timeout_s={self._config.hang_timeout_s:g}; process {status[hung.rank]}; stacks of all workers: {file})"
        )

    def _dump_and_kill(self, state: RankState) -> str:
        node = NodeAffinitySchedulingStrategy(state.node_id, soft=False)
        task = ray.remote(dump_and_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=node)
        try:
            return ray.get(task.remote(state.pid), timeout=GROUP_END_S)
        except RayError as error:
            return f"unreachable ({type(error).__name__})"


def start_monitor() -> Any:
    """Start the monitor actor on the driver's node, without CPUs; Ray restarts it if it dies."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(HeartbeatMonitor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


def find_hung(states: Sequence[RankState], timeout_s: float) -> list[RankState]:
    """Return the workers without progress for too long; startup has a longer timeout."""
    return [one for one in states if 0 < timeout_s * (1 if one.events else STARTUP_FACTOR) < one.idle_s]


def find_culprit(states: Sequence[RankState], status: Mapping[int, str]) -> RankState:
    """Return the worker that others wait for: not running, else with the least progress."""
    return min(states, key=lambda state: (status[state.rank] == "running", state.events, -state.idle_s))


def _run_on_thread(call: Callable[[], object]) -> Future[None]:
    """Run `call` on a daemon thread. On the main thread, Ray Train would handle Ctrl-C itself."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
            outcome.set_result(None)
        except BaseException as error:  # passed to the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=run, name=CALL_THREAD, daemon=True).start()
    return outcome


@contextmanager
def handle_signals(termination: Termination) -> Iterator[None]:
    """Set the event on SIGTERM and Ctrl-C instead of ending the process.

    A second Ctrl-C ends at the next poll, a third raises immediately, even inside Ray. Ray's
    SIGTERM handler is restored afterwards.
    """
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers on the main thread only
        yield
        return

    def handle(number: int, _: object) -> None:
        if termination.is_urgent:
            raise KeyboardInterrupt
        if not termination.is_set():
            termination.number = signal.Signals(number)
        elif number == signal.SIGINT:
            termination.is_urgent = True
        termination.set()

    # Shells without job control start `vlatune train &` with SIGINT ignored; keep it ignored.
    handled = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(TypeError):  # handlers not set from Python cannot be restored
                signal.signal(number, handler)
