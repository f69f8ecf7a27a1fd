"""Config -> the data and policy of a run, checked on the driver before Ray starts. No torch, no Ray.

Everything that can be wrong without opening a video is found here: dataset, cameras, widths, statistics,
tokenizer, batch against dataset.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.config import RunConfig
from vlatune.console import progress_bar, warn
from vlatune.dataset.features import camera_spec, vector_spec, with_names
from vlatune.dataset.health.bad_episodes import (
    BadEpisode,
    check_first,
    find_bad_episodes,
    leave_out,
    without,
)
from vlatune.dataset.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.dataset.order.partition import Selection, drop_last_frames, hold_out, hold_out_each, select_episodes
from vlatune.dataset.order.sample_order import Mixture, OrderSpec, check_order, choose_lanes
from vlatune.dataset.reader import CameraSpec, ReadSpec, augmented, from_features
from vlatune.dataset.storage.feature_files import FeatureRow, features_root
from vlatune.dataset.storage.remote_fs import parse_storage_options
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.resize import Letterbox, letterbox_box
from vlatune.files import read_json, write_json
from vlatune.pipeline.augmentation import Augment, make_augment
from vlatune.pipeline.loss_groups import LossGroups, WithLossGroups, make_loss_groups
from vlatune.pipeline.plan import DataPlan
from vlatune.pipeline.transforms import Transform
from vlatune.policies.base import Binding, Draw, ModuleOptions, PolicyAdapter, PolicySpec, read_policy, require_kept
from vlatune.policies.base_folder import resolve_folder
from vlatune.policies.binding import bind, differ, join_bindings, mix_bindings, why_one_robot
from vlatune.policies.normalisation import run_stats
from vlatune.policies.registry import get_adapter, get_policy
from vlatune.report.run_folder import CONFIG_FILE, SKIPPED_FILE


@dataclass(frozen=True)
class Setup:
    """Plain values; sent to every worker."""

    metas: tuple[DatasetMeta, ...]
    training: Selection
    held_out: Selection
    specs: tuple[ReadSpec, ...]
    adapter: PolicyAdapter[Any]
    policy: PolicySpec
    binding: Binding
    stats: Mapping[str, Mapping[str, np.ndarray]]
    order: OrderSpec
    batch_size: int
    """Of one worker and micro-step."""
    skipped: tuple[BadEpisode, ...] = ()
    """Episodes that were asked for and are left out (--dataset.on_bad_episode=skip)."""
    flow_samples: int = 1
    """Noise and time draws per observation in training; evaluation takes one."""
    augment: Augment | None = None
    """What the user asks for beside the policy's own augmentation (--dataset.image_transforms)."""
    kept: FeatureRow | None = None
    """What training reads in place of pictures (--policy.keep_features); evaluation looks at pictures."""
    features: Root | None = None
    """Where it is kept."""

    def training_transforms(self) -> tuple[Transform, ...]:
        own = self.adapter.training_transforms(self.policy, self.binding, self.stats, self._training_draw())
        return own if self.augment is None else (self.augment, *own)

    def eval_transforms(self, seed: int) -> tuple[Transform, ...]:
        """One draw per observation, whatever training takes, and the same one each time."""
        return self.adapter.make_transforms(self.policy, self.binding, self.stats, Draw(seed, by_frame=True))

    def training_specs(self) -> tuple[ReadSpec, ...]:
        """With what the policy does to pictures before they are resized; evaluation reads by `specs`."""
        if self.kept and self.features:
            return from_features(self.specs, self.features, self.kept)
        return augmented(self.specs, self.adapter.augment_pictures(self.policy, self._training_draw()))

    @cached_property
    def data_plan(self) -> DataPlan:
        """What the workers' feeds read: made once, on the driver, and sent to every worker with the rest."""
        transforms = (WithLossGroups(self.loss_groups, self.training_transforms()),)
        return DataPlan(self.metas, self.training, self.training_specs(), self.order, transforms, self.batch_size)

    @cached_property
    def loss_groups(self) -> LossGroups:
        """Whose losses are told apart."""
        return make_loss_groups(
            [meta.tasks for meta in self.metas],
            [len(meta.episodes) for meta in self.metas],
            dims=self.binding.action_dim,
            robots=len(self.binding.parts),
        )

    def from_pictures(self) -> "Setup":
        """The same run, looking at pictures itself."""
        return replace(self, kept=None, features=None)

    def with_lanes(self, lanes: int) -> "Setup":
        """Their number stays with a run: one that goes on has its checkpoint's."""
        if lanes == self.order.lanes:
            return self
        order = replace(self.order, lanes=lanes)
        check_order(order)
        return replace(self, order=order)

    def _training_draw(self) -> Draw:
        return Draw(self.order.seed, self.flow_samples)


type Usable = tuple[Selection, tuple[BadEpisode, ...]]
"""The episodes that are asked for and can be read, and those that cannot and are left out."""


def make_setup(
    config: RunConfig,
    metas: tuple[DatasetMeta, ...] | None = None,
    *,
    preflight: bool = False,
    usable: Usable | None = None,
) -> Setup:
    """Read what the config names, once for a start; `metas` are its datasets', where they are read already.

    `preflight` also looks whether the datasets' files are there and, of the first episode, what they should be. `usable`
    is given where the episodes were looked at before.
    """
    metas = load_metas(config) if metas is None else metas
    adapter: PolicyAdapter[Any] = get_adapter(config.policy.type)
    folder = resolve_folder(base_path(config), config.policy.revision)
    policy = read_policy(adapter, folder, get_policy(config.policy.type), config.policy.overrides)
    bindings = [bind(policy, meta, meta.names) for meta in metas]
    binding = join_roots(config, adapter, policy, metas, bindings)
    specs = read_specs(config, metas, policy, bindings, binding)
    selected, skipped = usable or _usable_episodes(config, metas, specs, preflight=preflight)
    metas = without(metas, skipped)
    each = hold_out_each if binding.parts else hold_out
    training, held_out = each(selected, config.dataset.eval_split, config.seed)
    training = drop_last_frames(training, policy.drop_last_frames)
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
    stats, doubtful = run_stats(config.dataset, metas, policy, binding, against_rows=preflight)
    for text in doubtful if preflight else ():  # said once, though a run is set up several times
        warn(f"vlatune: warning: {text}")
    return Setup(
        metas=metas,
        training=training,
        held_out=held_out,
        specs=specs,
        adapter=adapter,
        policy=policy,
        binding=binding,
        stats=stats,
        order=order,
        batch_size=config.batch_size,
        skipped=skipped,
        flow_samples=config.policy.flow_samples,
        augment=_make_augment(config, metas, specs, policy, binding),
        kept=_make_kept(config, adapter, policy, specs) if config.policy.keep_features else None,
        features=features_root(config.run_dir, config.storage_path) if config.policy.keep_features else None,
    )


def _make_kept(
    config: RunConfig, adapter: PolicyAdapter[Any], policy: PolicySpec, specs: Sequence[ReadSpec]
) -> FeatureRow:
    """What is kept of a picture, if features can stand in for every picture of the run."""
    lacking = next(((spec, spec.absent[0]) for spec in specs if spec.absent), None)
    if lacking:
        spec, camera = lacking
        raise ValueError(
            f"--policy.keep_features=true: dataset '{spec.root.url}' has no camera '{camera.column}', which another has, and there is "
            f"nothing to keep of it; leave the flag out"
        )
    return require_kept(adapter, policy, get_policy(config.policy.type), ModuleOptions.of(config.policy))


def join_roots(
    config: RunConfig,
    adapter: PolicyAdapter[Any],
    policy: PolicySpec,
    metas: Sequence[DatasetMeta],
    bindings: Sequence[Binding],
) -> Binding:
    """Of one robot or of several."""
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
    """By size, every frame of all datasets comes once in an epoch."""
    weights = config.dataset.weight
    if not weights and num_datasets > 1:
        frames = np.bincount(training.dataset, weights=training.length, minlength=num_datasets)
        temperature = config.dataset.weight_temperature or 1.0
        weights = tuple(((frames / max(1.0, frames.max())) ** (1 / temperature)).tolist())
    return Mixture(tuple(training.dataset.tolist()), weights) if weights else None


def _make_augment(
    config: RunConfig, metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], policy: PolicySpec, binding: Binding
) -> Augment | None:
    """Of each dataset's pictures, only what lies inside the letterbox; openpi takes all of them."""
    transforms = config.dataset.image_transforms
    if not transforms.enable:
        return None
    boxes = {
        (number, camera.column): letterbox_box(
            meta.features[camera.name].height_width, (camera.height, camera.width), pad=policy.pad
        )
        if transforms.preset == "lerobot"
        else (0, 0, camera.height, camera.width)
        for number, (meta, spec) in enumerate(zip(metas, specs, strict=True))
        for camera in spec.cameras
    }
    return make_augment(transforms, config.seed, dict(binding.cameras), boxes)


def base_path(config: RunConfig) -> str:
    """The base model; one that was made in the run folder may have moved with it."""
    path = config.policy.path
    assert path is not None  # validate() has asked for it
    beside = config.run_dir / Path(path).name
    return str(beside) if Path(path).is_absolute() and not Path(path).exists() and beside.is_dir() else path


def load_metas(config: RunConfig) -> tuple[DatasetMeta, ...]:
    options = parse_storage_options(config.dataset.storage_options)
    metas = tuple(load_meta(Root(url, options), argument="--dataset.root") for url in dataset_roots(config))
    for meta in metas:
        check_complete(meta)
    return with_names(
        metas, config.rename_map, config.dataset.rename_map, what=("--rename_map", "--dataset.rename_map")
    )


def _usable_episodes(
    config: RunConfig, metas: tuple[DatasetMeta, ...], specs: tuple[ReadSpec, ...], *, preflight: bool
) -> tuple[Selection, tuple[BadEpisode, ...]]:
    selected = select_episodes(metas, config.dataset.episodes)
    if config.dataset.on_bad_episode == "skip":
        bad = _bad_episodes(config, metas, specs, selected)
        return leave_out(selected, metas, bad), bad
    if preflight:
        check_first(metas, specs, selected)
    return selected, ()


def dataset_roots(config: RunConfig) -> tuple[str, ...]:
    if config.dataset.root:
        return config.dataset.root
    from vlatune.dataset.storage.hub import fetch_dataset

    assert config.dataset.repo_id is not None  # validate() has asked for one of the two
    return (str(fetch_dataset(config.dataset.repo_id, config.dataset.revision)),)


def read_specs(
    config: RunConfig, metas: Sequence[DatasetMeta], policy: PolicySpec, bindings: Sequence[Binding], joint: Binding
) -> tuple[ReadSpec, ...]:
    """What is read of each dataset, under the names that they have in common."""
    return tuple(_read_spec(config, number, meta, policy, bindings[number], joint) for number, meta in enumerate(metas))


def _read_spec(
    config: RunConfig, number: int, meta: DatasetMeta, policy: PolicySpec, own: Binding, joint: Binding
) -> ReadSpec:
    """Columns have the same names for all datasets: those of the first one's cameras, and the policy's for the vectors."""
    called, seen = {target: name for name, target in joint.cameras}, _at_rate(config, meta, policy.observation_offsets)
    offsets, own_cameras = _at_rate(config, meta, policy.action_offsets), {target for _, target in own.cameras}
    state = vector_spec(meta, meta.own(STATE), is_float32=True, offsets=seen, called=STATE)
    action = vector_spec(meta, meta.own(ACTION), is_float32=True, offsets=offsets, called=ACTION)
    if joint.parts:
        state, action = replace(state, widened=joint.state_dim), replace(action, widened=joint.action_dim)
    return ReadSpec(
        root=meta.root,
        dataset_index=number,
        tolerance_s=config.dataset.tolerance_s,
        cameras=tuple(
            camera_spec(meta, name, policy.image_hw, seen, called=called[target], letterbox=Letterbox(policy.pad))
            for name, target in own.cameras
        ),
        vectors=(state, action),
        tasks=meta.tasks,
        absent=tuple(
            CameraSpec("", "absent", *policy.image_hw, seen, called=name)
            for name, target in joint.cameras
            if target not in own_cameras
        ),
    )


def _at_rate(config: RunConfig, meta: DatasetMeta, offsets: tuple[int, ...] | None) -> Any:
    """In the dataset's frames: as the policy has them, or the nearest to where they are at --dataset.action_fps."""
    rate = config.dataset.action_fps
    if rate is None or offsets is None:
        return offsets
    return tuple(math.floor(offset * meta.fps / rate + 0.5) for offset in offsets)


def _bad_episodes(
    config: RunConfig, metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], selection: Selection
) -> tuple[BadEpisode, ...]:
    """Those of the run folder where there are some, else what a check of the whole dataset finds.

    A run that goes on takes its list from the folder, even when the data was mended meanwhile: other episodes would be
    another order of samples.
    """
    if (config.run_dir / CONFIG_FILE).exists() and (config.run_dir / SKIPPED_FILE).exists():
        return read_skipped(config.run_dir)
    with progress_bar("files checked") as show:
        return find_bad_episodes(metas, specs, selection, on_file=show)


def write_skipped(run_dir: Path, bad: Sequence[BadEpisode]) -> None:
    """Write the list down, once."""
    if not (run_dir / SKIPPED_FILE).exists():
        write_json(run_dir / SKIPPED_FILE, {"skipped_episodes": [one.to_json() for one in bad]})


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
            f"'{file}' is not readable ({error}), so the run's episodes are not known; restore it, or begin a new run"
        ) from error
