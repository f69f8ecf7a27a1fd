"""Two processes with half of the data each learn what one learns with all of it, stop together, and do the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from regression import join, make_batches, make_model, make_updater
from safetensors.torch import load_file
from two_workers import MICRO_STEPS, ROWS, UPDATES, WORKERS

from vlatune.train.heartbeat import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    program = Path(__file__).with_name("two_workers.py")
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, program, folder], env=env, stderr=subprocess.PIPE, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_two_workers_learn_what_one_learns_with_the_joined_batches(folder):
    model = make_model()
    updater = make_updater(model)
    batches = make_batches(UPDATES * MICRO_STEPS * WORKERS, ROWS)
    per_update = MICRO_STEPS * WORKERS
    for number in range(UPDATES):
        updater.update([join(batches[number * per_update : (number + 1) * per_update])], 1)
    for rank in range(WORKERS):
        for name, value in load_file(folder / str(rank) / "weights.safetensors").items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_one_workers_nan_leaves_all_workers_weights_untouched(folder):
    for rank in range(WORKERS):
        before = load_file(folder / str(rank) / "weights.safetensors")
        after = load_file(folder / str(rank) / "stopped.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_all_workers_stop_with_the_same_message(folder):
    first, second = ((folder / str(rank) / "message.txt").read_text() for rank in range(WORKERS))
    assert first == second
    assert f"optimizer step {UPDATES + 1}: the loss is nan (rank 1, micro-step 0)" in first
    assert "samples (dataset_index, index): (1, 0);" in first


def test_two_workers_do_what_one_of_them_asked_for(folder):
    for rank in range(WORKERS):
        written = json.loads((folder / str(rank) / "agreed.json").read_text())
        assert written["told"] == [0, 0, 0, Request.SAVE, 0, 0, Request.STOP]
        assert written["everyone"] == [{"rank": 0}, {"rank": 1}]
