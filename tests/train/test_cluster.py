"""The folder of our own cluster: one for each run, gone with it, and what killed runs leave is removed."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlatune.config import RunConfig
from vlatune.train.cluster import PREFIX, YOUNG_S, Cluster, own_folder

pytestmark = pytest.mark.ray

KEEP_AND_DIE = """
import os
from vlatune.train.cluster import own_folder
with own_folder() as folder:
    (folder / "session").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def temporary(monkeypatch, tmp_path_factory) -> Path:
    """A short path of its own for temporary files: Ray's sockets lie below it."""
    folder = Path(tmp_path_factory.getbasetemp().root) / "tmp" / f"vt{os.getpid()}"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    yield folder
    subprocess.run(["rm", "-r", folder], check=True)


def test_a_folder_goes_with_its_run(temporary):
    with own_folder() as folder:
        assert folder is not None
        (folder / "session").mkdir()
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_living_ones_stays(temporary):
    env = os.environ | {"TMPDIR": str(temporary)}
    killed = subprocess.run(
        [sys.executable, "-c", KEEP_AND_DIE], env=env, stdout=subprocess.PIPE, text=True, check=False
    )
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
    Cluster(RunConfig(), None, ours=True)
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

    from vlatune.train.cluster import _start_none_unasked

    started = []
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: started.append("by itself"))
    auto_init_hook.auto_init_ray()
    assert started == ["by itself"]
    _start_none_unasked()
    auto_init_hook.auto_init_ray()
    assert started == ["by itself"]


def test_what_ray_prints_goes_to_the_log(monkeypatch, tmp_path, capfd):
    """Ray prints errors of the cluster through this function, whatever its settings say."""
    import ray._private.worker

    from vlatune.train.cluster import _quiet
    from vlatune.train.folder import RunFolder

    monkeypatch.setattr(ray._private.worker, "print_to_stdstream", ray._private.worker.print_to_stdstream)
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data", "ray.train", "ray.tune")]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    try:
        _quiet(RunFolder(tmp_path))
        ray._private.worker.print_to_stdstream(
            {"lines": ["a worker died", "and why"], "pid": "raylet"}, ignore_prefix=False
        )
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
    assert (tmp_path / "logs" / "driver.log").read_text() == "a worker died\nand why\n"
    assert capfd.readouterr() == ("", "")
