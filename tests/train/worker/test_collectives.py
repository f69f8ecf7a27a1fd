"""A worker alone does what it asked for a step later; two are in test_two_workers.py."""

from vlatune.pipeline.plan import Share
from vlatune.train.heartbeat import Request
from vlatune.train.worker.collectives import Consensus


def test_one_worker_carries_its_request_out_a_step_later():
    consensus = Consensus(Share(0, 1))
    assert consensus.take() is Request.NOTHING
    consensus.give(Request.SAVE)
    assert consensus.take() is Request.SAVE
    consensus.give(Request.NOTHING)
    assert consensus.take() is Request.NOTHING
    assert consensus.gather("mine") == ["mine"]
