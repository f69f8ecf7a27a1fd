"""Decide whether a run keeps the outputs of its policy's frozen part (--policy.keep_prefix).

The run computes them one sample at a time if it keeps them, which changes the last bits of losses.
So the decision is recorded in the run's settings, and a resumed run follows it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.config.settings import RunConfig
from vlatune.data.frames.cache import part_identity, room_bytes
from vlatune.data.frames.prefix_store import PrefixLayout, PrefixSettings, PrefixStore, total_bytes
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.read_spec import ReadSpec
from vlatune.data.reader import make_unit
from vlatune.feed.sizing import CORE_FLOPS
from vlatune.formatting import format_bytes
from vlatune.policies.base import ModuleOptions
from vlatune.run_setup import Setup, kept_layout
from vlatune.storage.files import RejectedFileError
from vlatune.storage.remote_fs import version_tag
from vlatune.storage.remote_retry import retried
from vlatune.storage.root import Root
from vlatune.train.cache_choice import StoreLevel, default_folder, make_settings, measure_disk

GPU_FLOPS = 100e12
"""Approximate FLOPS of a GPU in training."""
MIN_SHARE = 0.3
"""A disk that holds less of the samples is not worth computing them one at a time."""
VERSIONS = tuple(f"versions.{name}" for name in ("vlatune", "torch", "lerobot", "transformers", "tokenizers", "av"))


@dataclass(frozen=True)
class PrefixFigures:
    """Costs and savings of keeping the prefix of a run."""

    sample_bytes: int
    """Bytes of a sample with the longest prompt."""
    total_bytes: int
    epochs: float
    compute_s: float
    """Estimated seconds of a worker to compute a sample's prefix."""

    @property
    def read_bytes_per_s(self) -> float:
        """Rate at which reading is as fast as computing, per worker."""
        return self.sample_bytes / self.compute_s


def prefix_figures(
    layout: PrefixLayout, *, samples: int, epochs: float, flops: float, flops_per_s: float
) -> PrefixFigures:
    """Return the figures of a run; `flops` is the cost of a sample's prefix.

    >>> pi05 = PrefixLayout("prefix", 768, 200, width=18 * 2 * 256, dtype="bfloat16")
    >>> figures = prefix_figures(pi05, samples=10_000, epochs=10, flops=4.5e12, flops_per_s=100e12)
    >>> figures.sample_bytes, round(figures.total_bytes / 1e9), round(figures.read_bytes_per_s / 1e6)
    (17842176, 179, 396)
    """
    return PrefixFigures(layout.max_bytes, total_bytes(layout, samples), epochs, flops / flops_per_s)


@dataclass(frozen=True)
class PrefixChoice:
    """Decision what a run keeps, with its figures."""

    settings: PrefixSettings | None
    """None if nothing is kept."""
    reason: str
    """The reason, as it is logged."""


def run_figures(config: RunConfig, setup: Setup, *, on_gpu: bool) -> tuple[PrefixLayout, PrefixFigures]:
    """Return layout and figures of a run; raise ValueError if it trains all that images pass through."""
    layout, options = kept_layout(config, setup), ModuleOptions.of(config.policy)
    # The cost is linear in the noise samples; without any, only the prefix remains.
    one, two = (
        setup.adapter.step_flops(setup.policy, setup.binding, replace(options, flow_samples=number))
        for number in (1, 2)
    )
    epochs = config.steps * config.global_batch / setup.order.num_samples
    rate = GPU_FLOPS if on_gpu else CORE_FLOPS
    return layout, prefix_figures(
        layout, samples=setup.order.num_samples, epochs=epochs, flops=max(1.0, 2 * one - two), flops_per_s=rate
    )


def choose_prefix(config: RunConfig, setup: Setup, fingerprints: Mapping[str, str], *, on_gpu: bool) -> PrefixChoice:
    """Return what the run keeps; `auto` measures the disk and follows the figures."""
    wanted = config.policy.keep_prefix
    if wanted == "false":
        return PrefixChoice(None, "off")
    if config.dataset.image_transforms.enable:
        return PrefixChoice(None, "off: images are augmented")
    if config.fsdp:
        return PrefixChoice(None, "off: --fsdp gathers the frozen part in every step")
    try:
        layout, figures = run_figures(config, setup, on_gpu=on_gpu)
    except ValueError:
        if wanted == "true":
            raise
        return PrefixChoice(None, f"off: --policy.train={config.policy.train} trains it")
    folder = cache_folder(config)
    if wanted == "auto" and figures.epochs <= 1:
        return PrefixChoice(None, "off: every sample is read once")
    cache = make_settings(folder, config.dataset.cache_bytes)
    try:
        identities = _identities(config, setup, layout, fingerprints)
    except ValueError as error:
        if wanted == "true":
            raise
        return PrefixChoice(None, f"off: {error}")
    cameras = tuple(name for _, name in setup.binding.cameras)
    settings = PrefixSettings(cache, layout, identities, cameras)
    share = min(1.0, PrefixStore(settings).room_bytes() / figures.total_bytes)
    sizes = (
        f"{format_bytes(figures.sample_bytes)} a sample, {format_bytes(figures.total_bytes)} in total, "
        f"{share:.0%} fit in '{folder}'"
    )
    if wanted == "true":
        return PrefixChoice(settings, sizes)
    if share < MIN_SHARE:
        return PrefixChoice(None, f"off: {sizes}")
    try:
        read_s = measure_disk(folder)
    except OSError as error:
        return PrefixChoice(None, f"off: {error}")
    rates = (
        f"the disk reads {format_bytes(1 / read_s)}/s, {format_bytes(figures.read_bytes_per_s * config.num_workers)}/s "
        f"are as fast as computing"
    )
    if read_s * figures.read_bytes_per_s * config.num_workers > 1:
        return PrefixChoice(None, f"off: {rates}")
    return PrefixChoice(settings, f"{sizes}; {rates}; {figures.epochs:.1f} epochs planned")


def prefix_levels(
    config: RunConfig, setup: Setup, disk_s: float, *, on_gpu: bool, decision: str
) -> tuple[StoreLevel, ...]:
    """Return the row of the table of stored results; none if the policy has nothing to keep."""
    try:
        _, figures = run_figures(config, setup, on_gpu=on_gpu)
        room = room_bytes(make_settings(cache_folder(config), config.dataset.cache_bytes))
    except (OSError, ValueError):
        return ()
    share, num_samples = min(1.0, room / figures.total_bytes), setup.order.num_samples
    make_s = figures.compute_s / config.num_workers
    return (
        StoreLevel("prefix", figures.sample_bytes, num_samples, share, make_s, figures.sample_bytes * disk_s, decision),
    )


def cache_folder(config: RunConfig) -> Path:
    """Return the folder that cached frames and kept prefixes share."""
    given = config.dataset.cache
    return default_folder() if given in ("auto", "off") else Path(given).expanduser().resolve()


def with_prefix(config: RunConfig, choice: PrefixChoice) -> RunConfig:
    """Return the settings with the decision, as they are recorded."""
    return replace(config, policy=replace(config.policy, keep_prefix="true" if choice.settings else "false"))


def _identities(
    config: RunConfig, setup: Setup, layout: PrefixLayout, fingerprints: Mapping[str, str]
) -> tuple[bytes, ...]:
    """Hash what determines the rows of each dataset, except prompts and kernels."""
    policy, binding = setup.policy, setup.binding
    common = [
        f"{key}={fingerprints[key]}" for key in sorted(fingerprints) if key.startswith("base.") or key in VERSIONS
    ]
    common += _weight_files(Path(policy.folder))
    settings = (layout, binding.cameras, binding.missing_cameras, binding.parts != (), policy.image_hw, policy.pad)
    run = (config.policy.train, config.policy.dtype, config.policy.compile, config.deterministic)
    return tuple(
        part_identity(
            *common,
            *map(repr, (*settings, *run, sorted(policy.overrides.items()))),
            *(fingerprints[f"dataset.{number}.{name}"] for name in ("meta", "files")),
            *_recorded(meta, spec),
            repr([(camera.name, camera.column, camera.height, camera.width, camera.pad) for camera in spec.cameras]),
            repr((spec.fps, spec.tolerance_s, [camera.column for camera in spec.absent])),
        )
        for number, (meta, spec) in enumerate(zip(setup.metas, setup.specs, strict=True))
    )


def _weight_files(folder: Path) -> Iterator[str]:
    """Yield what changes with the weights; their fingerprint covers only the first bytes of each tensor."""
    for path in sorted(folder.glob("model*.safetensors")):
        found = path.stat()
        yield f"{path.name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _recorded(meta: DatasetMeta, spec: ReadSpec) -> Iterator[str]:
    """Yield where the images of each episode are, and the version of each file that holds them."""
    none, files = np.arange(0), set[str]()
    for position in range(len(meta.episodes)):
        unit = make_unit(meta, spec, position, none, none)
        yield f"{unit.data_path} {unit.data_offset} {unit.videos}"
        files |= {unit.data_path, *(file for _, file, _ in unit.videos)}
    listed = {} if meta.root.is_local else _listed(meta.root)
    for name in sorted(files):
        with suppress(FileNotFoundError, RejectedFileError):  # of an episode that is not used, or reading raises it
            version = version_tag(listed.get(meta.root.join(name), {})) or meta.root.version(name)
            if version.isdigit():  # its size alone
                raise ValueError(
                    f"--policy.keep_prefix: '{meta.root.url}': {name} has no version, so a changed file could not be "
                    f"recognised; copy the dataset to a local folder, or remove the flag"
                )
            yield f"{name} {version}"


def _listed(root: Root) -> dict[str, Any]:
    """Return name -> info of all remote files, with few requests."""
    fs = root.filesystem()
    tops = [root.join(folder) for folder in ("data", "videos")]
    return {name: info for top in tops for name, info in retried(partial(fs.find, top, detail=True), top).items()}
