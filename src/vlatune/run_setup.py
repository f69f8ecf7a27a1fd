"""Build the data and policy specs of a run from its config, before Ray starts. No torch, no Ray.

All errors that can be detected without decoding a video are raised here: dataset, cameras, dims,
statistics, tokenizer, batch size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.config.settings import RunConfig
from vlatune.console import progress_bar, warn
from vlatune.data.augmentation import Augment, make_augment
from vlatune.data.features import SELECT_DIMS, camera_spec, offsets_at_rate, vector_spec, with_dims, with_names
from vlatune.data.frames.prefix_store import PrefixLayout, PrefixSettings
from vlatune.data.frames.resize import letterbox_box
from vlatune.data.health.bad_episodes import (
    BadEpisode,
    check_first,
    find_bad_episodes,
    leave_out,
    without,
)
from vlatune.data.health.timestamps import all_conversions, with_timestamps
from vlatune.data.loss_groups import LossGroups, WithLossGroups, make_loss_groups
from vlatune.data.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.data.order.partition import (
    Selection,
    drop_last_frames,
    hold_out,
    hold_out_last,
    select_episodes,
)
from vlatune.data.order.sample_order import (
    Mixture,
    OrderSpec,
    check_order,
    choose_lanes,
    group_sizes,
    micro_batch,
)
from vlatune.data.reader import CameraSpec, ReadSpec
from vlatune.data.transforms import Transform
from vlatune.feed.plan import DataPlan
from vlatune.policies.base import (
    Binding,
    ModuleOptions,
    NoiseSpec,
    PolicyAdapter,
    PolicySpec,
    read_policy,
    require_kept,
)
from vlatune.policies.base_folder import resolve_folder
from vlatune.policies.binding import bind_all, differ, join_bindings, mix_bindings, why_one_robot
from vlatune.policies.normalisation import run_stats
from vlatune.registry import get_adapter, get_policy_info
from vlatune.run.run_folder import CONFIG_FILE, SKIPPED_FILE
from vlatune.storage.files import read_json, write_json
from vlatune.storage.remote_fs import parse_storage_options
from vlatune.storage.root import Root


@dataclass(frozen=True)
class Inputs:
    """Datasets, policy and statistics as plain values: what evaluation and training share."""

    metas: tuple[DatasetMeta, ...]
    specs: tuple[ReadSpec, ...]
    held_out: Selection
    """Episodes to evaluate on."""
    adapter: PolicyAdapter[Any]
    policy: PolicySpec
    binding: Binding
    stats: Mapping[str, Mapping[str, np.ndarray]]

    def eval_transforms(self, seed: int) -> tuple[Transform, ...]:
        """Return transforms with one reproducible noise sample per observation."""
        return self.adapter.make_transforms(self.policy, self.binding, self.stats, NoiseSpec(seed, by_frame=True))


@dataclass(frozen=True, kw_only=True)
class Setup(Inputs):
    """The inputs of a run and its training plan; sent to every worker."""

    training: Selection
    order: OrderSpec
    batch_size: int
    """Samples per worker and micro-step."""
    skipped: tuple[BadEpisode, ...] = ()
    """Requested episodes that are excluded (--dataset.on_bad_episode=skip)."""
    flow_samples: int = 1
    """Noise samples per observation in training; evaluation uses one."""
    augment: Augment | None = None
    """Augmentation from --dataset.image_transforms, in addition to the policy's."""
    kept: PrefixSettings | None = None
    """What the run keeps of each sample, chosen at its start (--policy.keep_prefix)."""

    def training_transforms(self) -> tuple[Transform, ...]:
        noise = NoiseSpec(self.order.seed, self.flow_samples)
        own = self.adapter.training_transforms(self.policy, self.binding, self.stats, noise)
        return own if self.augment is None else (self.augment, *own)

    @cached_property
    def data_plan(self) -> DataPlan:
        """Plan that the workers' feeds read, built once on the driver."""
        transforms = (WithLossGroups(self.loss_groups, self.training_transforms()),)
        return DataPlan(
            self.metas,
            self.training,
            self.specs,
            self.order,
            transforms,
            self.batch_size,
            has_robots=bool(self.binding.parts),
        )

    @cached_property
    def loss_groups(self) -> LossGroups:
        """Groups for which losses are reported separately."""
        return make_loss_groups(
            [meta.tasks for meta in self.metas],
            [len(meta.episodes) for meta in self.metas],
            dims=self.binding.action_dim,
            robots=len(self.binding.parts),
        )

    def for_workers(self, num_workers: int) -> "Setup":
        """Return the setup of a group of this size: the same global batches in micro-batches that are not larger."""
        return replace(self, batch_size=micro_batch(self.order.global_batch, num_workers, self.batch_size))

    def micro_steps(self, num_workers: int) -> int:
        """Return the micro-steps per optimizer step of each worker."""
        return self.order.global_batch // (num_workers * self.batch_size)

    def with_lanes(self, lanes: int) -> "Setup":
        """Return the setup with this number of lanes; a resumed run keeps its checkpoint's."""
        order = replace(self.order, lanes=lanes)
        check_order(order)
        return replace(self, order=order)


type Usable = tuple[Selection, tuple[BadEpisode, ...]]
"""The selected readable episodes, and the excluded bad ones."""


def make_inputs(config: RunConfig) -> Inputs:
    """Read what an evaluation of the run needs: its held-out episodes, policy and statistics."""
    return _read_inputs(config, load_metas(config), None, preflight=False)[0]


def make_setup(
    config: RunConfig,
    metas: tuple[DatasetMeta, ...] | None = None,
    *,
    preflight: bool = False,
    usable: Usable | None = None,
) -> Setup:
    """Read everything that the config names; `metas` are its datasets if already loaded.

    `preflight` also checks that the datasets' files exist and that the first episode is valid.
    `usable` skips the episode check if it was done before.
    """
    metas = load_metas(config) if metas is None else metas
    inputs, training, skipped = _read_inputs(config, metas, usable, preflight=preflight)
    if config.policy.keep_prefix == "true":
        kept_layout(config, inputs)
    training = drop_last_frames(training, inputs.policy.drop_last_frames)
    order = OrderSpec(
        lengths=tuple(training.length.tolist()),
        seed=config.seed,
        global_batch=config.global_batch,
        lanes=choose_lanes(config.global_batch, config.num_workers),
        run_length=config.dataset.run_length,
        window_rows=config.dataset.window_rows,
        mixture=_make_mixture(config, training, len(metas)),
        drop_last=config.dataset.drop_last,
    )
    check_order(order)
    check_workers(config, order.lanes)
    return Setup(
        **vars(inputs),
        training=training,
        order=order,
        batch_size=config.batch_size,
        skipped=skipped,
        flow_samples=config.policy.flow_samples,
        augment=_make_augment(config, inputs),
    )


def check_workers(config: RunConfig, lanes: int) -> None:
    """Raise if an elastic run could have only one number of workers."""
    smallest, largest = config.fewest_workers, config.num_workers
    if smallest > largest:
        raise ValueError(f"--min_workers={smallest}: must be at most --num_workers={largest}")
    if smallest < largest and len(group_sizes(lanes, smallest, largest)) < 2:
        raise ValueError(
            f"--num_workers={smallest}:{largest}: no number below {largest} divides the {lanes} lanes of the run; "
            f"use a smaller MIN, a MAX with more divisors, or another --batch_size"
        )


def _read_inputs(
    config: RunConfig, metas: tuple[DatasetMeta, ...], usable: Usable | None, *, preflight: bool
) -> tuple[Inputs, Selection, tuple[BadEpisode, ...]]:
    """Return the inputs, the training episodes and the excluded bad episodes."""
    adapter: PolicyAdapter[Any] = get_adapter(config.policy.type)
    folder = resolve_folder(base_path(config), config.policy.revision)
    policy = read_policy(adapter, folder, get_policy_info(config.policy.type), config.policy.overrides)
    bindings = bind_all(policy, metas)
    binding = join_roots(config, adapter, policy, metas, bindings)
    specs = read_specs(config, metas, policy, bindings, binding)
    wanted = select_episodes(metas, config.dataset.episodes, config.dataset.exclude_episodes)
    specs, warnings = with_timestamps(metas, specs, wanted, config.dataset.timestamps)
    selected, skipped = usable or _usable_episodes(config, metas, specs, wanted, preflight=preflight)
    metas = without(metas, skipped)
    if config.dataset.hold_out == "last_of_task":
        training, held_out = hold_out_last(selected, config.dataset.eval_split, metas)
    else:  # several robots: the same share of each
        training, held_out = hold_out(selected, config.dataset.eval_split, config.seed, by_dataset=bool(binding.parts))
    stats, doubtful = run_stats(config.dataset, metas, policy, binding, against_rows=preflight)
    if preflight:  # warn once, although a run is set up several times
        for text in (*warnings, *all_conversions(metas, specs, wanted), *doubtful):
            warn(f"vlatune: warning: {text}")
    return Inputs(metas, specs, held_out, adapter, policy, binding, stats), training, skipped


def kept_layout(config: RunConfig, inputs: Inputs) -> PrefixLayout:
    """Return what the run can keep of each sample; raise if that changes with every step."""
    info, options = get_policy_info(config.policy.type), ModuleOptions.of(config.policy)
    layout = require_kept(inputs.adapter, inputs.policy, inputs.binding, info, options)
    return replace(layout, stored=config.policy.keep_prefix_dtype)


def join_roots(
    config: RunConfig,
    adapter: PolicyAdapter[Any],
    policy: PolicySpec,
    metas: Sequence[DatasetMeta],
    bindings: Sequence[Binding],
) -> Binding:
    """Join the bindings of all roots as one robot or several (--dataset.robots)."""
    several = config.dataset.robots == "several" or (config.dataset.robots == "auto" and differ(bindings))
    if not several:
        return join_bindings(metas, bindings)
    if adapter.mixes_robots:
        return mix_bindings(policy, bindings)
    reason = why_one_robot(config.policy.type)
    try:
        join_bindings(metas, bindings)
    except ValueError as error:
        raise ValueError(f"{error}; {reason}") from None
    raise ValueError(f"--dataset.robots=several: {reason}; leave the flag out")


def _make_mixture(config: RunConfig, training: Selection, num_datasets: int) -> Mixture | None:
    """Return the mixture weights; proportional to size, every frame occurs once per epoch."""
    weights = config.dataset.weight
    if not weights and num_datasets > 1:
        frames = np.bincount(training.dataset, weights=training.length, minlength=num_datasets)
        temperature = config.dataset.weight_temperature or 1.0
        weights = tuple(((frames / max(1.0, frames.max())) ** (1 / temperature)).tolist())
    return Mixture(tuple(training.dataset.tolist()), weights) if weights else None


def _make_augment(config: RunConfig, inputs: Inputs) -> Augment | None:
    """Build the augmentation; LeRobot's preset leaves the letterbox padding untouched."""
    transforms = config.dataset.image_transforms
    if not transforms.enable:
        return None
    boxes = {
        (number, camera.column): letterbox_box(
            meta.features[camera.name].height_width, (camera.height, camera.width), pad=inputs.policy.pad
        )
        if transforms.preset == "lerobot"
        else (0, 0, camera.height, camera.width)
        for number, (meta, spec) in enumerate(zip(inputs.metas, inputs.specs, strict=True))
        for camera in spec.cameras
    }
    return make_augment(transforms, config.seed, dict(inputs.binding.cameras), boxes)


def base_path(config: RunConfig) -> str:
    """Return the path of the base model; one inside the run folder may have moved with it."""
    path = config.policy.path
    assert path is not None  # checked by validate()
    moved = config.run_dir / Path(path).name
    return str(moved) if Path(path).is_absolute() and not Path(path).exists() and moved.is_dir() else path


def load_metas(config: RunConfig) -> tuple[DatasetMeta, ...]:
    options = parse_storage_options(config.dataset.storage_options)
    metas = tuple(load_meta(Root(url, options), argument="--dataset.root") for url in dataset_roots(config))
    for meta in metas:
        check_complete(meta)
    metas = with_names(
        metas, config.rename_map, config.dataset.rename_map, what=("--rename_map", "--dataset.rename_map")
    )
    return with_dims(metas, config.dataset.select_dims, SELECT_DIMS)


def _usable_episodes(
    config: RunConfig,
    metas: tuple[DatasetMeta, ...],
    specs: tuple[ReadSpec, ...],
    selected: Selection,
    *,
    preflight: bool,
) -> Usable:
    """Check the episodes according to --dataset.on_bad_episode.

    A resumed run keeps its list of excluded episodes even if the data was fixed since: other
    episodes would change the sample order.
    """
    if config.dataset.on_bad_episode != "skip":
        if preflight:
            check_first(metas, specs, selected)
        return selected, ()
    if (config.run_dir / CONFIG_FILE).exists() and (config.run_dir / SKIPPED_FILE).exists():
        bad = read_skipped(config.run_dir)
    else:
        with progress_bar("files checked") as show:
            bad = find_bad_episodes(metas, specs, selected, on_file=show)
    return leave_out(selected, metas, bad), bad


def dataset_roots(config: RunConfig) -> tuple[str, ...]:
    if config.dataset.root:
        return config.dataset.root
    from vlatune.storage.hub import fetch_dataset

    assert config.dataset.repo_id is not None  # checked by validate()
    return (str(fetch_dataset(config.dataset.repo_id, config.dataset.revision)),)


def read_specs(
    config: RunConfig, metas: Sequence[DatasetMeta], policy: PolicySpec, bindings: Sequence[Binding], joint: Binding
) -> tuple[ReadSpec, ...]:
    """Return what to read from each dataset; all share the column names of `joint`."""
    rate, column = config.dataset.action_fps, {target: name for name, target in joint.cameras}
    specs = []
    for number, (meta, own) in enumerate(zip(metas, bindings, strict=True)):
        own_cameras, seen = {target for _, target in own.cameras}, policy.observation_offsets
        seen = None if seen is None else offsets_at_rate(seen, meta.fps, rate)
        offsets = offsets_at_rate(policy.action_offsets, meta.fps, rate)
        state = vector_spec(meta, meta.own(STATE), is_float32=True, offsets=seen, called=STATE)
        action = vector_spec(meta, meta.own(ACTION), is_float32=True, offsets=offsets, called=ACTION)
        if joint.parts:
            state, action = replace(state, widened=joint.state_dim), replace(action, widened=joint.action_dim)
        cameras = tuple(
            camera_spec(meta, name, policy.image_hw, seen, called=column[target], pad=policy.pad)
            for name, target in own.cameras
        )
        absent = tuple(
            CameraSpec("", "absent", *policy.image_hw, seen, called=name)
            for name, target in joint.cameras
            if target not in own_cameras
        )
        specs.append(
            ReadSpec(
                root=meta.root,
                dataset_index=number,
                tolerance_s=config.dataset.tolerance_s,
                cameras=cameras,
                vectors=(state, action),
                tasks=meta.tasks,
                absent=absent,
            )
        )
    return tuple(specs)


def write_skipped(run_dir: Path, bad: Sequence[BadEpisode]) -> None:
    """Write the excluded episodes, unless they are already recorded."""
    if not (run_dir / SKIPPED_FILE).exists():
        write_json(run_dir / SKIPPED_FILE, {"skipped_episodes": [asdict(one) for one in bad]})


def read_skipped(run_dir: Path) -> tuple[BadEpisode, ...]:
    file = run_dir / SKIPPED_FILE
    try:
        listed = read_json(run_dir, SKIPPED_FILE)["skipped_episodes"]
        return tuple(
            BadEpisode(int(one["dataset_index"]), str(one["dataset"]), int(one["episode"]), str(one["reason"]))
            for one in listed
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{file}' is not readable ({error}), so the run's episodes are unknown; restore it, or start a new run"
        ) from error
