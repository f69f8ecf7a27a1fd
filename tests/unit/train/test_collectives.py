"""Communication of a single worker, and the values that workers exchange; two workers are in e2e/test_two_ranks.py."""

import json
import pickle

import numpy as np
import pytest
import torch

from vlatune.feed.plan import Share
from vlatune.train.heartbeat import Request
from vlatune.train.worker.collectives import Consensus, mean_and_each, packed, unpacked


def test_request_of_one_worker_applies_a_step_later():
    consensus = Consensus(Share(0, 1))
    assert consensus.take() is Request.NOTHING
    consensus.give(Request.SAVE)
    assert consensus.take() is Request.SAVE
    consensus.give(Request.NOTHING)
    assert consensus.take() is Request.NOTHING
    assert consensus.gather("mine") == ["mine"]


def test_metrics_of_one_worker_need_no_exchange():
    assert mean_and_each(torch.tensor([2.0]), [0.5], Share(0, 1), pytest.fail) == ([2.0], [[0.5]])


def test_values_and_arrays_are_exchanged_without_loss():
    arrays = {"a": np.float64([0.1, -0.0, np.nan, np.inf]), "b": np.arange(6, dtype=np.uint32).reshape(2, 3)}
    arrays |= {"c": np.array([[True], [False]]), "d": np.zeros((0, 4), np.float32), "e": np.array(7, np.int64)}
    found = unpacked(packed({3: (0.1, None, "text", True, 2**70), "arrays": arrays, "one": np.float32(0.1)}))
    assert found[3] == [0.1, None, "text", True, 2**70]
    assert found["one"] == float(np.float32(0.1))
    for name, array in arrays.items():
        assert (found["arrays"][name].dtype, found["arrays"][name].shape) == (array.dtype, array.shape)
        assert found["arrays"][name].tobytes() == array.tobytes()


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([None]), b"bytes"])
def test_other_objects_are_not_sent(value):
    with pytest.raises(TypeError, match="plain values"):
        packed([value])


def test_received_data_creates_no_objects():
    with pytest.raises(ValueError, match="expected numbers"):
        unpacked(json.dumps({"numbers": ["O", [1], ""]}).encode())
    with pytest.raises(ValueError, match=r"utf-8|Expecting value"):
        unpacked(pickle.dumps(print))
