"""The first batch of a run on its way to the policy: rows, prompts, pictures.

Nothing here knows a policy: what there is to know is asked of its card and its adapter. No torch.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vlatune.batch import TASK, TOKEN_MASK, Columns, num_rows
from vlatune.dataset.video.resize import letterbox_box
from vlatune.doctor.findings import (
    Case,
    Finding,
    FirstBatch,
    Prompt,
    divide_stats_command,
    edit_json_command,
    editable_base,
)
from vlatune.pipeline.plan import Share
from vlatune.pipeline.transforms import Transform, apply_all
from vlatune.policies.base_folder import read_object
from vlatune.policies.processors import CONFIG, PREPROCESSOR
from vlatune.policies.tokenizer import Tokenise, load_tokenizer
from vlatune.report.formatting import format_seconds, format_share, plural
from vlatune.run_setup import Setup
from vlatune.train.data_preview import read_first_rows

MAX_ROWS = 32
"""Of the first batch that are read; the page shows fewer."""


MAX_TASKS = 2000


NO_LIMIT = 10**6
"""Tokens that a prompt is counted up to."""


TOKEN_MULTIPLE = 8


ONE_COLOUR, WHITE, NEARLY_ALL = 8, 250, 0.6


MAX_SCALE, MIN_SPREAD = 20.0, 0.05
"""Pictures of a policy are within a few units of zero, and apart from each other; 0..255 and its statistics are not."""


def check_batch(case: Case) -> Iterator[Finding]:
    """Reads the first batch, as a worker would get it."""
    begin = time.perf_counter()
    case.batch = read_first_batch(case.setup.from_pictures(), case.config.num_workers)
    took = time.perf_counter() - begin
    rows, episodes = num_rows(case.batch.rows), len(np.unique(case.batch.rows["episode_index"]))
    yield Finding(
        "pass",
        f"{plural(rows, 'row')} of {plural(episodes, 'episode')} read and prepared in {format_seconds(took)}",
        figures={"rows": rows, "seconds": took},
    )


def read_first_batch(setup: Setup, num_workers: int, most: int = MAX_ROWS) -> FirstBatch:
    """The first rows of rank 0's first micro-batch, in their order."""
    plan, rows = setup.data_plan, min(setup.batch_size, most)
    columns = read_first_rows(setup, plan.specs, Share(0, num_workers), rows)
    prompts = tuple(make_prompts(setup.training_transforms(), columns))
    return FirstBatch(columns, apply_all(plan.transforms, columns), prompts)


def make_prompts(transforms: Sequence[Transform], columns: Columns) -> Iterator[Prompt]:
    """What the policy is told in each row, and how many tokens that is before any are cut off."""
    at = next((number for number, one in enumerate(transforms) if isinstance(one, Tokenise)), None)
    if at is not None:
        step: Any = transforms[at]
        texts = [str(text) for text in apply_all(transforms[:at], columns)[TASK]]
        tokenizer = load_tokenizer(step.tokenizer_file, NO_LIMIT)
        yield from (
            Prompt(text, len(found.ids)) for text, found in zip(texts, tokenizer.encode_batch(texts), strict=True)
        )
        return
    seen = apply_all(transforms, columns)
    if TOKEN_MASK in seen:  # made in some other way: as far as its mask tells
        counts = seen[TOKEN_MASK].sum(axis=-1).tolist()
        yield from (Prompt(str(text), int(count)) for text, count in zip(columns[TASK], counts, strict=True))


def check_prompts(case: Case) -> Iterator[Finding]:
    """Sentences that are empty, and prompts that are longer than the policy reads."""
    tasks = list(dict.fromkeys(task for meta in case.metas for task in meta.tasks))
    empty = sum(not task.strip() for task in tasks)
    if not case.policy.has_prompt:
        yield Finding("pass", f"the policy reads no sentence; the dataset has {len(tasks)}")
        return
    if empty:
        yield Finding(
            "warn",
            f"{empty} of {plural(len(tasks), 'sentence')} empty: the policy is told nothing there",
            "write them in meta/tasks",
        )
    most = case.batch.seen[TOKEN_MASK].shape[-1] if TOKEN_MASK in case.batch.seen else NO_LIMIT
    longest = max(_all_prompts(case, tasks[:MAX_TASKS]), key=lambda prompt: prompt.tokens)
    figures = {"longest": longest.tokens, "most": most, "sentences": len(tasks)}
    if longest.tokens > most:
        enough = -(-longest.tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        flags, command = _longer_prompts(case, enough)
        yield Finding(
            "fail",
            f"prompts are cut off: the longest has {longest.tokens} tokens, the policy reads {most}; it ends in '...{longest.text.strip()[-40:]}'",
            f"let it read {enough} tokens, or write shorter sentences in meta/tasks",
            flags,
            command,
            figures=figures,
        )
        return
    yield Finding(
        "pass",
        f"{plural(len(tasks), 'sentence')}; the longest prompt has {longest.tokens} of {most} tokens",
        figures=figures,
    )


def _all_prompts(case: Case, tasks: Sequence[str]) -> Iterator[Prompt]:
    """Every sentence with the states of the first batch, one after the other."""
    yield from case.batch.prompts
    rows, transforms = case.batch.rows, case.setup.eval_transforms(0)
    number = num_rows(rows)
    for begin in range(0, len(tasks), number):
        part = list(tasks[begin : begin + number])
        columns = {key: values[: len(part)] for key, values in rows.items()}
        yield from make_prompts(transforms, columns | {TASK: np.array(part, dtype=object)})


def _longer_prompts(case: Case, tokens: int) -> tuple[tuple[str, ...], str]:
    folder, flags, fetch = editable_base(case)
    steps = read_object(case.folder, PREPROCESSOR).get("steps", [])
    at = [number for number, step in enumerate(steps) if step.get("registry_name") == "tokenizer_processor"]
    if not at:
        return (), ""
    command = edit_json_command(folder / PREPROCESSOR, [["steps", at[0], "config", "max_length", tokens]])
    if "tokenizer_max_length" in read_object(case.folder, CONFIG):
        command += f" && {edit_json_command(folder / CONFIG, [['tokenizer_max_length', tokens]])}"
    return flags, f"{fetch}{command}"


def check_pictures(case: Case) -> Iterator[Finding]:
    """Size and range of the pictures, as read and as the model's first layer gets them."""
    if not case.binding.cameras:
        yield Finding("pass", "the policy looks at no pictures")
        return
    yield from _picture_statistics(case)
    for own, _ in case.binding.cameras:
        pixels = case.batch.rows[own]
        low, high = int(pixels.min()), int(pixels.max())
        if pixels.dtype != np.uint8 or high - low < ONE_COLOUR:
            yield Finding(
                "warn",
                f"camera '{own}': its pictures have one colour ({low} to {high})",
                "look whether the camera was covered",
            )
        elif float((pixels >= WHITE).mean()) > NEARLY_ALL:
            yield Finding("warn", f"camera '{own}': its pictures are nearly white", "look at the recording")
    said = list(_sizes(case))
    if case.seen_range is not None:
        low, high = case.seen_range
        said.append(f"pictures reach the model's first layer from {low:.3g} to {high:.3g}")
        if max(abs(low), abs(high)) > MAX_SCALE:
            remedy = "the policy's adapter must scale them"
            yield Finding("fail", f"{said[-1]}: 0 to 255 where about -1 to 1 is expected", remedy)
            return
        if high - low < MIN_SPREAD:
            yield Finding("fail", f"{said[-1]}: all of them look alike", "correct the statistics of the cameras")
            return
    yield Finding("pass", "; ".join(said), figures={"range": case.seen_range})


def _sizes(case: Case) -> Iterator[str]:
    target = case.policy.image_hw
    for own, _ in case.binding.cameras:
        recorded = case.metas[0].features[own].height_width
        _, _, height, width = letterbox_box(recorded, target, pad=case.policy.pad)
        bars = 1 - height * width / (target[0] * target[1])
        black = f", {format_share(bars)} of it bars" if bars > 0.005 else ""
        yield f"{own} {recorded[0]}x{recorded[1]} as {target[0]}x{target[1]}{black}"


def _picture_statistics(case: Case) -> Iterator[Finding]:
    """Statistics of pictures belong to 0..1; some writers leave them in 0..255, and a picture is then nearly one value."""
    used = case.policy.normalisation.get("VISUAL", "IDENTITY") != "IDENTITY"
    for meta in case.metas:
        wrong = [own for own in meta.cameras if _in_255(meta.stats.get(own, {}))]
        if not wrong:
            continue
        local = meta.root.is_local and meta.version == "v3.0"
        yield Finding(
            "fail" if used else "warn",
            f"dataset '{meta.root.url}': statistics of {', '.join(wrong)} are of pictures in 0..255, expected 0..1"
            + ("" if used else "; this policy does not use them, LeRobot and others do"),
            "divide them by 255",
            command=divide_stats_command(meta.root.join("meta/stats.json"), wrong) if local else "",
        )


def _in_255(stats: Mapping[str, np.ndarray]) -> bool:
    values = [float(np.max(one)) for name, one in stats.items() if name != "count" and one.size]
    return bool(values) and max(values) > 2.0
