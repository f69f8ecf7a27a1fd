"""[ray] The Ray cluster of a run: the one at RAY_ADDRESS, or a local one.

A local cluster uses a temporary folder, removed at exit; leftovers of killed processes are removed
by the next run. It requires a token and listens on the loopback interface (see SECURITY.md). Ray's
output goes to `logs/`.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from vlatune.config.settings import RunConfig
from vlatune.console import redacted, say, warn
from vlatune.errors import TerminatedError
from vlatune.ray_internals import (
    DEFAULT_STOP_S,
    JOB_VARIABLE,
    STOP_VARIABLE,
    VITAL_PROCESSES,
    check_closed,
    closed_job,
    count_gpus,
    is_blocked,
    ray_on_loopback,
    redirect_errors,
)
from vlatune.run.run_folder import LOGS
from vlatune.storage.files import make_folder, open_to_append, write_atomic, write_new

if TYPE_CHECKING:
    from vlatune.feed.sizing import Node, RunShape, Sizing
    from vlatune.train.driver.ray_health import HeadWatch

TRAINER_RESOURCE = "vlatune_trainer"
"""Custom resource of the local cluster; a training worker uses one, plus the reserved CPUs."""
PREFIX, OWNER = "vlatune-ray-", "owner"
MAX_FOLDER_CHARS = 40
"""Socket paths below Ray's folder are limited to 107 characters."""
REMOVAL_ATTEMPTS = 10
START_ATTEMPTS = 3
AUTH_MODE = "RAY_AUTH_MODE"
"""Ray's variable for token authentication. Unset, a local cluster requires a token, and a cluster
at RAY_ADDRESS is joined without one."""
KILL_S = 5.0
STOP_MARGIN_S = 30
"""Seconds that a driver may take after saving, to end the workers and write the report."""
LOG_BYTES = 10_000_000
"""Maximum size of each Ray log file that is kept after a failure."""


class Cluster:
    """The cluster that this process is connected to.

    `sizing` belongs to the run: nodes that come and go change neither the device nor the threads,
    which affect the numbers.
    """

    def __init__(
        self, sizing: "Sizing", ray_folder: Path | None, *, is_local: bool, head: "HeadWatch | None" = None
    ) -> None:
        self.is_local, self.sizing, self.head = is_local, sizing, head
        self._folder = ray_folder
        self._vital: dict[str, psutil.Process] = {}
        if is_local:
            self._start()

    def lost_part(self) -> str | None:
        """Return the name of a dead vital process of a local cluster, else None.

        Processes are checked directly: Ray reports a dead raylet or GCS server much later, the
        latter by exiting this process.
        """
        return next((part for part, process in self._vital.items() if not _is_alive(process)), None)

    def kill(self) -> None:
        """Kill the local cluster at once and wait for its processes."""
        started = [*self._vital.values()]
        for process in self._vital.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                started += process.children(recursive=True)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=KILL_S)

    def renew(self) -> bool:
        """Restart a broken local cluster; True if restarted."""
        import ray

        if not self.lost_part():
            return False
        ray.shutdown()
        self._start()
        return True

    def _start(self) -> None:
        """Start the cluster, with retries if a process dies during startup."""
        import ray

        (node,) = self.sizing.nodes
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                with environment(ray_environment(self._folder)):
                    ray.init(
                        address="local",
                        num_cpus=node.cpus,
                        object_store_memory=node.store_bytes,
                        resources={TRAINER_RESOURCE: node.trainers},
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        job_config=closed_job(),
                    )
                check_closed()
                self._vital = _vital_processes()
                return
            except ValueError:  # invalid setting
                raise
            except Exception as error:  # Ray raises no specific type
                ray.shutdown()
                if attempt == START_ATTEMPTS:
                    raise RuntimeError(f"Ray failed to start {attempt} times: {error}") from error


def ray_environment(folder: Path | None = None) -> dict[str, str]:
    """Return the environment variables for starting a local cluster."""
    settings = {
        "RAY_free_objects_period_milliseconds": "100",  # consumed blocks use memory until the raylet frees them
        "RAY_worker_niceness": "0",  # for training workers; readers lower their priority
    }
    return settings | ({"RAY_TMPDIR": str(folder)} if folder else {})


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _vital_processes() -> dict[str, psutil.Process]:
    """Return name -> process of the vital processes of a newly started cluster."""
    children = {one.name(): one for one in psutil.Process().children() if _is_alive(one)}
    if gone := set(VITAL_PROCESSES) - children.keys():
        raise RuntimeError(f"{' and '.join(sorted(gone))} died during startup")
    return {name: children[name] for name in VITAL_PROCESSES}


def _is_alive(process: psutil.Process) -> bool:
    """True if the process runs; ended processes remain as zombies until Ray reaps them."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def local_ray(config: RunConfig, folder: Path, run: "RunShape") -> Iterator[Cluster]:
    """Provide a cluster for the duration of the run."""
    import ray

    from vlatune.feed.sizing import plan_on_nodes
    from vlatune.train.driver.ray_health import HeadWatch

    # Training and decoding share cores, so spinning OpenMP threads would slow down each step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ExitStack() as stack:
        stack.enter_context(_redirect_output(folder))
        if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
            if not ray.is_initialized():
                stack.callback(_disconnect)
                _join_cluster()
                if os.environ.get(AUTH_MODE, "").lower() != "token":
                    warn(f"vlatune: warning: {OPEN_CLUSTER}")
                if text := find_short_stop(os.environ, config.grace_s):
                    warn(f"vlatune: warning: {text}")
            sizing = plan_on_nodes(read_nodes(), run)
            head = HeadWatch(ray.get_runtime_context().gcs_address, folder)
            stack.callback(head.close)
            yield Cluster(sizing, None, is_local=False, head=head)
            return
        requires_token = os.environ.get(AUTH_MODE, "token").lower() == "token"
        sizing = size_for_this_host(config, run)
        ray_folder = stack.enter_context(own_folder())
        stack.enter_context(_keep_logs_on_error(ray_folder, folder / LOGS / "ray"))
        stack.enter_context(ray_on_loopback())
        protect_token()
        stack.callback(_disconnect)
        cluster = Cluster(sizing, ray_folder, is_local=True)
        stack.callback(lambda: cluster.kill() if is_blocked() else None)  # else Ray shuts it down
        if requires_token:
            say(f"vlatune: local Ray cluster on {ray.util.get_node_ip_address()}, with token authentication")
        else:
            warn(f"vlatune: warning: {OPEN_LOCAL}")
        yield cluster


def find_short_stop(environment: Mapping[str, str], grace_s: float) -> str | None:
    """Return a warning if `ray job stop` would kill this driver before it has saved a checkpoint."""
    stop_s = environment.get(STOP_VARIABLE, str(DEFAULT_STOP_S))
    if JOB_VARIABLE not in environment or (stop_s.isdecimal() and int(stop_s) > grace_s):
        return None
    return (
        f"`ray job stop` kills this job after {STOP_VARIABLE}={stop_s} seconds, and saving may take --grace_s={grace_s:g}; "
        f"set {STOP_VARIABLE} to an integer of at least {grace_s + STOP_MARGIN_S:.0f} in the job's env_vars"
    )


def _disconnect() -> None:
    """Shut down the connection, unless a thread is still blocked in Ray."""
    import ray

    if not is_blocked():
        ray.shutdown()


OPEN_LOCAL = (
    f"{AUTH_MODE} disables Ray's token authentication: every user and program of this machine can run code in this "
    f"run; unset {AUTH_MODE} to require a token"
)
OPEN_CLUSTER = (
    f"the cluster at RAY_ADDRESS was joined without token authentication: whoever reaches its ports can run code in it; to "
    f"enable it, run `ray get-auth-token --generate` once, copy ~/.ray/auth_token to every node, and start `ray start` "
    f"and vlatune with {AUTH_MODE}=token"
)


def protect_token(home: Path | None = None) -> None:
    """Create or restrict the token file with mode 0600; Ray would make it world-readable."""
    if os.environ.get(AUTH_MODE, "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    with contextlib.suppress(OSError):  # file of another user or not writable: Ray reports it if needed
        if file.exists():
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_new(file, secrets.token_hex(32).encode(), mode=0o600)


def size_for_this_host(config: RunConfig, run: "RunShape") -> "Sizing":
    """Plan the resources of a local cluster; the user's settings take precedence."""
    from vlatune.feed.sizing import plan_on_host, read_host

    host = read_host(gpus=count_gpus())
    if config.ray.num_cpus is not None:
        host = replace(host, cpus=config.ray.num_cpus)
    return plan_on_host(host, run, store_bytes=config.ray.object_store_bytes)


def read_nodes(is_alive: Callable[[dict[str, Any]], bool] = lambda _: True) -> "list[Node]":
    """Return the alive nodes of the connected cluster with their total resources."""
    import ray

    from vlatune.feed.sizing import Node

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"] and is_alive(node)]
    return [
        Node(
            cpus=int(one.get("CPU", 0)),
            store_bytes=int(one.get("object_store_memory", 0)),
            gpus=int(one.get("GPU", 0)),
            trainers=int(one.get(TRAINER_RESOURCE, 0)),
        )
        for one in resources
    ]


def has_gpus() -> bool:
    """True if the cluster of the run has GPUs; the driver of a job may be on a node without."""
    import ray

    if not (ray.is_initialized() or os.environ.get("RAY_ADDRESS")):
        return count_gpus() > 0
    with connected():
        return any(node.gpus for node in read_nodes())


@contextmanager
def connected() -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS temporarily, unless this process is connected."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        _join_cluster()
        yield
    finally:
        ray.shutdown()


def _join_cluster() -> None:
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR, job_config=closed_job())
    check_closed()


@contextmanager
def own_folder() -> Iterator[Path | None]:
    """Create a temporary folder for Ray's files; None if Ray's default is used.

    Ray's default applies with RAY_TMPDIR or if the path would be too long.
    """
    parent = Path(tempfile.gettempdir())
    if os.environ.get("RAY_TMPDIR") or len(str(parent)) + len(PREFIX) + 8 > MAX_FOLDER_CHARS:
        yield None
        return
    _remove_leftovers(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with (folder / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            for _ in range(REMOVAL_ATTEMPTS):  # exiting Ray processes may still write to it
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.2)


def _remove_leftovers(parent: Path) -> None:
    """Remove folders of dead processes, whose locks are released."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / OWNER).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


@contextmanager
def _keep_logs_on_error(ray_folder: Path | None, kept: Path) -> Iterator[None]:
    """Copy Ray's logs to the run folder after an error, without secrets."""
    try:
        yield
    except Exception:
        for file in ray_folder.glob("session_2*/logs/*") if ray_folder else ():
            with contextlib.suppress(OSError):
                if file.is_file() and 0 < file.stat().st_size <= LOG_BYTES:
                    text = redacted(file.read_text(errors="replace"))
                    write_atomic(make_folder(kept.parent, kept.name) / file.name, [text.encode()])
        raise


def worker_resources(sizing: "Sizing") -> dict[str, float]:
    """Return the resources of one training worker."""
    if any(node.gpus for node in sizing.nodes):
        return {"GPU": 1, "CPU": sizing.reserved_cores}
    if any(node.trainers for node in sizing.nodes):
        return {TRAINER_RESOURCE: 1, "CPU": sizing.reserved_cores}
    return {"CPU": sizing.reserved_cores}


class RedactingFormatter(logging.Formatter):
    """Redacts secrets: Ray quotes errors that may contain URLs and headers."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


@contextmanager
def _redirect_output(folder: Path) -> Iterator[None]:
    """Redirect Ray's output to logs/driver.log.

    Not undone after Ctrl-C and SIGTERM, where Ray's threads would print errors until the process
    exits.
    """
    handler = logging.StreamHandler(open_to_append(make_folder(folder, LOGS) / "driver.log"))
    handler.setFormatter(RedactingFormatter())

    def set_handlers(logger: logging.Logger, handlers: list[logging.Handler], *, propagate: bool) -> None:
        logger.handlers, logger.propagate = handlers, propagate

    with ExitStack() as undo:
        for name in ("ray", "ray.data", "ray.train", "ray.tune"):
            logger = logging.getLogger(name)
            undo.callback(set_handlers, logger, logger.handlers, propagate=logger.propagate)
            set_handlers(logger, [handler], propagate=False)
        undo.callback(redirect_errors(logging.getLogger("ray").error))
        try:
            yield
        except (KeyboardInterrupt, TerminatedError):
            undo.pop_all()
            raise
