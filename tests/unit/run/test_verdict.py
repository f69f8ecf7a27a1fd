import pytest
from summaries import SUMMARY, summary

from vlatune.run.verdict import eval_meaning, judge

CONFIG = {"num_workers": 1, "ray": {"object_store_bytes": 512_000_000}}


def verdict(measured, config) -> str:
    return judge(measured, config).line


def test_a_run_that_never_waits_is_compute_bound():
    found = judge(SUMMARY, CONFIG)
    assert found.line.startswith("compute-bound: data wait 1.2 % of the time; other processes")
    assert found.tone == "good"
    assert judge(summary(other_process_share=None), CONFIG).line.startswith(
        "compute-bound: data wait 1.2 % of the time; 0 bytes"
    )


def test_spilling_comes_first_whatever_else_is_wrong():
    found = judge(summary(spilled_bytes=12_345_678, wait_share=0.9), CONFIG)
    assert found.tone == "bad"
    assert found.line.startswith("SPILLED 12.3 MB: ")
    assert "use --ray.object_store_bytes=1024000000" in found.line


def test_a_fallback_to_disk_is_not_called_spilling():
    found = judge(summary(fallback_bytes=2_000_000), CONFIG)
    assert found.tone == "bad"
    assert found.line.startswith("2 MB went to disk")


STAGES = {"start": 10.0, "compute": 59.0, "wait": 41.0, "checkpoint": 0.0, "total": 110.0}


@pytest.mark.parametrize(
    ("num_workers", "changes", "line"),
    [
        # r samples/s while waiting half the time: 2r are needed.
        (1, {"wait_share": 0.5, "time_s": {}}, "data-bound: the trainer waited 50 % of the time; use 2.0 times"),
        # 4 readers could decode for 400 s in the loop's 100 s, and did for 380.
        (1, {"decode": 380.0, "transport": 60.0}, "decode-bound: 3 more CPU readers"),
        (2, {"decode": 280.0}, "decode-bound: 3 more CPU readers"),
        (1, {"decode": 380.0, "wait_share": 0.5}, "decode-bound: 4 more CPU readers"),
        (1, {"decode": 380.0, "wait_share": 0.06}, "decode-bound: 1 more CPU reader would"),
        (1, {"decode": 380.0, "wait_share": 1.0}, "decode-bound: 396 more CPU readers"),
        (1, {"decode": 80.0}, "data-bound: "),
    ],
)
def test_decoding_is_named_if_the_trainer_waited_for_it(num_workers, changes, line):
    measured = {"wait_share": 0.41, "num_readers": 4, "time_s": STAGES}
    for name, value in changes.items():
        if name in measured:
            measured[name] = value
        else:
            measured["time_s"] = measured["time_s"] | {name: value}
    found = judge(summary(**measured), CONFIG | {"num_workers": num_workers})
    assert found.line.startswith(line)
    assert found.tone == "warn"


def test_slow_checkpoints_are_named():
    slow = {"start": 10.0, "wait": 0.0, "compute": 50.0, "checkpoint": 50.0, "total": 110.0}
    assert verdict(summary(time_s=slow), CONFIG).startswith("checkpoint-bound: saving took 50 % of the time (50.0 s)")


def test_short_runs_and_restarts_are_named():
    line = verdict(summary(optimizer_steps=8, restarts=2), CONFIG)
    assert line.endswith("; restarted 2 times (a rough figure: only 8 steps)")


def test_a_run_without_a_step_is_not_judged():
    assert judge(summary(optimizer_steps=0), {}).tone == "bad"


def evaluation(error=0.1, mean=0.3, images=0.25, instruction=0.101):
    return {
        "action_error": error,
        "mean_action_error": mean,
        "blank_images_error": images,
        "blank_instruction_error": instruction,
    }


def test_what_the_four_errors_mean():
    text = eval_meaning(evaluation())
    assert "67 % below the error of always predicting the mean action" in text
    assert "Without the images it is 2.5 times as large, so the model uses the images." in text
    assert "uses the instruction" not in text


def test_a_model_no_better_than_the_mean_gets_no_praise():
    text = eval_meaning(evaluation(error=0.3, mean=0.3, images=0.9))
    assert "no better than always predicting the mean" in text
    assert "uses" not in text


def test_an_input_that_hurts_and_one_that_was_not_tried():
    text = eval_meaning(evaluation(images=0.05) | {"blank_instruction_error": None})
    assert "uses the images" not in text
    assert "instruction" not in text


@pytest.mark.parametrize(("error", "is_named"), [(0.105, True), (0.2, False)])
def test_a_camera_that_is_not_needed_is_named(error, is_named):
    cameras = {"blank_camera_errors": {"observation.images.side": error}}
    assert ("side" in eval_meaning(evaluation() | cameras)) is is_named
