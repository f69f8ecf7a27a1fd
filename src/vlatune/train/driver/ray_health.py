"""[ray] Notice a lost head or node of a cluster at RAY_ADDRESS, and wait for its resources.

Ray notices a machine without power after a minute, and a lost head after minutes of silence. Here a
TCP connection decides: the kernel of a machine accepts it even if all processes are busy.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from vlatune.console import say, warn
from vlatune.errors import RunStoppedError
from vlatune.feed.sizing import Node, Sizing, find_shortage
from vlatune.ray_internals import CALL_THREAD, HEAD_LOST, RECONNECT_VARIABLE, draining_nodes
from vlatune.report.html import write_report
from vlatune.train.heartbeat import RankState

CONNECT_S = 3.0
SILENT_S = 8.0
"""Seconds without a heartbeat of any worker on a node before the node is checked."""
HEAD_LOST_S = 30.0
"""Seconds without an answer after which the head is lost, unless Ray's own setting is given."""
UNWIND_S = 10.0
"""Seconds in which the main thread may end the run itself; it may be blocked in a call to Ray."""
POLL_S = 1.0
WAIT_POLL_S = 0.2
SMALLER_S = 10.0
"""Seconds after which an elastic run tries a smaller group; the resources of an ended group are freed sooner."""
REPORT_AFTER_S, REPORT_S, LATER_REPORT_S = 2.0, 15.0, 60.0


def answers(address: str, port: int, timeout_s: float = CONNECT_S) -> bool:
    """True if a process listens at this address."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """Checks from a thread whether the head answers; another one reads what only the head knows."""

    def __init__(self, address: str, run_dir: Path) -> None:
        host, _, port = address.rpartition(":")
        self._place, self._run_dir = (host.strip("[]"), int(port)), run_dir
        self._limit_s = float(os.environ.get(RECONNECT_VARIABLE, HEAD_LOST_S))
        self._closed = threading.Event()
        self.is_answering = True
        self.lost: RunStoppedError | None = None
        """The error that ends the run, once the head is lost."""
        self.draining: set[str] = set()
        """Nodes that will be removed."""
        self.places: Mapping[str, tuple[str, int]] = {}
        """Node id -> address and port of its raylet, for all nodes that Ray believes to be alive."""
        self.has_room_since_s: float | None = None
        """Time at which Ray had reserved what `reserve` asked for."""
        self._room: PlacementGroup | None = None
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name=CALL_THREAD, daemon=True)
        self._reader.start()

    def close(self) -> None:
        self._closed.set()
        self._reader.join(2 * POLL_S if self.is_answering else 0)

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask Ray to reserve resources when nodes have joined; autoscalers may add some."""
        self._room, self.has_room_since_s = placement_group([dict(one) for one in bundles]), None

    def release(self) -> None:
        """Withdraw what `reserve` asked for."""
        if self._room and self.is_answering:
            remove_placement_group(self._room)
        self._room = self.has_room_since_s = None

    def _watch(self) -> None:
        seen_s = time.monotonic()
        while not self._closed.wait(POLL_S):
            self.is_answering = answers(*self._place)
            if self.is_answering:
                seen_s = time.monotonic()
            elif time.monotonic() - seen_s >= self._limit_s:
                break
        else:
            return
        host, port = self._place
        text = (
            f"the head of the cluster ({host}:{port}) has not answered for {self._limit_s:g} s; when the cluster runs again, "
            f"the same command resumes from the newest checkpoint"
        )
        HEAD_LOST.set()
        self.lost = RunStoppedError(text)
        if not self._closed.wait(UNWIND_S):
            try:
                warn(f"vlatune: {text}")
                say(f"vlatune: report: {write_report(self._run_dir)}")
            finally:
                os._exit(1)

    def _read(self) -> None:
        while not self._closed.wait(POLL_S):
            if self.is_answering:
                with contextlib.suppress(Exception):  # Ray raises several types if the head is gone
                    self.draining = draining_nodes()
                    self.places = {
                        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
                        for node in ray.nodes()
                        if node["Alive"]
                    }
                    room = self._room
                    if room and self.has_room_since_s is None and placement_group_table(room)["state"] == "CREATED":
                        self.has_room_since_s = time.monotonic()


def find_silent_nodes(states: Sequence[RankState], limit_s: float = SILENT_S) -> list[str]:
    """Return the nodes of which no worker has sent a heartbeat for this long."""
    heard_s: dict[str, float] = {}
    for state in states:
        heard_s[state.node_id] = min(state.silent_s, heard_s.get(state.node_id, state.silent_s))
    return [node_id for node_id, silent_s in heard_s.items() if silent_s > limit_s]


class WaitReport:
    """Reports what is waited for: at once, every 15 seconds, and after a minute every minute."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._text, self._said_s = say, "", 0.0

    def update(self, text: str, waited_s: float) -> None:
        interval_s = REPORT_S if waited_s <= LATER_REPORT_S else LATER_REPORT_S
        if waited_s >= REPORT_AFTER_S and (text != self._text or waited_s - self._said_s >= interval_s):
            self._say(f"waiting for {text}, {format_clock(waited_s)}")
            self._text, self._said_s = text, waited_s

    def end(self, waited_s: float) -> None:
        if self._text:
            self._say(f"waited {format_clock(waited_s)}; starting the workers")


def format_clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def wait_for_resources(
    head: HeadWatch,
    sizing: Sizing,
    worker: Mapping[str, float],
    read_nodes: Callable[[], Sequence[Node]],
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Sizing:
    """Wait until Ray can reserve the resources of all workers and a CPU for readers at once.

    Returns the plan of the worker group. An elastic run gets the largest group that fits the nodes
    and that Ray can reserve within some seconds. Ray decides with a placement group, which also
    makes autoscalers add nodes; it is removed before the workers start. `check` raises if the run
    must end.
    """
    sizes: Sequence[int] = sizing.run.sizes or (sizing.run.num_workers,)
    most, size, asked_s, fitting = sizes[0], 0, 0.0, list(sizes)
    nodes: Sequence[Node] = ()
    bundle = {name: amount for name, amount in worker.items() if amount}
    report, began_s, read_s, text, group = WaitReport(say), time.monotonic(), 0.0, "", None
    try:
        while True:
            check()
            now_s = time.monotonic()
            if not head.is_answering:  # a call to Ray would block
                report.update("the head of the cluster", now_s - began_s)
                time.sleep(WAIT_POLL_S)
                continue
            if group is None or now_s - read_s >= POLL_S:
                nodes, read_s = read_nodes(), now_s
                text = find_shortage(nodes, sizing, sizes[-1]) or "resources that other programs of the cluster use"
                fitting = [one for one in sizes if one <= most and not find_shortage(nodes, sizing, one)]
                fitting = fitting or [sizes[-1]]
            if group is None or fitting[0] != size:
                if group:
                    remove_placement_group(group)
                size, asked_s = fitting[0], now_s
                group = placement_group([bundle] * size + [{"CPU": 1}])
            if group.wait(WAIT_POLL_S):
                report.end(now_s - began_s)
                return sizing.for_workers(size, nodes) if sizing.run.sizes else sizing
            if now_s - asked_s > SMALLER_S and len(fitting) > 1:
                most, read_s = fitting[1], 0.0
            report.update(text, now_s - began_s)
    finally:
        if group and head.is_answering:  # Ray removes it with the job, too
            remove_placement_group(group)
