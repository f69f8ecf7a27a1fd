"""Workers do the same after the same step, whoever wished for it."""

import json
import subprocess
import sys
from pathlib import Path

from vlatune.pipeline.plan import Share
from vlatune.train.heartbeat import Wish
from vlatune.train.worker.collectives import Agreement


def test_one_worker_carries_its_wish_out_a_step_later():
    agreement = Agreement(Share(0, 1))
    assert agreement.take() is Wish.NOTHING
    agreement.give(Wish.SAVE)
    assert agreement.take() is Wish.SAVE
    agreement.give(Wish.NOTHING)
    assert agreement.take() is Wish.NOTHING
    assert agreement.gather("mine") == ["mine"]


def test_two_workers_do_what_one_of_them_wished_for(tmp_path):
    program = Path(__file__).with_name("two_agree.py")
    processes = [subprocess.Popen([sys.executable, program, str(rank), tmp_path]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for rank in range(2):
        written = json.loads((tmp_path / f"{rank}.json").read_text())
        assert written["told"] == [0, 0, 0, Wish.SAVE, 0, 0, Wish.STOP]
        assert written["everyone"] == [{"rank": 0}, {"rank": 1}]
