"""The private parts of Ray that vlatune uses are in one module, and the installed Ray has them."""

import ast
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, worker
from ray.job_config import JobConfig
from repository_files import ROOT
from waiting import wait_until

from vlatune.ray_internals import (
    DEFAULT_STOP_S,
    JOB_VARIABLE,
    NETWORK_VARIABLE,
    RECONNECT_VARIABLE,
    STOP_VARIABLE,
    check_closed,
    count_gpus,
    draining_nodes,
    job_groups,
    ray_on_loopback,
    redirect_errors,
    remove_group,
    store_counters,
)
from vlatune.train.driver.ray_cluster import find_short_stop, has_gpus, ray_environment
from vlatune.train.driver.ray_trainer import TRAIN_SETTINGS

SRC = ROOT / "src" / "vlatune"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports or reaches of Ray through a name with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "ray" and any(part.startswith("_") for part in rest):
                yield name


def test_no_other_module_uses_a_private_part_of_ray():
    found = {
        str(path.relative_to(SRC)): names
        for path in sorted(SRC.rglob("*.py"))
        if path.name != "ray_internals.py" and (names := sorted(set(private_names(ast.parse(path.read_text())))))
    }
    assert not found, f"{found}: private parts of Ray belong into ray_internals.py, with the reason and a test"
    assert list(private_names(ast.parse((SRC / "ray_internals.py").read_text())))


def test_ray_knows_the_settings_of_a_cluster():
    compiled = next(Path(ray.__file__).parent.glob("_raylet*.so")).read_bytes()
    names = [name.removeprefix("RAY_") for name in (*ray_environment(), RECONNECT_VARIABLE)]
    assert not [name for name in names if name.encode() not in compiled]


def test_ray_train_knows_its_settings():
    from ray.train.v2._internal import constants

    assert set(TRAIN_SETTINGS) <= {value for value in vars(constants).values() if isinstance(value, str)}


def test_ray_knows_the_variables_of_a_job():
    from ray._private.runtime_env import constants
    from ray.dashboard.modules.job.job_supervisor import JobSupervisor

    assert constants.RAY_JOB_CONFIG_JSON_ENV_VAR == JOB_VARIABLE
    assert f"DEFAULT_{STOP_VARIABLE}" in vars(JobSupervisor)
    assert DEFAULT_STOP_S == JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, False),
        ({JOB_VARIABLE: "{}"}, True),
        ({JOB_VARIABLE: "{}", STOP_VARIABLE: "25"}, True),
        ({JOB_VARIABLE: "{}", STOP_VARIABLE: "60"}, False),
        ({JOB_VARIABLE: "{}", STOP_VARIABLE: "60 s"}, True),
    ],
)
def test_job_that_ray_would_kill_while_it_saves_gets_a_warning(variables, warns):
    assert (find_short_stop(variables, 25.0) is not None) == warns


def test_gpus_of_a_run_are_those_of_the_cluster(ray_local, monkeypatch):
    monkeypatch.setattr("vlatune.train.driver.ray_cluster.count_gpus", lambda: 4)  # of the driver's machine
    assert not has_gpus()


def test_loopback_setting_is_temporary(monkeypatch):
    monkeypatch.setenv(NETWORK_VARIABLE, "1")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    with ray_on_loopback():
        assert (ray_constants.ENABLE_RAY_CLUSTER, os.environ[NETWORK_VARIABLE]) == (False, "0")
    assert (ray_constants.ENABLE_RAY_CLUSTER, os.environ[NETWORK_VARIABLE]) == (True, "1")
    assert f'"{NETWORK_VARIABLE}"' in inspect.getsource(ray_constants)


def test_ray_reports_nodes_and_store(ray_local):
    assert draining_nodes() == set()
    assert min(store_counters()) >= 0


def test_placement_groups_of_the_job_are_found_and_removed(ray_local):
    before = job_groups()
    group = ray.util.placement_group([{"CPU": 1}])
    assert group.wait(60)
    (left,) = job_groups() - before
    remove_group(left)
    wait_until(lambda: job_groups() == before)


def test_job_whose_workers_import_from_the_drivers_folder_is_rejected(ray_local):
    """The session's cluster is an ordinary one; tests/e2e/test_hostile_code.py starts a run's own."""
    assert "_runtime_env_has_working_dir" in vars(JobConfig)
    with pytest.raises(RuntimeError, match="import code from"):
        check_closed()


@pytest.mark.parametrize(("visible", "used"), [(None, 4), (["0", "2"], 2), ([], 0)])
def test_gpus_are_counted_as_by_ray(monkeypatch, visible, used):
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Manager

    monkeypatch.setattr("ray._private.accelerators.get_accelerator_manager_for_resource", lambda _: Manager)
    monkeypatch.setattr(Manager, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    monkeypatch.setattr(Manager, "get_current_process_visible_accelerator_ids", staticmethod(lambda: visible))
    assert count_gpus() == used


def test_fallbacks_for_another_ray(monkeypatch):
    from ray._private import accelerators
    from ray._private.state import GlobalState

    monkeypatch.delattr(GlobalState, "get_draining_nodes")
    monkeypatch.delattr(accelerators, "get_accelerator_manager_for_resource")
    monkeypatch.delattr(worker, "print_to_stdstream")
    assert draining_nodes() == set()
    assert count_gpus() >= 0
    redirect_errors(pytest.fail)()
    assert not hasattr(worker, "print_to_stdstream")


def test_ray_prints_through_the_function_that_is_replaced():
    written: list[str] = []
    before = worker.print_to_stdstream
    undo = redirect_errors(written.append)
    worker.print_to_stdstream({"lines": ["a", "b"]}, ignore_prefix=True)
    undo()
    assert written == ["a\nb"]
    assert worker.print_to_stdstream is before
    assert "print_to_stdstream(" in inspect.getsource(worker)
