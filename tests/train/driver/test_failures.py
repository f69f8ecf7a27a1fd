"""What the driver makes of a worker's failure."""

import pytest

from vlatune.errors import RunStoppedError, TerminatedError
from vlatune.train.failures import root_cause


class WorkerGroupError(Exception):
    """As Ray Train has it: the workers' errors by rank."""

    def __init__(self, message: str, worker_failures: dict[int, Exception]) -> None:
        super().__init__(message)
        self.worker_failures = worker_failures


def wrapped(inner: Exception) -> Exception:
    """An error inside a task's error inside a worker group's."""
    task = Exception("RayTaskError(...)")
    task.cause = inner  # pyright: ignore[reportAttributeAccessIssue]
    return WorkerGroupError("2 workers failed", {1: task})


@pytest.mark.parametrize(
    "inner",
    [ValueError("episode 3 is damaged"), RuntimeError("no disk"), RunStoppedError("spilled"), TerminatedError("asked")],
)
def test_our_own_words_come_out_of_rays_layers(inner):
    assert root_cause(wrapped(inner)) is inner


def test_a_dead_process_is_told_in_one_sentence():
    died = WorkerGroupError("The actor died. Some common causes include: (1) the OOM killer\nmore. And more. " * 3, {})
    reason = root_cause(died)
    assert isinstance(reason, RuntimeError)
    assert str(reason).startswith("WorkerGroupError: more")
    assert len(str(reason)) < 240


def test_an_error_without_a_message_is_still_named():
    assert str(root_cause(KeyError())) == "KeyError: no message"


def test_a_lost_connection_is_told_in_our_words_until_the_dead_process_is_known():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:21406: Connection reset by peer"
    reason = root_cause(wrapped(RuntimeError(gloo)))
    assert str(reason) == "a worker lost another one while they exchanged gradients (connection reset by peer)"


def test_of_a_lost_connection_and_a_dead_process_the_process_is_named():
    class ActorDiedError(Exception):
        """As Ray has it."""

    lost = RuntimeError("Connection closed by peer")
    reason = root_cause(WorkerGroupError("2 workers failed", {0: lost, 1: ActorDiedError("paragraphs")}))
    assert str(reason) == "the process of rank 1 died"
