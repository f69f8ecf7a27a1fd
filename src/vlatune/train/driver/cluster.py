"""[ray] The Ray cluster of a run: the one that RAY_ADDRESS names, or one of our own on this machine.

Our own lives in a folder of its own, which goes with it; what a killed process left is removed by the next. It asks
for a token and listens on the loopback interface (SECURITY.md has the list). Ray's own words go to `logs/`, the person
sees ours.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vlatune.config import RunConfig
from vlatune.console import redacted, say, warn
from vlatune.errors import TerminatedError
from vlatune.files import make_folder, open_to_append, write_aside, write_new
from vlatune.ray_internals import (
    VITAL_PROCESSES,
    asks_for_token,
    count_gpus,
    init_options,
    is_asked,
    print_through,
    ray_on_loopback,
    start_none_unasked,
)
from vlatune.report.run_folder import RunFolder

if TYPE_CHECKING:
    from vlatune.pipeline.sizing import Node, RunShape, Sizing

TRAINER_RESOURCE = "vlatune_trainer"
"""Custom resource of the local cluster: a training worker takes one of these, and only the CPUs that are kept from readers."""
PREFIX, OWNER = "vlatune-ray-", "owner"
MAX_FOLDER_CHARS = 40
"""Ray puts sockets below its folder, and the path of a socket has at most 107 characters."""
YOUNG_S, REMOVALS = 60.0, 10
STARTS = 3
AUTH_MODE = "RAY_AUTH_MODE"
GLOO = "GLOO_SOCKET_IFNAME"
"""Else gloo takes the address that the machine's name leads to."""
LEAVE_S = 5.0
LOG_BYTES = 10_000_000
"""Ray's own logs are kept after a failure, each file up to this size."""


class Cluster:
    """The cluster that this process is connected to."""

    def __init__(self, sizing: "Sizing", ray_folder: Path | None, *, ours: bool) -> None:
        self.ours, self.sizing = ours, sizing
        self._folder = ray_folder
        self._vital: dict[str, psutil.Process] = {}
        if ours:
            self._start()

    def lost_part(self) -> str | None:
        """What of our own is gone, and with it the cluster. Another's mends itself.

        By the processes: of its raylet's death Ray tells after a quarter of a minute, of its server's after a whole one,
        and then by ending this process.
        """
        if not self.ours:
            return None
        return next((part for part, process in self._vital.items() if not _lives(process)), None)

    def end(self) -> None:
        """At once; what still runs of it goes with its raylet."""
        for process in self._vital.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def leave(self) -> None:
        """The end of the run. Where a thread still asks Ray something, our own ends without Ray's help."""
        if not is_asked():
            return
        started = [one for process in self._vital.values() for one in [process, *process.children(recursive=True)]]
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=LEAVE_S)

    def renew(self) -> bool:
        """Our own is started again if it lost a part; says whether it was. Another's may have other nodes by now."""
        import ray

        from vlatune.pipeline.sizing import plan_on_nodes

        if not self.ours:
            self.sizing = plan_on_nodes(read_nodes(), self.sizing.run)
        if not self.lost_part():
            return False
        ray.shutdown()
        self._start()
        return True

    def _start(self) -> None:
        """Several times, where a part of it dies while it starts."""
        import ray

        for left in reversed(range(STARTS)):
            try:
                self._init()
                return
            except ValueError:  # a setting
                raise
            except Exception as error:  # Ray raises nothing more special
                ray.shutdown()
                if not left:
                    raise RuntimeError(f"Ray did not start on this machine, {STARTS} times: {error}") from error

    def _init(self) -> None:
        import ray

        (node,) = self.sizing.nodes
        ray.init(
            address="local",
            num_cpus=node.cpus,
            object_store_memory=node.store_bytes,
            resources={TRAINER_RESOURCE: node.trainers},
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **init_options(folder=self._folder, niceness=0),  # only readers give way, see source.py
        )
        self._vital = _vital_processes()


def _vital_processes() -> dict[str, psutil.Process]:
    """Name -> process of the two that our cluster, which has just started, ends with."""
    children = {one.name(): one for one in psutil.Process().children() if _lives(one)}
    if gone := set(VITAL_PROCESSES) - children.keys():
        raise RuntimeError(f"its {' and '.join(sorted(gone))} ended while it started")
    return {name: children[name] for name in VITAL_PROCESSES}


def _lives(process: psutil.Process) -> bool:
    """One that has ended stays in the list of processes until Ray asks for its code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def local_ray(config: RunConfig, folder: RunFolder, run: "RunShape") -> Iterator[Cluster]:
    """A cluster for the time of the run."""
    import ray

    from vlatune.pipeline.sizing import plan_on_nodes

    # Training and decoding share the cores: threads that spin while they wait for each other make a step 10 x slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ExitStack() as stack:
        stack.enter_context(_quiet(folder))
        if ray.is_initialized():  # a caller, such as a test, has its own
            yield Cluster(plan_on_nodes(read_nodes(), run), None, ours=False)
            return
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
            stack.callback(_disconnect)
            if not asks_for_token():
                warn(f"vlatune: warning: {OPEN_CLUSTER}")
            yield Cluster(plan_on_nodes(read_nodes(), run), None, ours=False)
            return
        sizing = size_for_this_host(config, run)
        ray_folder = stack.enter_context(own_folder())
        stack.enter_context(_kept_logs(ray_folder, folder.logs / "ray"))
        stack.enter_context(on_loopback())
        keep_token_private()
        stack.callback(_disconnect)
        cluster = Cluster(sizing, ray_folder, ours=True)
        stack.callback(cluster.leave)
        if asks_for_token():
            say(
                f"vlatune: Ray runs on this machine alone: it listens on {ray.util.get_node_ip_address()}, and asks for a token"
            )
        else:
            warn(f"vlatune: warning: {OPEN_LOCAL}")
        yield cluster


def _disconnect() -> None:
    """Unless a thread still asks Ray something: then this process stays connected, and must end soon."""
    import ray

    if not is_asked():
        ray.shutdown()


OPEN_LOCAL = (
    f"{AUTH_MODE} switches Ray's token authentication off: every user and program of this machine can run code in this "
    f"run; unset {AUTH_MODE}, and Ray asks for a token"
)
OPEN_CLUSTER = (
    f"the cluster at RAY_ADDRESS was joined without token authentication: whoever reaches its ports can run code in it; to "
    f"turn it on, run `ray get-auth-token --generate` once, copy ~/.ray/auth_token to every node, and start `ray start` "
    f"and vlatune with {AUTH_MODE}=token"
)


def keep_token_private(home: Path | None = None) -> None:
    """Ray would write the token of a first local cluster for all to read. One that is there already is closed to others."""
    if os.environ.get(AUTH_MODE, "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    with contextlib.suppress(OSError):  # another's file, or no place to write to: Ray speaks of what it needs
        if file.exists():
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_new(file, secrets.token_hex(32).encode(), mode=0o600)


@contextmanager
def on_loopback() -> Iterator[None]:
    """A cluster that is started inside, and its workers among themselves, talk on this machine alone."""
    is_set = GLOO in os.environ
    os.environ.setdefault(GLOO, "lo")
    try:
        with ray_on_loopback():
            yield
    finally:
        if not is_set:
            os.environ.pop(GLOO, None)


def size_for_this_host(config: RunConfig, run: "RunShape") -> "Sizing":
    """What a cluster of our own gets, and why; what the user asks for goes before what is found."""
    from vlatune.pipeline.sizing import plan_on_host, read_host

    host = read_host(gpus=count_gpus())
    if config.ray.num_cpus is not None:
        host = replace(host, cpus=config.ray.num_cpus)
    return plan_on_host(host, run, store_bytes=config.ray.object_store_bytes)


def read_nodes() -> "list[Node]":
    """The living nodes of the cluster that this process has joined, each with what it has in all."""
    import ray

    from vlatune.pipeline.sizing import Node

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [
        Node(
            cpus=int(one.get("CPU", 0)),
            store_bytes=int(one.get("object_store_memory", 0)),
            gpus=int(one.get("GPU", 0)),
            trainers=int(one.get(TRAINER_RESOURCE, 0)),
        )
        for one in resources
    ]


def ask_nodes() -> "list[Node]":
    """The nodes of the cluster that RAY_ADDRESS names, which is joined for this question alone."""
    import ray

    if ray.is_initialized():
        return read_nodes()
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        return read_nodes()
    finally:
        ray.shutdown()


@contextmanager
def own_folder() -> Iterator[Path | None]:
    """A new folder for Ray's files, gone afterwards; None where Ray's default must do (a long path, RAY_TMPDIR)."""
    parent = Path(tempfile.gettempdir())
    if os.environ.get("RAY_TMPDIR") or len(str(parent)) + len(PREFIX) + 8 > MAX_FOLDER_CHARS:
        yield None
        return
    _remove_left_behind(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with (folder / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Ray's last processes may write there while they end."""
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.2)


def _remove_left_behind(parent: Path) -> None:
    """Folders whose process is gone: its lock fell with it."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not (folder / OWNER).exists():  # what Ray's last processes wrote into one that was removed
                if time.time() - folder.stat().st_mtime > YOUNG_S:
                    shutil.rmtree(folder)
                continue
            with (folder / OWNER).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@contextmanager
def _kept_logs(ray_folder: Path | None, kept: Path) -> Iterator[None]:
    """After an error Ray's own logs stay with the run."""
    try:
        yield
    except Exception:
        if ray_folder is not None:
            for file in ray_folder.glob("session_2*/logs/*"):
                _keep(file, kept)
        raise


def _keep(file: Path, kept: Path) -> None:
    with contextlib.suppress(OSError):
        if file.is_file() and 0 < file.stat().st_size <= LOG_BYTES:
            write_aside(
                make_folder(kept.parent, kept.name) / file.name, [redacted(file.read_text(errors="replace")).encode()]
            )


def worker_resources(sizing: "Sizing") -> dict[str, float]:
    """Of one training worker."""
    if any(node.gpus for node in sizing.nodes):
        return {"GPU": 1, "CPU": sizing.kept_cores}
    if any(node.trainers for node in sizing.nodes):
        return {TRAINER_RESOURCE: 1, "CPU": sizing.kept_cores}
    return {"CPU": sizing.kept_cores}


class WithoutSecrets(logging.Formatter):
    """Ray quotes errors, and those may quote addresses and headers."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


@contextmanager
def _quiet(folder: RunFolder) -> Iterator[None]:
    """What Ray has to say goes to logs/driver.log instead of the terminal, and it starts no cluster unasked; as it was afterwards.

    But not after Ctrl-C and SIGTERM: the process ends then, and Ray's threads complain of what was taken from them.
    """
    handler = logging.StreamHandler(open_to_append(make_folder(folder.path, "logs") / "driver.log"))
    handler.setFormatter(WithoutSecrets())
    with ExitStack() as as_it_was:
        for name in ("ray", "ray.data", "ray.train", "ray.tune"):
            logger = logging.getLogger(name)
            as_it_was.callback(_set_handlers, logger, logger.handlers, propagate=logger.propagate)
            _set_handlers(logger, [handler], propagate=False)
        as_it_was.callback(print_through(logging.getLogger("ray").error))
        as_it_was.callback(start_none_unasked())
        try:
            yield
        except (KeyboardInterrupt, TerminatedError):
            as_it_was.pop_all()
            raise


def _set_handlers(logger: logging.Logger, handlers: list[logging.Handler], *, propagate: bool) -> None:
    logger.handlers, logger.propagate = handlers, propagate
