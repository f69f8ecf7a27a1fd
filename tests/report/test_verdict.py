import pytest
from summaries import WHOLE, summary

from vlatune.report.verdict import eval_meaning, judge, missing_readers, readers_busy, verdict

CONFIG = {"num_workers": 1, "ray": {"object_store_bytes": 512_000_000}}
CPU = WHOLE.cpu or {}


def kept(by: str, own_s: float, others_s: float, **cpu: object) -> dict:
    """What a summary says of 100 s in which the step was kept for some."""
    spent_s = {"kept_own_s": own_s, "kept_others_s": others_s}
    time_s = {"start": 0.0, "wait": 0.0, "compute": 100 - own_s - others_s, "total": 100.0, "decode": 140.0}
    return {"kept_by": by, "cpu": CPU | spent_s | cpu, "time_s": time_s, "num_readers": 2}


def test_a_run_that_never_waits_is_compute_bound():
    line = "compute-bound: data wait 1.2 % of the time, kept from computing 1.0 %; 0 bytes spilled"
    assert verdict(WHOLE, CONFIG) == line
    assert judge(WHOLE, CONFIG).tone == "good"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (
            kept("own process", 72.0, 2.0, other_threads_s=97.0),
            "slowed by its own process: other threads of the training process took 97 % of a core; "
            "the step runs at about 26 % of the speed it has alone; `py-spy dump`",
        ),
        (
            kept("readers", 2.0, 38.0),
            "sharing cores: readers and trainer want 3.4 cores, there are 2; "
            "the step runs at about 60 % of the speed it has alone; more cores, or readers on another machine",
        ),
        (
            kept("readers", 0.0, 38.0) | {"performance_flags": {"device": "cuda", "threads": 2}},
            "sharing cores: readers and trainer want 2.4 cores, there are 2; "
            "the step is launched at about 62 % of the speed it has alone, which the device's queue may hide",
        ),
        (kept("other load", 0.0, 20.0), "slowed by other load: processes beside this run's readers took its cores; "),
        (
            kept("other load", 0.0, 20.0, idle_share=0.6),
            "slowed by a limit: threads queued for cores while 60 % of them",
        ),
        (kept("readers", 2.0, 2.9), "compute-bound: "),
    ],
)
def test_a_step_that_is_slower_than_alone_is_told_by_whom(measured, said):
    found = judge(summary(**measured), CONFIG)
    assert found.line.startswith(said)
    assert found.tone == ("good" if said == "compute-bound: " else "warn")


@pytest.mark.parametrize(
    ("wait_share", "first", "second"),
    [(0.1, "sharing cores: ", "; besides, decode-bound: "), (0.6, "decode-bound: ", "; besides, sharing cores: ")],
)
def test_the_larger_share_comes_first_and_the_other_is_not_kept_back(wait_share, first, second):
    line = verdict(summary(**kept("readers", 0.0, 38.0), wait_share=wait_share, samples_per_s=12.0), CONFIG)
    assert line.startswith(first)
    assert second in line


@pytest.mark.parametrize("cpu", [None, {}, CPU | {"kept_own_s": None, "kept_others_s": None}])
def test_compute_bound_is_not_said_where_nobody_knows_whether_the_step_was_kept(cpu):
    line = verdict(summary(cpu=cpu), CONFIG)
    assert line.startswith("not held up by data: data wait 1.2 % of the time")
    assert "is not known" in line


def test_busy_other_threads_are_told_even_where_nobody_knows_whom_they_kept():
    cpu = CPU | {"kept_own_s": None, "kept_others_s": None, "other_threads_s": 90.0}
    found = judge(summary(cpu=cpu), CONFIG)
    assert found.line.startswith("other threads of the training process took 90 % of a core, and may have kept it")
    assert found.tone == "warn"


def test_spilling_comes_first_whatever_else_is_wrong():
    found = judge(summary(spilled_bytes=12_345_678, wait_share=0.9), CONFIG)
    assert found.tone == "bad"
    assert found.line.startswith("SPILLED 12.3 MB: ")
    assert "use --ray.object_store_bytes=1024000000" in found.line


def test_a_fallback_to_disk_is_not_called_spilling():
    found = judge(summary(fallback_bytes=2_000_000), CONFIG)
    assert found.tone == "bad"
    assert found.line.startswith("2 MB went to disk")


@pytest.mark.parametrize(
    ("wait_share", "num_readers", "asked"),
    [
        # r samples/s with n readers while waiting half the time: 2r are needed, so n more.
        (0.5, 4, "about 4 more CPU readers"),
        (0.41, 4, "about 3 more CPU readers"),
        (0.1, 2, "about 1 more CPU reader would"),
        (0.5, None, "about 2.0 times as many CPU readers"),
        (1.0, None, "about 100.0 times as many CPU readers"),
    ],
)
def test_a_starved_trainer_is_told_how_many_readers_it_lacks(wait_share, num_readers, asked):
    found = judge(summary(wait_share=wait_share, num_readers=num_readers), CONFIG)
    assert found.tone == "warn"
    assert found.line.startswith("data-bound: the trainer waited")
    assert asked in found.line


STAGES = {"start": 10.0, "compute": 59.0, "wait": 41.0, "checkpoint": 0.0, "total": 110.0}


@pytest.mark.parametrize(
    ("decode_s_per_sample", "samples_per_s", "num_readers", "busy"),
    [(0.5, 6, 4, 0.75), (2.0, 2, 4, 1.0), (0.1, 1, 2, 0.05)],
)
def test_the_share_in_which_readers_decode(decode_s_per_sample, samples_per_s, num_readers, busy):
    assert readers_busy(decode_s_per_sample, samples_per_s, num_readers) == busy


@pytest.mark.parametrize(
    ("wait_share", "num_readers", "missing"), [(0.5, 4, 4), (0.41, 4, 3), (1 / 3, 2, 1), (0.06, 1, 1), (0.999, 1, 99)]
)
def test_so_many_readers_are_missing(wait_share, num_readers, missing):
    assert missing_readers(wait_share, num_readers) == missing


@pytest.mark.parametrize(
    ("num_workers", "stages_s", "line"),
    [
        # 4 readers could decode for 400 s in the loop's 100 s, and did for 380.
        (
            1,
            {"decode": 380.0, "transport": 60.0},
            "decode-bound: 3 more CPU readers would keep this worker fed; the trainer waited 41 % of the time, "
            "4 readers decoded 95 % of it",
        ),
        (2, {"decode": 280.0}, "decode-bound: 3 more CPU readers would keep the workers fed; "),
        (
            1,
            {"decode": 80.0, "collate": 90.0, "copy": 20.0},
            "collate-bound: the trainer waited 41 % of the time, collate",
        ),
        (1, {"decode": 80.0, "copy": 60.0}, "copy-bound: "),
        (2, {"decode": 80.0, "collate": 90.0}, "data-bound: "),  # of two workers' 200 s
        (
            1,
            {"decode": 80.0},
            "data-bound: the trainer waited 41 % of the time; readers decoded only 20 % of it, so more",
        ),
    ],
)
def test_a_starved_trainer_is_told_which_stage_held_it_up(num_workers, stages_s, line):
    measured = {"wait_share": 0.41, "num_readers": 4, "samples_per_s": 12.0, "time_s": STAGES | stages_s}
    assert verdict(summary(**measured), CONFIG | {"num_workers": num_workers}).startswith(line)


def test_slow_checkpoints_are_named():
    slow = {"start": 10.0, "wait": 0.0, "compute": 50.0, "checkpoint": 50.0, "total": 110.0}
    assert verdict(summary(time_s=slow), CONFIG).startswith("checkpoint-bound: saving took 50 % of the time (50.0 s)")


def test_short_runs_and_restarts_are_said():
    line = verdict(summary(optimizer_steps=8, restarts=2), CONFIG)
    assert line.endswith("; restarted 2 times (a rough figure: only 8 steps)")


def test_a_run_without_a_step_is_not_judged():
    assert judge(summary(optimizer_steps=0), {}).tone == "bad"


def evaluation(error=0.1, mean=0.3, images=0.25, sentence=0.101):
    return {
        "action_error": error,
        "mean_action_error": mean,
        "blank_images_error": images,
        "blank_sentence_error": sentence,
    }


def test_what_the_four_errors_mean():
    text = eval_meaning(evaluation())
    assert "67 % below that of always predicting the mean action" in text
    assert "Without the pictures it is 2.5 times as large, so the model uses the pictures." in text
    assert "Without the sentence it hardly changes" in text


def test_a_model_no_better_than_the_mean_gets_no_praise():
    text = eval_meaning(evaluation(error=0.3, mean=0.3, images=0.9))
    assert "no better than always predicting the mean" in text
    assert "uses" not in text


def test_an_input_that_hurts_and_one_that_was_not_tried():
    text = eval_meaning(evaluation(images=0.05) | {"blank_sentence_error": None})
    assert "Without the pictures it even shrinks" in text
    assert "sentence" not in text
