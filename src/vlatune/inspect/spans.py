"""Where meta/episodes places the episodes in the mp4 files: in order, one after the other, as long as they are.

    file-000.mp4   |--- episode 0 ---|--- episode 1 ---|   from_timestamp of 1 = to_timestamp of 0
                   0.0               1.2               2.1

Pure, over the columns of `Episodes`. Times are compared to half a frame. v2.1 has no such times.
"""

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.episodes import Episodes, VideoSpan
from vlatune.inspect.problems import MAX_EXAMPLES, Problem, with_examples

FIX = "convert or record the dataset anew: as it is, pictures of another episode would be shown"


def span_problems(meta: DatasetMeta) -> list[Problem]:
    problems: list[Problem] = []
    for camera, span in meta.episodes.videos.items():
        if not np.isposinf(span.to_s).all():
            place = f"meta/episodes, camera '{camera}'"
            problems += _order_problems(meta.episodes, span, place)
            problems += _overlap_problems(meta.episodes, span, place, half_frame_s=0.5 / meta.fps)
            problems += _length_problems(meta.episodes, span, place, fps=meta.fps)
    return problems


def _order_problems(episodes: Episodes, span: VideoSpan, place: str) -> list[Problem]:
    before, after = _neighbours(span, np.lexsort((episodes.index, span.file, span.chunk)))
    wrong = ~(span.from_s[after] > span.from_s[before])  # NaN is wrong too
    return with_examples(
        "warning",
        _pairs(episodes, before[wrong], after[wrong], other_s=span.from_s, verb="begins", span=span),
        count=int(wrong.sum()),
        place=place,
        found="from_timestamp does not rise from an episode to the next one in the same file",
        expected="episodes of a file in the order of their index",
        fix="nothing if the pictures are right: the order alone does no harm; else convert the dataset anew",
    )


def _overlap_problems(episodes: Episodes, span: VideoSpan, place: str, *, half_frame_s: float) -> list[Problem]:
    before, after = _neighbours(span, np.lexsort((span.from_s, span.file, span.chunk)))
    wrong = span.from_s[after] < span.to_s[before] - half_frame_s
    return with_examples(
        "error",
        _pairs(episodes, before[wrong], after[wrong], other_s=span.to_s, verb="ends", span=span),
        count=int(wrong.sum()),
        place=place,
        found="episodes overlap inside a file",
        expected="from_timestamp at or after the to_timestamp of the episode before it",
        fix=FIX,
    )


def _length_problems(episodes: Episodes, span: VideoSpan, place: str, *, fps: float) -> list[Problem]:
    surplus = (span.to_s - span.from_s) * fps - episodes.length
    is_wrong = ~(np.abs(surplus) <= 0.5) | (span.from_s < 0)
    is_last_frame = is_wrong & (np.abs(surplus + 1) <= 0.5) & (span.from_s >= 0) & ~_runs_into_next(episodes, span, fps)
    rest = np.flatnonzero(is_wrong & ~is_last_frame)
    is_longer = bool(np.all(surplus[rest] > 0) and np.all(span.from_s[rest] >= 0))
    return [
        *with_examples(
            "warning",
            _spans(episodes, span, np.flatnonzero(is_last_frame)),
            count=int(is_last_frame.sum()),
            place=place,
            found="to_timestamp is the time of the last frame, (length - 1) / fps, not of its end",
            expected=f"length / {fps:g} fps seconds after from_timestamp, LeRobot's convention",
            fix="nothing: a frame's time is from_timestamp and that of its row, so every row has its own picture",
        ),
        *with_examples(
            "warning" if is_longer else "error",
            _spans(episodes, span, rest),
            count=len(rest),
            place=place,
            found="the time from from_timestamp to to_timestamp is not that of the episode's frames",
            expected=f"length / {fps:g} fps seconds, beginning at 0 s or later",
            fix="look at the ends of these episodes; the pictures after the last row are not used"
            if is_longer
            else FIX,
        ),
    ]


def _runs_into_next(episodes: Episodes, span: VideoSpan, fps: float) -> np.ndarray:
    """Whether an episode's frames go on past the beginning of the next one in its file: they would be that one's."""
    before, after = _neighbours(span, np.lexsort((span.from_s, span.file, span.chunk)))
    runs = np.zeros(len(episodes), dtype=bool)
    runs[before] = span.from_s[after] < span.from_s[before] + (episodes.length[before] - 0.5) / fps
    return runs


def _spans(episodes: Episodes, span: VideoSpan, which: np.ndarray) -> list[str]:
    return [
        f"episode {episodes.index[one]}: {span.from_s[one]:.4f} s to {span.to_s[one]:.4f} s for {episodes.length[one]} frames"
        for one in which[:MAX_EXAMPLES]
    ]


def _pairs(
    episodes: Episodes, before: np.ndarray, after: np.ndarray, *, other_s: np.ndarray, verb: str, span: VideoSpan
) -> list[str]:
    return [
        f"episode {episodes.index[second]} begins at {span.from_s[second]:.4f} s, "
        f"episode {episodes.index[first]} {verb} at {other_s[first]:.4f} s"
        for first, second in zip(before[:MAX_EXAMPLES], after[:MAX_EXAMPLES], strict=True)
    ]


def _neighbours(span: VideoSpan, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the episodes that follow each other in one file, and of those that they follow."""
    before, after = order[:-1], order[1:]
    same = (span.chunk[before] == span.chunk[after]) & (span.file[before] == span.file[after])
    return before[same], after[same]
