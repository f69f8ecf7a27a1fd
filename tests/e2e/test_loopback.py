"""A local cluster and its workers listen on loopback only, and the cluster requires a token."""

import os
import subprocess
import sys

CLUSTER = """
import sys
import time
from pathlib import Path
import ray
from listening import listeners
from vlatune.config.settings import RayConfig, RunConfig
from vlatune.feed.sizing import RunShape
from vlatune.train.driver.ray_cluster import local_ray

@ray.remote
def where():
    return ray.util.get_node_ip_address()

config = RunConfig(ray=RayConfig(num_cpus=2, object_store_bytes=100_000_000))
with local_ray(config, Path(sys.argv[1]), RunShape(num_workers=1, row_bytes=460_000, run_rows=4)) as cluster:
    assert ray.get(where.remote()) == "127.0.0.1"
    print("\\n".join(listeners()), flush=True)
    assert cluster.lost_part() is None
    cluster.kill()
    assert cluster.lost_part() is not None
"""
WORKER = """
import os
import socket
from torch import distributed
from listening import listeners
from vlatune.train.driver.ray_trainer import join_group

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
join_group("127.0.0.1", port, "gloo", 0, 1)
distributed.barrier()
print("\\n".join(listeners()))
distributed.destroy_process_group()
"""


def check_addresses(program: str, *words: str, home: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, env=env | {"HOME": home}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    addresses = [line for line in done.stdout.splitlines() if not line.startswith("vlatune: ")]
    assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}, done.stdout


def test_local_cluster(tmp_path):
    check_addresses(CLUSTER, str(tmp_path / "run"), home=str(tmp_path))
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600


def test_process_group_of_the_workers(tmp_path):
    check_addresses(WORKER, home=str(tmp_path))
