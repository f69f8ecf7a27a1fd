"""Decide what a run stores instead of computing it again, from rates measured on this machine.

A level is a result that is the same in every epoch: decoded frames, outputs of a frozen prefix.
`vlatune doctor` and the start of a run print one table of all levels; `--dataset.cache=auto` follows
its arithmetic. With n cores that read, per sample:

    make    CPU seconds to decode its images / n
    read    the larger of CPU seconds to read them back / n and bytes / measured disk rate
    epoch   samples x (share that fits x read + rest x make), or the step if that takes longer
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.config.settings import RunConfig
from vlatune.console import redacted
from vlatune.data.frames.cache import CacheSettings, open_cache, room_bytes
from vlatune.data.frames.prefix_store import total_bytes
from vlatune.data.reader import ReadSpec, read_unit
from vlatune.feed.plan import Share, make_units, plan_steps
from vlatune.feed.sizing import usable_cpus
from vlatune.formatting import format_bytes, format_seconds, format_share, text_table
from vlatune.run_setup import Setup

RESERVE_BYTES, RESERVE_SHARE = 5 << 30, 0.1
"""Free disk that a cache without --dataset.cache_bytes leaves to others."""
MIN_SHARE = 0.05
"""A cache that holds less of the dataset is not worth its disk."""
MIN_GAIN = 1.5
"""Decoding has to take this many times as long as reading back."""
MIN_SAVED_S = 10.0
"""Decoding that a run has to save; less would not make up for filling the cache."""
MAX_BESIDE_PREFIX = 0.2
"""Share of the budget that frames may take from a kept prefix that does not fit."""
PROBE_BYTES = 64 << 20
USED = "used"


@dataclass(frozen=True)
class StoreLevel:
    """Costs and savings of storing one result of all samples; a row of the table."""

    name: str
    sample_bytes: int
    num_samples: int
    share: float
    """Share of the samples that fits."""
    make_s: float | None
    """Seconds to compute a sample's result again, by all cores; None if not measured."""
    read_s: float | None
    """Seconds to read a sample's result back; None if not measured."""
    decision: str
    """USED, or why it is not used."""

    @property
    def stored_bytes(self) -> int:
        return self.sample_bytes * self.num_samples

    @property
    def needed_bytes_per_s(self) -> float | None:
        """Rate at which reading back is MIN_GAIN times as fast as computing."""
        return MIN_GAIN * self.sample_bytes / self.make_s if self.make_s else None

    @property
    def read_bytes_per_s(self) -> float | None:
        return self.sample_bytes / self.read_s if self.read_s else None

    def reading_s(self, *, is_stored: bool) -> float | None:
        """Return the mean seconds per sample from the second epoch on."""
        if self.make_s is None or not is_stored:
            return self.make_s
        return None if self.read_s is None else self.share * self.read_s + (1 - self.share) * self.make_s


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step per sample; 0 if unknown, which leaves reading alone."""

    sample_s: float = 0.0
    is_on_readers_cores: bool = False
    """True on a CPU, where the step and the readers share the cores."""

    def with_reading(self, reading_s: float) -> float:
        return self.sample_s + reading_s if self.is_on_readers_cores else max(self.sample_s, reading_s)


UNKNOWN_STEP = StepCost()


@dataclass(frozen=True)
class StorePlan:
    """The table of all levels, and the frame cache of the run."""

    dataset: str
    epochs: float
    levels: tuple[StoreLevel, ...]
    settings: CacheSettings | None
    """None if frames are not cached."""
    step: StepCost = UNKNOWN_STEP

    @property
    def frames(self) -> StoreLevel:
        return self.levels[0]

    def epoch_s(self, level: StoreLevel, *, is_stored: bool) -> float | None:
        reading_s = level.reading_s(is_stored=is_stored)
        return None if reading_s is None else level.num_samples * self.step.with_reading(reading_s)

    def lines(self) -> list[str]:
        """Return the table as text."""
        what = "an epoch" if self.step.sample_s else "an epoch of reading"
        title = f"{self.dataset}: {self.frames.num_samples:,} samples, {self.epochs:.1f} epochs planned"
        header = ["stored", "size", "fits", "disk needed", "measured", f"{what} without", "with", ""]
        rows = [header, *(self._cells(level) for level in self.levels)]
        return [title, *(f"  {line}" for line in text_table(rows))]

    def _cells(self, level: StoreLevel) -> list[str]:
        rates = [level.needed_bytes_per_s, level.read_bytes_per_s]
        times_s = [self.epoch_s(level, is_stored=stored) for stored in (False, True)]
        return [
            level.name,
            format_bytes(level.stored_bytes),
            format_share(level.share),
            *("" if rate is None else f"{format_bytes(rate)}/s" for rate in rates),
            *("" if one is None else format_seconds(one) for one in times_s),
            level.decision,
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "epochs": self.epochs,
            "step_s_per_sample": self.step.sample_s or None,
            "levels": [
                {
                    "name": level.name,
                    "is_used": level.decision == USED,
                    "decision": level.decision,
                    "sample_bytes": level.sample_bytes,
                    "stored_bytes": level.stored_bytes,
                    "share": level.share,
                    "needed_bytes_per_s": level.needed_bytes_per_s,
                    "read_bytes_per_s": level.read_bytes_per_s,
                    "make_s": level.make_s,
                    "read_s": level.read_s,
                    "epoch_s_without": self.epoch_s(level, is_stored=False),
                    "epoch_s_with": self.epoch_s(level, is_stored=True),
                }
                for level in self.levels
            ],
        }


def _why_never(wanted: str, epochs: float) -> str | None:
    """Return why frames are not cached whatever the rates are, or None."""
    if wanted == "off":
        return "off"
    return "off: every frame is read once" if wanted == "auto" and epochs <= 1 else None


type OtherLevels = Callable[[float], Sequence[StoreLevel]]
"""Returns the levels of the policy, given the measured seconds to read a byte."""


def open_stores(config: RunConfig, setup: Setup, others: OtherLevels = lambda disk_s: ()) -> StorePlan:
    """Return the plan of a run that starts now, with its cache folder made and within its budget."""
    plan = plan_stores(config, setup, others, always_measures=False)
    if plan.settings is None:
        return plan
    try:
        open_cache(plan.settings)
    except (OSError, ValueError) as error:
        if config.dataset.cache != "auto":
            raise
        return _without_cache(plan, f"off: {error}")
    return plan


def plan_stores(
    config: RunConfig,
    setup: Setup,
    others: OtherLevels = lambda disk_s: (),
    step: StepCost = UNKNOWN_STEP,
    *,
    always_measures: bool = True,
) -> StorePlan:
    """Measure decoding and disk, and decide; creates nothing.

    `always_measures` also measures what the decision does not need.
    """
    wanted, num_samples = config.dataset.cache, setup.order.num_samples
    folder = default_folder() if wanted in ("auto", "off") else Path(wanted).expanduser().resolve()
    settings = make_settings(folder, config.dataset.cache_bytes)
    epochs = config.steps * config.global_batch / num_samples
    sample_bytes = max(_image_bytes(spec.cameras) for spec in setup.specs)
    frames = StoreLevel("frames", sample_bytes, num_samples, 0.0, None, None, USED)
    dataset = ", ".join(redacted(meta.root.url) for meta in setup.metas)
    plan = StorePlan(dataset, epochs, (frames,), settings, step)
    try:
        room = room_bytes(settings)
        frames = replace(frames, share=min(1.0, room / max(1, frames.stored_bytes)))
        if not always_measures and (reason := _why_never(wanted, epochs)):
            return _without_cache(replace(plan, levels=(frames,)), reason)
        disk_s = measure_disk(folder)
    except (OSError, ValueError) as error:
        if wanted not in ("auto", "off"):
            raise
        return _without_cache(plan, f"off: {error}")
    decode_s, hit_s = measure_reading(setup)
    cores = usable_cpus()
    frames = replace(frames, make_s=decode_s / cores, read_s=max(hit_s / cores, sample_bytes * disk_s))
    plan = replace(plan, levels=(frames, *others(disk_s)))
    prefix_share = min(1.0, room / total_bytes(setup.kept.layout, num_samples)) if setup.kept else 0.0
    reason = why_not(wanted, epochs, frames, prefix_share=prefix_share, room=room)
    return _without_cache(plan, reason) if reason else plan


def why_not(
    wanted: str, epochs: float, frames: StoreLevel, *, prefix_share: float = 0.0, room: float = 0.0
) -> str | None:
    """Return why frames are not cached with `--dataset.cache=wanted`, or None.

    `prefix_share` is the share of the samples whose prefix fits in `room` bytes; their images are not read.
    """
    if reason := _why_never(wanted, epochs):
        return reason
    if prefix_share == 1:
        return "off: the prefix is kept, which replaces images"
    if prefix_share and frames.stored_bytes > MAX_BESIDE_PREFIX * room:
        return "off: the prefix needs the space"
    if wanted != "auto":
        return None
    if frames.share < MIN_SHARE:
        return "off: too little fits"
    assert frames.make_s is not None
    assert frames.read_s is not None
    if frames.make_s < MIN_GAIN * frames.read_s:
        return "off: decoding is as fast"
    read = frames.num_samples * frames.share * (1 - prefix_share)
    saved_s = (epochs - 1) * read * (frames.make_s - frames.read_s)
    return "off: saves little time" if saved_s < MIN_SAVED_S else None


def with_cache(setup: Setup, plan: StorePlan) -> Setup:
    """Return the setup of a run with this plan; a kept prefix leaves the space of all frames to cached ones."""
    kept = setup.kept
    if kept and plan.settings:
        kept = replace(kept, cache=kept.cache.leaving(plan.frames.stored_bytes))
    return replace(setup, specs=tuple(replace(spec, cache=plan.settings) for spec in setup.specs), kept=kept)


def make_settings(folder: Path, max_bytes: int) -> CacheSettings:
    """Return the settings of a run that starts now; 0 bytes take the free disk minus a reserve."""
    reserve = 0 if max_bytes else max(RESERVE_BYTES, int(RESERVE_SHARE * _disk(folder).total))
    return CacheSettings(str(folder), max_bytes or 1 << 62, reserve, time.time())


def measure_reading(setup: Setup) -> tuple[float, float]:
    """Return the seconds to decode a sample of the first run of frames, and to read it back from memory."""
    piece = max(plan_steps(setup.order, Share(0, 1), 0, 1), key=lambda one: len(one.frames))
    (unit,) = make_units(setup.data_plan, Share(0, 1), [piece])
    begin = int(unit.frames[0])
    frames = np.arange(begin, min(begin + setup.order.run_length, unit.length))
    unit = replace(unit, frames=frames, slots=frames)
    spec = setup.specs[unit.dataset_index]

    def seconds(spec: ReadSpec) -> float:
        began_s = time.perf_counter()
        read_unit(spec, unit)
        return (time.perf_counter() - began_s) / len(frames)

    decode_s = seconds(replace(spec, cache=None))
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheSettings(folder, 1 << 62, 0, time.time())
        open_cache(cache)
        cached = replace(spec, cache=cache)
        seconds(cached)
        return decode_s, seconds(cached)


def measure_disk(folder: Path) -> float:
    """Return the seconds to read a byte from the folder's disk, past the page cache where possible."""
    data = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=_existing(folder)) as file:
        for _ in range(PROBE_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began_s = time.perf_counter()
        while file.read(len(data)):
            pass
        return (time.perf_counter() - began_s) / PROBE_BYTES


def _without_cache(plan: StorePlan, reason: str) -> StorePlan:
    frames = replace(plan.frames, decision=" ".join(reason.split()))
    return replace(plan, levels=(frames, *plan.levels[1:]), settings=None)


def _image_bytes(cameras: Sequence[Any]) -> int:
    """Return the bytes of the images of one frame of all cameras."""
    return sum(3 * camera.height * camera.width for camera in cameras)


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlatune" / "frames"


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest parent that exists."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _disk(folder: Path) -> "shutil._ntuple_diskusage":
    return shutil.disk_usage(_existing(folder.absolute()))
