"""`vlatune train` as a Ray job, on a cluster that `ray start --head` has started on loopback: submitted, stopped and resumed."""

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from driving import MANY_STEPS, TIMEOUT_S, saved_steps, step_of
from local_runs import train_flags
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import StateApiClient
from ray.util.state.common import ListApiOptions, StateResource
from waiting import wait_until

from vlatune.ray_internals import NETWORK_VARIABLE
from vlatune.run.summary import read_summary

BIN = Path(sys.executable).parent
MARK = "VLATUNE_TEST_CLUSTER"
"""Environment variable of all processes of the cluster and its jobs."""
JOB = "VLATUNE_TEST_JOB"
"""Environment variable of all processes of a job."""
KEPT_BY_RAY = "AutoscalingCoordinator"
"""Detached actor that Ray Train creates once in a cluster, for all jobs."""
pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return the live processes that were started with this environment variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def free_port(stack: ExitStack) -> int:
    opened = stack.enter_context(socket.socket())
    opened.bind(("127.0.0.1", 0))
    return opened.getsockname()[1]


@dataclass(frozen=True)
class JobServer:
    """The job server of a cluster, and the environment in which the cluster and the `ray` command run."""

    address: str
    env: dict[str, str]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}

    @property
    def client(self) -> JobSubmissionClient:
        return JobSubmissionClient(self.address, headers=self.headers)

    def is_ready(self) -> bool:
        try:
            return self.client.list_jobs() == []
        except (ConnectionError, RuntimeError):  # not started yet
            return False

    def ray_job(self, command: str, *words: str) -> str:
        """Run `ray job COMMAND`; return its output."""
        line = [str(BIN / "ray"), "job", command, f"--address={self.address}", *words]
        done = subprocess.run(line, env=self.env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, name: str, entrypoint: list[str]) -> None:
        """Submit a job that may save for a minute when it is stopped."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": "60", JOB: name}
        self.client.submit_job(
            entrypoint=shlex.join(entrypoint), submission_id=name, runtime_env={"env_vars": variables}
        )

    def follow(self, name: str, condition: Callable[[JobStatus], bool]) -> str:
        """Wait until the condition is true of the job; return its output. A job that ends before fails the test."""

        def is_reached() -> bool:
            status = self.client.get_job_status(name)
            reached = condition(status)
            assert reached or not status.is_terminal(), f"{status}: {self.client.get_job_logs(name)[-3000:]}"
            return reached

        wait_until(is_reached, TIMEOUT_S, lambda: self.client.get_job_logs(name)[-3000:])
        return self.client.get_job_logs(name)

    def leftovers(self, name: str) -> list[str]:
        """Return the processes of a job, and the actors and placement groups of all jobs that are alive."""
        state = StateApiClient(self.address, headers=self.headers)
        ends = {StateResource.ACTORS: "DEAD", StateResource.PLACEMENT_GROUPS: "REMOVED"}
        options = {one: ListApiOptions(filters=[("state", "!=", end)]) for one, end in ends.items()}
        found = [state.list(one, options[one], raise_on_missing_output=True) for one in ends]
        texts = [str(one) for one in (*processes_with(JOB, name), *found[0], *found[1])]
        return [text for text in texts if KEPT_BY_RAY not in text]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    """Start a head with two CPUs and its job server, all on loopback, with a token."""
    folder, mark = tmp_path_factory.mktemp("ray"), secrets.token_hex(8)
    own = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills workers if other programs fill the machine's memory
        NETWORK_VARIABLE: "0",
        MARK: mark,
    }
    with ExitStack() as stack:
        ports = [free_port(stack) for _ in range(3)]
    start = [
        *(str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
        *("--node-ip-address=127.0.0.1", f"--port={ports[0]}", "--include-dashboard=true"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}", f"--dashboard-agent-listen-port={ports[2]}"),
        *(f"--object-store-memory={100 << 20}", f"--temp-dir={folder}"),
    ]
    server = JobServer(f"http://127.0.0.1:{ports[1]}", os.environ | own)
    with (folder / "head.txt").open("w") as output:
        process = subprocess.Popen(start, env=server.env, stdout=output, stderr=output)
        try:
            wait_until(server.is_ready, TIMEOUT_S, (folder / "head.txt").read_text)
            yield server
        finally:
            while left := processes_with(MARK, mark):
                for one in left:
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)


def test_job_trains_and_ends(server, dataset_v3, small_base, tmp_path):
    run_dir = tmp_path / "run"
    flags = train_flags(dataset_v3, small_base, "--steps=6", "--save_freq=3", f"--output_dir={run_dir}")
    printed = server.ray_job("submit", "--submission-id=first", "--", "vlatune", "train", *flags)
    assert printed.count("warning") == printed.count("RAY_JOB_STOP_WAIT_TIME_S=3") == 1
    assert server.client.get_job_status("first") == JobStatus.SUCCEEDED
    summary = read_summary(run_dir)
    assert summary is not None
    assert summary.optimizer_steps == 6
    assert summary.spilled_bytes == 0
    assert saved_steps(run_dir) == [3, 6]
    assert (run_dir / "report.html").exists()


def test_stopped_job_saves_ends_and_resumes(server, dataset_v3, small_base, tmp_path):
    run_dir = tmp_path / "run"
    flags = train_flags(dataset_v3, small_base, f"--steps={MANY_STEPS}", f"--save_freq={MANY_STEPS}")
    command = ["vlatune", "train", *flags, "--dataset.eval_split=0", "--save_every_s=0", f"--output_dir={run_dir}"]
    server.submit("stopped", command)
    server.follow("stopped", lambda _: step_of(run_dir) >= 5)
    assert saved_steps(run_dir) == []
    server.ray_job("stop", "stopped")
    printed = server.follow("stopped", lambda status: status == JobStatus.STOPPED)
    assert "warning" not in printed
    [saved] = saved_steps(run_dir)
    assert saved == step_of(run_dir) >= 5, printed
    wait_until(lambda: not server.leftovers("stopped"), 60, lambda: str(server.leftovers("stopped")))
    server.submit("resumed", [*command, f"--steps={saved + 5}"])
    printed = server.follow("resumed", lambda status: status == JobStatus.SUCCEEDED)
    assert f"resuming from {run_dir}" in printed
    assert saved_steps(run_dir)[-1] == saved + 5
