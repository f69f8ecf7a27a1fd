"""The local cluster of a run: its folder, size and token."""

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vlatune.config.settings import RayConfig, RunConfig
from vlatune.feed.sizing import Host, Node, RunShape, plan_on_host, plan_on_nodes
from vlatune.train.driver.ray_cluster import (
    PREFIX,
    _redirect_output,
    own_folder,
    protect_token,
    size_for_this_host,
    worker_resources,
)

GB = 10**9
HOST = Host(cpus=8, ram_bytes=32 * GB, shm_bytes=16 * GB)
RUN = RunShape(num_workers=1, row_bytes=460_000, run_rows=32)

KEEP_AND_DIE = """
import os
from vlatune.train.driver.ray_cluster import own_folder
with own_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_folders_of_finished_and_killed_runs_are_removed(temporary):
    killed = subprocess.run([sys.executable, "-c", KEEP_AND_DIE], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(killed.stdout.strip())
    (young := temporary / f"{PREFIX}young").mkdir()  # without an owner
    assert left.is_dir()
    with own_folder() as first, own_folder() as second:
        assert sorted(temporary.iterdir()) == sorted([young, first, second])
    assert list(temporary.iterdir()) == [young]


def test_long_path_is_left_to_ray(monkeypatch, tmp_path):
    (tmp_path / ("x" * 40)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 40)))
    with own_folder() as folder:
        assert folder is None


def ray_loggers() -> list[tuple[list[logging.Handler], bool]]:
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data", "ray.train", "ray.tune")]
    return [(list(logger.handlers), logger.propagate) for logger in loggers]


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_output_of_ray_goes_to_the_log_until_the_run_ends(tmp_path, end, capfd):
    """After Ctrl-C it stays there, because Ray's threads print errors until the process exits."""
    before = ray_loggers()
    with _redirect_output(tmp_path / "outer"):  # undoes what the inner one leaves
        outer = ray_loggers()
        with contextlib.suppress(ValueError, KeyboardInterrupt), _redirect_output(tmp_path / "inner"):
            logging.getLogger("ray.train").error("a worker died")
            if end:
                raise end
        assert (ray_loggers() == outer) == (end is not KeyboardInterrupt)
    assert ray_loggers() == before
    assert (tmp_path / "inner" / "logs" / "driver.log").read_text() == "a worker died\n"
    assert capfd.readouterr() == ("", "")


def test_flags_take_precedence_over_the_host():
    (node,) = size_for_this_host(RunConfig(ray=RayConfig(num_cpus=3, object_store_bytes=GB)), RUN).nodes
    assert (node.cpus, node.store_bytes) == (3, GB)


def test_worker_gets_its_cores_and_gpu():
    assert worker_resources(plan_on_host(HOST, RUN)) == {"vlatune_trainer": 1, "CPU": 1}
    assert worker_resources(plan_on_host(Host(8, 32 * GB, 16 * GB, gpus=1), RUN)) == {"GPU": 1, "CPU": 2}
    assert worker_resources(plan_on_nodes([Node(8, GB)], RUN)) == {"CPU": 1}


def test_token_is_readable_by_its_owner_only(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    protect_token(tmp_path)
    token = tmp_path / ".ray/auth_token"
    made = token.read_text()
    assert (len(made), token.stat().st_mode & 0o777) == (64, 0o600)
    token.chmod(0o644)
    protect_token(tmp_path)
    assert (token.read_text(), token.stat().st_mode & 0o777) == (made, 0o600)
