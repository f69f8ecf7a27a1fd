"""Workers do the same after the same step, whoever asked for it."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_two_workers_do_what_one_of_them_asked_for(tmp_path):
    program = Path(__file__).with_name("two_agree.py")
    processes = [subprocess.Popen([sys.executable, program, str(rank), tmp_path]) for rank in range(2)]
    assert [process.wait(timeout=400) for process in processes] == [0, 0]
    for rank in range(2):
        written = json.loads((tmp_path / f"{rank}.json").read_text())
        assert written["told"] == [0, 0, 0, Request.SAVE, 0, 0, Request.STOP]
        assert written["everyone"] == [{"rank": 0}, {"rank": 1}]
