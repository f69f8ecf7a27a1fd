"""Our own cluster: its size, its folder, which goes with the run, and what killed runs leave, which is removed."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vlatune.config import DatasetConfig, PolicyConfig, RayConfig, RunConfig
from vlatune.config_checks import validate
from vlatune.pipeline import sizing
from vlatune.pipeline.sizing import Host, Node, RunShape, plan_on_host, plan_on_nodes
from vlatune.report.run_folder import RunFolder
from vlatune.train.driver.cluster import (
    PREFIX,
    YOUNG_S,
    Cluster,
    keep_token_private,
    local_ray,
    own_folder,
    read_nodes,
    size_for_this_host,
    worker_resources,
)

GB = 10**9
HOST = Host(cpus=8, ram_bytes=32 * GB, shm_bytes=16 * GB)
RUN = RunShape(num_workers=1, row_bytes=460_000, run_rows=32)
pytestmark = pytest.mark.early

KEEP_AND_DIE = """
import os
from vlatune.train.driver.cluster import own_folder
with own_folder() as folder:
    (folder / "session").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_folder_goes_with_its_run(temporary):
    with own_folder() as folder:
        assert folder is not None
        (folder / "session").mkdir()
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_living_ones_stays(temporary):
    killed = subprocess.run([sys.executable, "-c", KEEP_AND_DIE], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert (left / "session").is_dir()
    with own_folder() as first:
        assert not left.exists()
        with own_folder() as second:
            assert sorted(temporary.iterdir()) == sorted([first, second])


def test_one_without_an_owner_is_removed_when_it_is_old(temporary):
    young, old = temporary / f"{PREFIX}young", temporary / f"{PREFIX}old"
    for folder in (young, old):
        folder.mkdir()
    past_s = time.time() - 2 * YOUNG_S
    os.utime(old, (past_s, past_s))
    with own_folder():
        assert young.exists()
        assert not old.exists()


def test_a_long_path_is_left_to_ray(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 40)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with own_folder() as folder:
        assert folder is None


def start_with(outcomes: list[Exception | None], monkeypatch) -> int:
    """Start a cluster whose first starts end so; how many there were."""
    left = list(outcomes)

    def init(_self) -> None:
        if outcome := left.pop(0):
            raise outcome

    monkeypatch.setattr(Cluster, "_init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)  # the session's cluster runs on
    Cluster(plan_on_host(HOST, RUN), None, ours=True)
    return len(outcomes) - len(left)


def test_a_cluster_that_loses_a_part_while_it_starts_is_started_again(monkeypatch):
    died = Exception("The current node timed out during startup")
    assert start_with([None], monkeypatch) == 1
    assert start_with([died, died, None], monkeypatch) == 3
    with pytest.raises(RuntimeError, match="Ray did not start on this machine, 3 times: The current node timed out"):
        start_with([died, died, died, None], monkeypatch)
    with pytest.raises(ValueError, match="object_store_memory"):  # nothing that another try could mend
        start_with([ValueError("object_store_memory"), None], monkeypatch)


def test_no_cluster_is_started_unasked(monkeypatch):
    """By a thread that has not heard that ours is gone."""
    import ray
    from ray._private import auto_init_hook

    from vlatune.ray_internals import start_none_unasked

    started = []
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: started.append("by itself"))
    auto_init_hook.auto_init_ray()
    assert started == ["by itself"]
    start_none_unasked()
    auto_init_hook.auto_init_ray()
    assert started == ["by itself"]


def test_what_ray_prints_goes_to_the_log(tmp_path, capfd):
    """Ray prints errors of the cluster through this function, whatever its settings say."""
    import ray._private.worker

    from vlatune.train.driver.cluster import _quiet

    with _quiet(RunFolder(tmp_path)):
        ray._private.worker.print_to_stdstream(
            {"lines": ["a worker died", "and why"], "pid": "raylet"}, ignore_prefix=False
        )
    assert (tmp_path / "logs" / "driver.log").read_text() == "a worker died\nand why\n"
    assert capfd.readouterr() == ("", "")


def of_this_process() -> list[object]:
    """What a run changes of Ray in its process."""
    import ray._private.worker
    from ray._private import auto_init_hook

    loggers = [logging.getLogger(name) for name in ("ray", "ray.data", "ray.train", "ray.tune")]
    told = [(list(logger.handlers), logger.propagate) for logger in loggers]
    return [told, ray._private.worker.print_to_stdstream, auto_init_hook.enable_auto_connect]


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_what_a_run_changes_of_ray_is_as_before_afterwards(tmp_path, end):
    """In a notebook, which lives on; a process that was interrupted ends, and quietly."""
    from vlatune.train.driver.cluster import _quiet

    before = of_this_process()
    with _quiet(RunFolder(tmp_path / "outer")):  # so that this test leaves nothing changed
        first = of_this_process()
        assert first != before
        with contextlib.suppress(ValueError, KeyboardInterrupt), _quiet(RunFolder(tmp_path / "inner")):
            if end:
                raise end
        assert (of_this_process() == first) == (end is not KeyboardInterrupt)
    assert of_this_process() == before


# Its size


def test_flags_go_before_what_is_found(monkeypatch):
    monkeypatch.setattr(sizing, "read_host", lambda gpus: HOST)
    found = size_for_this_host(RunConfig(), RUN)
    assert found == plan_on_host(HOST, RUN)
    (node,) = size_for_this_host(RunConfig(ray=RayConfig(num_cpus=3, object_store_bytes=GB)), RUN).nodes
    assert (node.cpus, node.store_bytes) == (3, GB)


@pytest.mark.parametrize(("name", "least"), [("num_cpus", 1), ("object_store_bytes", 83886080)])
def test_flags_that_ray_could_not_start_with_are_refused(name, least):
    config = RunConfig(dataset=DatasetConfig(root=("d",)), policy=PolicyConfig(path="p"))
    validate(replace(config, ray=RayConfig(**{name: least})))
    with pytest.raises(ValueError, match=rf"--ray.{name}={least - 1}: must be {least} or more"):
        validate(replace(config, ray=RayConfig(**{name: least - 1})))


@pytest.mark.parametrize(("visible", "used"), [(None, 4), (["0", "2"], 2), ([], 0)])
def test_gpus_are_those_that_ray_will_use(monkeypatch, visible, used):
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Manager

    monkeypatch.setattr("ray._private.accelerators.get_accelerator_manager_for_resource", lambda _: Manager)
    monkeypatch.setattr(Manager, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    monkeypatch.setattr(Manager, "get_current_process_visible_accelerator_ids", staticmethod(lambda: visible))
    monkeypatch.setattr(sizing, "read_host", lambda gpus: Host(8, 32 * GB, 16 * GB, gpus))
    assert size_for_this_host(RunConfig(), RUN).nodes[0].gpus == used


def test_a_worker_takes_the_cores_that_are_kept_for_it():
    assert worker_resources(plan_on_host(HOST, RUN)) == {"vlatune_trainer": 1, "CPU": 1}
    assert worker_resources(plan_on_host(Host(8, 32 * GB, 16 * GB, gpus=1), RUN)) == {"GPU": 1, "CPU": 2}
    assert worker_resources(plan_on_nodes([Node(8, GB)], RUN)) == {"CPU": 1}


def test_dead_nodes_are_not_counted(monkeypatch):
    alive = {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0, "object_store_memory": 1e9, "memory": 8e9}}
    head = {"Alive": True, "Resources": {"object_store_memory": 5e8}}
    monkeypatch.setattr("ray.nodes", lambda: [head, alive, {"Alive": False, "Resources": {}}])
    assert read_nodes() == [Node(0, GB // 2), Node(4, GB, gpus=1)]
    assert plan_on_nodes(read_nodes(), RUN).store_bytes == GB  # no reader and no worker can be on the head
    cluster = Cluster(plan_on_nodes([Node(64, GB)], RUN), None, ours=False)
    assert not cluster.renew()  # another's mends itself, and is looked at anew
    assert cluster.sizing == plan_on_nodes(read_nodes(), RUN)


# Who can reach it

LISTEN = """
import sys
import time
from pathlib import Path
import ray
from listening import listeners
from vlatune.config import RayConfig, RunConfig
from vlatune.pipeline.sizing import RunShape
from vlatune.train.driver.cluster import local_ray
from vlatune.report.run_folder import RunFolder

@ray.remote
def where():
    return ray.util.get_node_ip_address()

config = RunConfig(ray=RayConfig(num_cpus=2, object_store_bytes=100_000_000))
with local_ray(config, RunFolder(Path(sys.argv[1])), RunShape(num_workers=1, row_bytes=460_000, run_rows=4)) as cluster:
    assert ray.get(where.remote()) == "127.0.0.1"
    print("\\n".join(listeners()), flush=True)
    assert cluster.lost_part() is None
    cluster.end()
    while cluster.lost_part() is None:
        time.sleep(0.01)
"""


def test_our_own_asks_for_a_token_and_listens_on_loopback_only(tmp_path):
    """In a process and a home of its own. What is said where tokens are switched off is in test_driver.py."""
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": f"{env.get('PYTHONPATH', '')}:{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", LISTEN, str(tmp_path / "run")], env=env, capture_output=True, text=True, check=True
    )
    said, *heard = done.stdout.splitlines()
    assert said == "vlatune: Ray runs on this machine alone: it listens on 127.0.0.1, and asks for a token"
    assert heard
    assert {address.rpartition(":")[0] for address in heard} == {"127.0.0.1"}, done.stdout
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
    assert "warning" not in done.stderr


JOIN = """
import socket
from torch import distributed
from listening import listeners
from vlatune.train.driver.cluster import on_loopback
from vlatune.train.driver.trainer import _join_on_loopback

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
with on_loopback():
    _join_on_loopback(port, "gloo", 0, 1)
    distributed.barrier()
    print("\\n".join(listeners()))
    distributed.destroy_process_group()
"""


def test_the_workers_of_our_own_find_each_other_on_loopback_only():
    env = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}"}
    done = subprocess.run([sys.executable, "-c", JOIN], env=env, capture_output=True, text=True, check=True)
    heard = done.stdout.split()
    assert heard
    assert {address.rpartition(":")[0] for address in heard} == {"127.0.0.1"}, done.stdout


def test_joining_an_open_cluster_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for name in ("ray.init", "ray.shutdown"):
        monkeypatch.setattr(name, lambda *_, **__: None)
    monkeypatch.setattr("vlatune.train.driver.cluster.read_nodes", lambda: [Node(8, 4 * GB, 0, 1)])
    for is_closed in (True, False):
        monkeypatch.setattr("vlatune.train.driver.cluster.asks_for_token", lambda is_closed=is_closed: is_closed)
        with local_ray(RunConfig(), RunFolder(tmp_path), RUN):
            pass
        said = capsys.readouterr().err
        assert is_closed != ("was joined without token authentication" in said)
        assert is_closed != ("ray get-auth-token --generate" in said)


def test_a_token_that_others_may_read_is_closed_to_them(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    keep_token_private(tmp_path)
    token = tmp_path / ".ray/auth_token"
    made = token.read_text()
    assert (len(made), token.stat().st_mode & 0o777) == (64, 0o600)
    token.chmod(0o644)
    keep_token_private(tmp_path)
    assert (token.read_text(), token.stat().st_mode & 0o777) == (made, 0o600)
