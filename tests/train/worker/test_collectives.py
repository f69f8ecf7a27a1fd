"""A worker alone does what it asked for a step later; two are in test_two_workers.py. What workers tell each other is values."""

import json
import pickle

import numpy as np
import pytest

from vlatune.pipeline.plan import Share
from vlatune.train.heartbeat import Request
from vlatune.train.worker.collectives import Consensus, packed, unpacked


def test_one_worker_carries_its_request_out_a_step_later():
    consensus = Consensus(Share(0, 1))
    assert consensus.take() is Request.NOTHING
    consensus.give(Request.SAVE)
    assert consensus.take() is Request.SAVE
    consensus.give(Request.NOTHING)
    assert consensus.take() is Request.NOTHING
    assert consensus.gather("mine") == ["mine"]


def test_values_and_arrays_arrive_to_the_last_bit():
    arrays = {"a": np.float64([0.1, -0.0, np.nan, np.inf]), "b": np.arange(6, dtype=np.uint32).reshape(2, 3)}
    arrays |= {"c": np.array([[True], [False]]), "d": np.zeros((0, 4), np.float32), "e": np.array(7, np.int64)}
    found = unpacked(packed({3: (0.1, None, "text", True, 2**70), "arrays": arrays, "one": np.float32(0.1)}))
    assert found[3] == [0.1, None, "text", True, 2**70]
    assert found["one"] == float(np.float32(0.1))
    for name, array in arrays.items():
        assert (found["arrays"][name].dtype, found["arrays"][name].shape) == (array.dtype, array.shape)
        assert found["arrays"][name].tobytes() == array.tobytes()


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([None]), b"bytes"])
def test_what_is_no_value_is_not_sent(value):
    with pytest.raises(TypeError, match="only plain values and arrays of numbers go to other workers"):
        packed([value])


def test_what_somebody_else_sends_is_no_object():
    with pytest.raises(ValueError, match="expected numbers"):
        unpacked(json.dumps({"numbers": ["O", [1], ""]}).encode())
    with pytest.raises(ValueError, match=r"utf-8|Expecting value"):
        unpacked(pickle.dumps(print))
