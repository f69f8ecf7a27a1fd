"""The error of a worker that the driver reports."""

import pytest
from ray.train import ControllerError

from vlatune.config.settings import PolicyConfig, RunConfig
from vlatune.errors import RunStoppedError, TerminatedError
from vlatune.train.failures import full_device_is_final, root_cause


class WorkerGroupError(Exception):
    """Stands for Ray Train's error, with the workers' errors by rank."""

    def __init__(self, message: str, worker_failures: dict[int, Exception]) -> None:
        super().__init__(message)
        self.worker_failures = worker_failures


def wrapped(inner: Exception) -> Exception:
    """Return the error inside a task's error inside a worker group's."""
    task = Exception("RayTaskError(...)")
    task.cause = inner  # pyright: ignore[reportAttributeAccessIssue]
    return WorkerGroupError("2 workers failed", {1: task})


@pytest.mark.parametrize(
    "inner",
    [ValueError("episode 3 is damaged"), RuntimeError("no disk"), RunStoppedError("spilled"), TerminatedError("asked")],
)
def test_vlatunes_error_is_found_inside_rays_errors(inner):
    assert root_cause(wrapped(inner)) is inner


def test_final_error_of_the_controller_is_found():
    """Raised while the workers join."""
    inner = RunStoppedError("driver too old")
    assert root_cause(ControllerError(inner)) is inner


def test_an_error_without_a_message_is_still_named():
    assert str(root_cause(KeyError())) == "KeyError: no message"


def test_a_lost_connection_has_a_short_message():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:21406: Connection reset by peer"
    reason = root_cause(wrapped(RuntimeError(gloo)))
    assert str(reason) == "a worker lost another one while they exchanged gradients (connection reset by peer)"


def test_a_dead_process_is_reported_rather_than_the_lost_connection():
    class ActorDiedError(Exception):
        """Stands for Ray's error."""

    lost = RuntimeError("Connection closed by peer")
    reason = root_cause(WorkerGroupError("2 workers failed", {0: lost, 1: ActorDiedError("paragraphs")}))
    assert str(reason) == "the process of rank 1 died"


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65 GiB",
        "CUDA error: out of memory",
        "NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_device_is_final_also_if_the_clean_up_fails(message):
    config = RunConfig(policy=PolicyConfig(train="expert"), batch_size=6, grad_accum=2)

    def run() -> None:
        try:
            raise RuntimeError(message)
        finally:
            raise OSError("a file could not be closed")

    with pytest.raises(RunStoppedError) as raised, full_device_is_final(config):
        run()
    assert root_cause(wrapped(raised.value)) is raised.value
    assert message.split(". ")[0] in str(raised.value)
    assert {"--batch_size=3", "--grad_accum=4"} <= set(str(raised.value).replace(",", " ").split())


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (RunConfig(policy=PolicyConfig(train="full"), batch_size=1), "--policy.gradient_checkpointing=true"),
        (
            RunConfig(policy=PolicyConfig(train="full", gradient_checkpointing=True), batch_size=1),
            "--policy.train=lora",
        ),
    ],
)
def test_a_batch_of_one_leads_to_another_way_to_save_memory(config, flag):
    with pytest.raises(RunStoppedError) as raised, full_device_is_final(config):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert flag in str(raised.value)


def test_a_full_host_is_no_full_device():
    with pytest.raises(RuntimeError) as raised, full_device_is_final(RunConfig()):
        raise RuntimeError("Task was killed due to the node running low on memory.")
    assert type(raised.value) is RuntimeError
