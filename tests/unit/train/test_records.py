"""Records reach the run folder in order, each once, although messages and the monitor's memory are lost."""

import random
from pathlib import Path

import pytest

from vlatune.errors import RunStoppedError
from vlatune.run.run_folder import EVENTS_FILE, METRICS_FILE, VALIDATIONS_FILE
from vlatune.run.sinks import read_jsonl
from vlatune.train.records import MAX_PARCEL, Mailbox, Record, RunWriter


def line(step: int) -> Record:
    return METRICS_FILE, {"optimizer_step": step, "loss": 0.5}


def steps_in(folder: Path, name: str = METRICS_FILE) -> list[int]:
    return [one["optimizer_step"] for one in read_jsonl(folder / name)]


@pytest.mark.parametrize("seed", range(20))
def test_every_record_is_written_once_and_in_order(tmp_path, seed):
    """Requests and replies are lost, repeated and late, and the monitor loses its memory."""
    chance, outbox, writer = random.Random(seed), Mailbox(), RunWriter(tmp_path, 0, log_samples=False)
    mail, wanted, late = Mailbox(), 0, []
    put = 0
    while put < 300 or outbox.end > writer.received:
        for _ in range(chance.randrange(20) if put < 300 else 0):
            put += 1
            outbox.append(line(put))
        event = chance.randrange(8)
        if event == 0:
            mail, wanted = Mailbox(writer.received), chance.choice([0, wanted])  # restarted, then polled
        elif event <= 3:
            parcel = outbox.parcel(wanted)
            assert len(parcel[1]) <= MAX_PARCEL
            mail.put(parcel)
            if event > 1:  # else the reply is lost
                wanted = mail.end
                outbox.acknowledge(mail.begin)
        elif event <= 6:
            parcel = mail.parcel(writer.received)
            late.append(parcel)
            if event > 4:  # else the reply is lost
                writer.write(parcel)
                mail.acknowledge(writer.received)
        elif late:
            writer.write(chance.choice(late))
    writer.close()
    assert steps_in(tmp_path) == list(range(1, put + 1))


def test_records_stay_on_rank_0_until_they_are_written():
    outbox, mail = Mailbox(), Mailbox()
    for step in range(3):
        outbox.append(line(step))
    mail.put(outbox.parcel(0))
    assert not outbox.wait(outbox.end, 0)
    assert outbox.parcel(0) == (0, (line(0), line(1), line(2)))
    assert outbox.parcel(mail.end) == (3, ())
    outbox.acknowledge(2)
    assert outbox.wait(2, 0)
    assert outbox.parcel(0) == (2, (line(2),))


def test_attempt_drops_what_it_trains_again_but_no_events(tmp_path):
    writer = RunWriter(tmp_path, 0, log_samples=False)
    records = [line(step) for step in (1, 2, 3)]
    records += [(VALIDATIONS_FILE, {"optimizer_step": s, "val_loss": 0.1, "val_action_error": s / 8}) for s in (2, 3)]
    writer.write((0, [*records, (EVENTS_FILE, {"event": "start", "optimizer_step": 0, "time_s": 1.0})]))
    writer.write((6, [(METRICS_FILE, {"optimizer_step": 4, "loss": 0.25})]))
    writer.close()
    again = RunWriter(tmp_path, 2, log_samples=True)
    assert again.recorded.last_loss == 0.5
    assert again.recorded.validation_errors == {2: 0.25}
    again.write((0, [line(3)]))  # numbered from 0 again
    again.close()
    assert steps_in(tmp_path) == [1, 2, 3]
    assert steps_in(tmp_path, EVENTS_FILE) == [0]


def test_folder_that_cannot_be_written_ends_the_run(tmp_path):
    writer = RunWriter(tmp_path, 0, log_samples=False)
    (tmp_path / "logs").touch()  # a file instead of a folder
    with pytest.raises(RunStoppedError, match="cannot be written"):
        writer.write((0, [("logs/worker.log", {"threads": 1})]))
