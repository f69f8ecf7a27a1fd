"""The check of what a run stores instead of computing it again."""

from collections.abc import Iterator
from functools import partial

from vlatune.batch import num_rows
from vlatune.checks.case import Case
from vlatune.checks.machine_checks import plan_sizing
from vlatune.findings import Finding
from vlatune.formatting import format_seconds
from vlatune.train.cache_choice import USED, StepCost, plan_stores
from vlatune.train.prefix_choice import prefix_levels


def check_cache(case: Case) -> Iterator[Finding]:
    """Show the table of all levels; the text states what the frame cache is worth."""
    assert case.setup is not None
    step, on_gpu = StepCost(), any(node.gpus for node in plan_sizing(case).nodes)
    if case.step_s is not None and case.batch is not None:
        step = StepCost(case.step_s / num_rows(case.batch.rows), is_on_readers_cores=not on_gpu)
    decision = f"--policy.keep_prefix={case.config.policy.keep_prefix}"
    others = partial(prefix_levels, case.config, case.setup, on_gpu=on_gpu, decision=decision)
    plan = plan_stores(case.config, case.setup, others, step)
    text, frames = plan.frames.decision, plan.frames
    without_s, with_s = (plan.epoch_s(frames, is_stored=stored) for stored in (False, True))
    if frames.decision == USED and without_s is not None and with_s is not None:
        times = f"an epoch takes {format_seconds(without_s)} without them, {format_seconds(with_s)} with them"
        text = f"decoded frames are kept in '{plan.settings and plan.settings.folder}': {times}"
    yield Finding("pass", "cache", text, figures=plan.to_json() | {"table": plan.lines()})
