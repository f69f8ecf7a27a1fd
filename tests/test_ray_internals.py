"""Every private part of Ray that we use is there, does what we rely on, is named in one file, and leaves no trace."""

import ast
import inspect
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.data
from ray._private import auto_init_hook, ray_constants, worker
from ray.data._internal.execution import streaming_executor, streaming_executor_state
from ray.data._internal.execution.resource_manager import ResourceManager
from repository_files import ROOT

import vlatune
from vlatune import ray_internals
from vlatune.ray_internals import (
    EAGER_S,
    LEAN_PARTS,
    LIMITS_EVERY_S,
    LOOK_EVERY_S,
    ON_A_NETWORK,
    PACE_PARTS,
    REST_S,
    TRAIN_SETTINGS,
    TRAIN_WORKER_TITLE,
    Often,
    Pace,
    asks_for_token,
    count_gpus,
    draining_nodes,
    has_parts,
    init_options,
    keep_pace,
    lean_trainer,
    make_block,
    print_through,
    ray_on_loopback,
    store_counters,
)

pytestmark = pytest.mark.ray
SRC = ROOT / "src" / "vlatune"
WAIT = "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S"


# One file


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private parts of Ray that a module imports, reaches for, hands over, or sets by name."""
    aliases = {"ray"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ray":
            aliases |= {alias.asname or alias.name for alias in node.names}
            yield from (full for alias in node.names if is_private(full := f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.keyword) and node.arg in ("_system_config", "_temp_dir", "_node_ip_address"):
            yield node.arg
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("RAY_TRAIN_", "RAY_DATA_", "RAY_ENABLE_")):
            yield str(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value).partition(".")[0] in aliases):
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr in ("custom_execution_callback_classes", "all_processes"):
            yield ast.unparse(node)


def attributes_of_others(tree: ast.AST) -> Iterator[str]:
    """Underscore names that are taken of anything but `self` and `cls`."""
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if is_private and ast.unparse(node.value) not in ("self", "cls"):
            yield ast.unparse(node)


def imports_ray(tree: ast.AST) -> bool:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == "ray" for name in names)


def test_a_module_that_has_objects_of_rays_takes_no_underscore_name_of_any():
    """What comes out of Ray has no name that could be searched for: an executor, a handle, a context."""
    trees = {path.relative_to(SRC).as_posix(): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}
    found = {name: set(attributes_of_others(tree)) for name, tree in trees.items() if imports_ray(tree)}
    inner = found.pop("ray_internals.py")
    assert {"executor._topology", "executor._scheduling_loop_step"} <= inner  # the search sees them
    assert not {name: names for name, names in found.items() if names}


def is_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "ray" and any(part.startswith("_") for part in rest)


def test_no_other_module_names_a_private_part_of_ray():
    found = {
        str(path.relative_to(SRC)): names
        for path in sorted(SRC.rglob("*.py"))
        if path.name != "ray_internals.py" and (names := sorted(set(private_names(ast.parse(path.read_text())))))
    }
    assert not found, f"{found}: private parts of Ray belong into ray_internals.py, with the reason and a test"


def test_the_search_sees_all_kinds_of_names():
    code = """
import ray._private.worker
from ray.data._internal import x
from ray.train.torch import config
ray._raylet.y
config._setup()
ray.init(_temp_dir=1)
os.environ["RAY_TRAIN_Z"] = "1"
context.custom_execution_callback_classes = []
"""
    imported = {"ray._private.worker", "ray.data._internal.x"}
    reached = {"ray._raylet", "config._setup", "context.custom_execution_callback_classes"}
    assert set(private_names(ast.parse(code))) == imported | reached | {"_temp_dir", "RAY_TRAIN_Z"}
    assert list(private_names(ast.parse((SRC / "ray_internals.py").read_text())))


def test_this_is_the_ray_that_was_tested():
    assert version("ray").startswith(f"{ray_internals.TESTED_VERSION}."), (
        "run the tests and the benchmarks, then raise TESTED_VERSION"
    )


# A cluster of our own


def test_ray_knows_the_settings_of_a_cluster(tmp_path):
    options = init_options(folder=tmp_path, niceness=0)
    assert options["_temp_dir"] == str(tmp_path)
    compiled = next(Path(ray.__file__).parent.glob("_raylet*.so")).read_bytes()
    unknown = [name for name in options["_system_config"] if name.encode() not in compiled]
    assert not unknown, f"Ray has no setting {unknown} any more, and would not start"
    init = inspect.getsource(worker.init)
    assert all(f'kwargs.pop("{name}"' in init for name in options)


def test_loopback_is_for_the_time_of_a_start(monkeypatch):
    monkeypatch.setenv(ON_A_NETWORK, "1")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    with ray_on_loopback():
        assert (ray_constants.ENABLE_RAY_CLUSTER, os.environ[ON_A_NETWORK]) == (False, "0")
    assert (ray_constants.ENABLE_RAY_CLUSTER, os.environ[ON_A_NETWORK]) == (True, "1")
    monkeypatch.delenv(ON_A_NETWORK)
    with ray_on_loopback():
        pass
    assert ON_A_NETWORK not in os.environ
    assert f'"{ON_A_NETWORK}"' in inspect.getsource(ray_constants)


def test_what_ray_is_asked_about_itself_is_answered(ray_local):
    assert isinstance(asks_for_token(), bool)
    assert count_gpus() >= 0
    assert draining_nodes() == set()
    spilled, fallback, used = store_counters()
    assert min(spilled, fallback, used) >= 0


def test_nodes_that_cannot_be_asked_for_are_none(monkeypatch):
    from ray._private.state import GlobalState

    monkeypatch.delattr(GlobalState, "get_draining_nodes")
    assert draining_nodes() == set()


def test_ray_prints_through_the_function_that_is_replaced(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    first, *_ = inspect.signature(worker.print_to_stdstream).parameters
    assert first == "data"
    print_through(said.append)
    worker.print_to_stdstream({"lines": ["a", "b"]}, ignore_prefix=True)
    assert said == ["a\nb"]
    assert "print_to_stdstream(" in inspect.getsource(worker.print_worker_logs) + inspect.getsource(worker)


def test_ray_asks_the_switch_before_it_starts_a_cluster():
    assert "enable_auto_connect and" in inspect.getsource(auto_init_hook.auto_init_ray)


# Ray Data


class Manager:
    GLOBAL_LIMITS_UPDATE_INTERVAL_S = 1


class Executor:
    def __init__(self) -> None:
        self._resource_manager, self._topology = Manager(), {}
        self.told: list[int] = []
        self.set_external_consumer_bytes = self.told.append

    def _scheduling_loop_step(self, topology: object) -> float:
        return getattr(streaming_executor_state, WAIT)


def test_tasks_are_looked_for_often_during_our_turns_alone():
    executor, usual_s = Executor(), getattr(streaming_executor_state, WAIT)
    Pace().before_execution_starts(executor)
    assert executor._scheduling_loop_step({}) == LOOK_EVERY_S != usual_s
    assert getattr(streaming_executor_state, WAIT) == usual_s


def test_turns_that_overlap_leave_the_setting_as_it_was():
    often, usual_s = Often(), getattr(streaming_executor_state, WAIT)
    often.__enter__()
    often.__enter__()
    often.__exit__()
    assert getattr(streaming_executor_state, WAIT) == LOOK_EVERY_S
    often.__exit__()
    assert getattr(streaming_executor_state, WAIT) == usual_s


def test_limits_are_asked_for_often_at_first_then_as_ray_does():
    executor, pace = Executor(), Pace()
    pace.before_execution_starts(executor)
    manager = executor._resource_manager
    assert manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == LIMITS_EVERY_S
    assert executor.told == [0]
    pace._began_s -= EAGER_S
    for _ in range(3):
        pace.on_execution_step(executor)
        assert manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == 1
    assert Manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == 1


def test_the_loop_rests_longer_while_nothing_happens(monkeypatch):
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    queue: list[int] = []
    metrics = SimpleNamespace(num_tasks_submitted=1, num_task_outputs_generated=0)
    executor, pace = SimpleNamespace(_topology=OneOperator(metrics, queue)), Pace()
    for _ in range(6):
        pace.on_execution_step(executor)
    assert rests[0] <= LOOK_EVERY_S < rests[-1] <= REST_S
    queue.append(1)
    pace.on_execution_step(executor)
    assert rests[-1] <= LOOK_EVERY_S


def test_a_turn_that_has_waited_for_a_task_is_followed_by_the_next_at_once(monkeypatch):
    """However long nothing happens: the core of a task that ends is idle until the loop looks."""
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    metrics = SimpleNamespace(num_tasks_submitted=1, num_task_outputs_generated=0)
    executor, pace = SimpleNamespace(_topology=OneOperator(metrics, [])), Pace()
    for _ in range(6):
        pace._turned_s -= LOOK_EVERY_S
        pace.on_execution_step(executor)
    assert rests == [0.0] * 6


def test_an_executor_that_does_not_tell_goes_on_without_long_rests(monkeypatch):
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    executor, pace = Executor(), Pace()
    del executor._resource_manager, executor._topology  # as another Ray may have it
    pace.before_execution_starts(executor)
    pace._began_s -= EAGER_S
    for _ in range(6):
        pace.on_execution_step(executor)
    assert max(rests) <= LOOK_EVERY_S


class OneOperator:
    """One operator; plain namespaces cannot be keys."""

    def __init__(self, metrics: object, queue: list[int]) -> None:
        self._one = (SimpleNamespace(metrics=metrics), SimpleNamespace(output_queue=queue))

    def items(self):
        return [self._one]


def test_a_dataset_gets_a_pace_of_its_own():
    context, other = ray.data.DataContext(), ray.data.DataContext()
    keep_pace(context)
    assert Pace in context.execution_callback_classes
    assert Pace not in other.execution_callback_classes


def test_ray_reads_what_is_set():
    """A Ray that has renamed them would go on as before, and every run would start later and read slower."""
    assert has_parts(PACE_PARTS, "")
    manager = object.__new__(ResourceManager)
    manager._global_limits = "old"  # pyright: ignore[reportAttributeAccessIssue]
    manager._global_limits_last_update_time = time.time() - LIMITS_EVERY_S / 2
    assert manager.get_global_limits() == "old"
    assert "self.GLOBAL_LIMITS_UPDATE_INTERVAL_S" in inspect.getsource(ResourceManager.get_global_limits)
    assert f"timeout={WAIT}" in inspect.getsource(streaming_executor_state.process_completed_tasks)
    running = inspect.getsource(streaming_executor.StreamingExecutor.run)
    assert "callback.on_execution_step(self)" in running
    assert "self._scheduling_loop_step(self._topology)" in running
    assert "callback.before_execution_starts(self)" in inspect.getsource(streaming_executor.StreamingExecutor.execute)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What this Ray has is found out once a process."""
    has_parts.cache_clear()
    yield
    has_parts.cache_clear()


def test_without_its_parts_a_dataset_goes_at_rays_own_pace(monkeypatch, capsys, asked_anew):
    monkeypatch.delattr(streaming_executor_state, WAIT)
    context = ray.data.DataContext()
    keep_pace(context)
    keep_pace(context)
    assert Pace not in context.execution_callback_classes
    said = capsys.readouterr().err
    assert said.count("reading goes at Ray's own pace") == 1
    assert f"Ray {ray.__version__} has no ray.data._internal.execution.streaming_executor_state:{WAIT}" in said


def test_a_block_of_one_row(ray_local):
    block = make_block({"a": 1, "b": "x"})
    assert ray.data.block.BlockAccessor.for_block(block).num_rows() == 1


def settings_of_this_process() -> dict[str, object]:
    """All that reading could have changed for the caller's other work."""
    context = ray.data.DataContext.get_current()
    owners = (streaming_executor_state, streaming_executor, ResourceManager, streaming_executor.StreamingExecutor)
    parts = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    parts = {name: repr(value) for name, value in parts.items() if "__" not in name and "_num_shutdown" not in name}
    loggers = {name: logging.getLogger(name).level for name in ("ray", "ray.data", "ray.train")}
    own = {name: repr(value) for name, value in vars(context).items()}
    return {"environment": dict(os.environ), "parts": parts, "context": own, "loggers": loggers}


def test_read_lerobot_leaves_nothing_changed(ray_local, dataset_v3, monkeypatch):
    seen: dict[str, set[float]] = {"ours": set(), "others": set()}
    before = settings_of_this_process()
    dataset = vlatune.read_lerobot(str(dataset_v3), resize=(32, 32), action_horizon=2)
    assert settings_of_this_process() == before, "by the call"

    process = streaming_executor.process_completed_tasks
    for whose, read in {"ours": dataset, "others": ray.data.range(4)}.items():
        with monkeypatch.context() as watched:
            watched.setattr(
                streaming_executor,
                "process_completed_tasks",
                lambda *args, whose=whose, **more: (
                    seen[whose].add(getattr(streaming_executor_state, WAIT)) or process(*args, **more)
                ),
            )
            read.context.enable_progress_bars = False
            assert sum(len(batch["index" if whose == "ours" else "id"]) for batch in read.iter_batches()) > 0
    assert seen == {"ours": {LOOK_EVERY_S}, "others": {getattr(streaming_executor_state, WAIT)}}
    assert settings_of_this_process() == before, "by reading"


WATCHED = """
import gc, hashlib, inspect, logging, os, pickle, random, resource, signal, socket, sys, threading, warnings
import numpy, ray, ray.data, torch

ray.init(log_to_driver=False, logging_level="ERROR")
ray.data.DataContext.get_current().enable_progress_bars = False
ray.data.range(4).materialize()  # what Ray itself does at its first reading
import vlatune
import vlatune.pipeline.read_lerobot  # and what its packages do when they are imported

ray_modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "ray"}
loggers = [logging.root, *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]


def parts(owner):
    "Functions and classes by identity, settings in capitals by value: what a patch would replace."
    found = {}
    for name, value in list(vars(owner).items()):
        if inspect.isroutine(value) or inspect.isclass(value):
            found[name] = id(value)
        elif name.isupper() and isinstance(value, (int, float, str, bool)):
            found[name] = value
    return found


def state():
    classes = {id(one): one for module in ray_modules.values() for one in list(vars(module).values()) if inspect.isclass(one)}
    return {
        "environment": dict(os.environ),
        "context": {name: repr(value) for name, value in vars(ray.data.DataContext.get_current()).items()},
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": [sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.stdout, sys.stderr],
        "logging": [(one.name, one.level, one.propagate, one.disabled, tuple(one.handlers), tuple(one.filters)) for one in loggers],
        "logging as a whole": (logging.root.manager.disable, logging.getLoggerClass(), logging.raiseExceptions),
        "warnings": list(map(str, warnings.filters)),
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
                  torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()],
        "chance": [hashlib.sha256(pickle.dumps(one)).hexdigest() for one in
                   (random.getstate(), numpy.random.get_state(), torch.get_rng_state().numpy().tobytes())],
        "process": [os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), socket.getdefaulttimeout(),
                    gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval(), list(sys.path),
                    resource.getrlimit(resource.RLIMIT_NOFILE), numpy.geterr()],
        "modules": {name: id(sys.modules.get(name)) for name in ray_modules},
        "parts of Ray": {name: parts(module) for name, module in ray_modules.items()},
        "parts of its classes": {number: parts(one) for number, one in classes.items()},
    }


def compare(before, what):
    for name, value in state().items():
        if isinstance(value, dict):
            odd = {key: (before[name].get(key), one) for key, one in value.items() if before[name].get(key) != one}
            odd |= {key: (one, None) for key, one in before[name].items() if key not in value}
            assert not odd, f"{what}: {name}: {odd}"
        assert value == before[name], f"{what}: {name}: {before[name]} -> {value}"


before = state()
read = vlatune.read_lerobot(sys.argv[1], resize=(32, 32), action_horizon=2)
compare(before, "by the call")
assert sum(len(batch["index"]) for batch in read.iter_batches()) > 0
compare(before, "by reading")
assert sum(len(batch["index"]) for batch in read.limit(3).iter_batches()) == 3
compare(before, "by a reading that was broken off")
print("as it was")
"""


def test_a_users_process_is_as_it_was_after_read_lerobot(dataset_v3, ray_local):
    """All of it, in a process that nothing else has touched; the cluster is the session's."""
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", WATCHED, str(dataset_v3)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["as it was"], done.stderr[-2000:]


# Ray Train


def test_ray_train_knows_its_settings():
    from ray.train.v2._internal import constants

    assert set(TRAIN_SETTINGS) <= {value for value in vars(constants).values() if isinstance(value, str)}


def test_ray_train_has_what_is_replaced():
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    assert has_parts(LEAN_PARTS, "")
    told = inspect.signature(WorkerGroup._init_train_context_on_workers).parameters
    assert list(told) == ["self", "workers", "sync_actor", "train_context_args"]
    assert inspect.iscoroutinefunction(TrainController.run)
    assert "self.worker_group_cls.create(" in inspect.getsource(TrainController)
    handed = {"train_run_context", "distributed_context", "synchronization_actor", "storage_context"}
    handed |= {"worker_callbacks", "controller_actor"}
    assert handed <= set(inspect.signature(RayTrainWorker.init_train_context).parameters)
    own = inspect.getsource(WorkerGroup._init_train_context_on_workers)
    assert all(f"{name}=" in own for name in handed), "Ray Train tells its workers less or more than before"
    fit = inspect.getsource(DataParallelTrainer.fit)
    assert "self._create_default_callbacks()" in fit
    assert "self._initialize_and_run_controller(" in fit
    assert f"ray::{RayTrainWorker.__name__}" == TRAIN_WORKER_TITLE


@pytest.mark.parametrize(("own_cluster", "left_out"), [(True, 2), (False, 1)])
def test_a_lean_trainer_has_fewer_callbacks(own_cluster, left_out):
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    usual = DataParallelTrainer(print)
    lean = lean_trainer(own_cluster=own_cluster)(print)
    assert isinstance(lean, DataParallelTrainer)
    assert len(lean._create_default_callbacks()) == len(usual._create_default_callbacks()) - left_out


def test_without_its_parts_ray_trains_own_trainer_is_taken(monkeypatch, capsys, asked_anew):
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    monkeypatch.delattr(TrainController, "worker_group_cls")
    assert lean_trainer(own_cluster=True) is DataParallelTrainer
    assert "TrainController.worker_group_cls: a run starts some seconds later" in capsys.readouterr().err
