"""Config -> the data and policy of a run, checked on the driver before Ray starts. No torch, no Ray.

Everything that can be wrong without opening a video is found here: dataset, cameras, widths, statistics,
tokenizer, batch against dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.config import RunConfig
from vlatune.dataset.feature_specs import camera_spec, vector_spec
from vlatune.dataset.health import BadEpisode, check_first, leave_out, without
from vlatune.dataset.meta import DatasetMeta, check_complete, load_meta
from vlatune.dataset.mixture import Mixture
from vlatune.dataset.order import OrderSpec, check_order, choose_lanes
from vlatune.dataset.reader import ReadSpec
from vlatune.dataset.select import Selection, hold_out, select_episodes
from vlatune.dataset.stats import feature_stats
from vlatune.dataset.stats_check import check_stats
from vlatune.dataset.storage import Root
from vlatune.dataset.storage_options import parse_storage_options
from vlatune.outgoing import warn
from vlatune.pipeline.plan import DataPlan
from vlatune.pipeline.transforms import Transform
from vlatune.policies.base import Binding, Draw, PolicyAdapter, PolicySpec, bind, stats_needed
from vlatune.policies.hub import resolve_folder
from vlatune.policies.registry import get_adapter
from vlatune.train.skipping import bad_episodes


@dataclass(frozen=True)
class Setup:
    """Plain values; sent to every worker."""

    metas: tuple[DatasetMeta, ...]
    training: Selection
    held_out: Selection
    specs: tuple[ReadSpec, ...]
    adapter: PolicyAdapter
    policy: PolicySpec
    binding: Binding
    stats: Mapping[str, Mapping[str, np.ndarray]]
    order: OrderSpec
    skipped: tuple[BadEpisode, ...] = ()
    """Episodes that were asked for and are left out (--dataset.on_bad_episode=skip)."""
    flow_samples: int = 1
    """Noise and time draws per observation in training; evaluation takes one."""

    def training_transforms(self) -> tuple[Transform, ...]:
        return self._transforms(Draw(self.order.seed, self.flow_samples))

    def eval_transforms(self, seed: int) -> tuple[Transform, ...]:
        """One draw per observation, whatever training takes, and the same one each time."""
        return self._transforms(Draw(seed, by_frame=True))

    def data_plan(self, batch_size: int) -> DataPlan:
        """What the workers' feeds read."""
        return DataPlan(self.metas, self.training, self.specs, self.order, self.training_transforms(), batch_size)

    def _transforms(self, draw: Draw) -> tuple[Transform, ...]:
        return self.adapter.make_transforms(self.policy, self.binding, self.stats, draw)


def make_setup(config: RunConfig, *, lanes: int | None = None, preflight: bool = False) -> Setup:
    """Read what the config names. `lanes` comes from the checkpoint when a run goes on.

    `preflight` also looks whether the datasets' files are there and, of the first episode, what they should be.
    """
    metas = load_metas(config)
    adapter = get_adapter(config.policy.type)
    assert config.policy.path is not None  # validate() has asked for it
    policy = adapter.read_spec(resolve_folder(config.policy.path, config.policy.revision))
    bindings = [bind(policy, meta, config.rename_map) for meta in metas]
    for meta, binding in zip(metas, bindings, strict=True):
        _check_alike(meta, binding, bindings[0])
    specs = tuple(_read_spec(config, number, meta, policy, bindings[number]) for number, meta in enumerate(metas))
    selected, skipped = _usable_episodes(config, metas, specs, preflight=preflight)
    metas = without(metas, skipped)
    training, held_out = hold_out(selected, config.dataset.eval_split, config.seed)
    order = OrderSpec(
        lengths=tuple(training.length.tolist()),
        seed=config.seed,
        global_batch=config.global_batch,
        lanes=lanes or choose_lanes(config.global_batch, config.num_workers),
        run_length=config.dataset.run_length,
        window_rows=config.dataset.window_rows,
        mixture=Mixture(tuple(training.dataset.tolist()), config.dataset.weight) if config.dataset.weight else None,
        drop_last=config.dataset.drop_last,
    )
    check_order(order)
    stats = {key: feature_stats(metas, key, names) for key, names in stats_needed(policy).items()}
    warnings = _check_stats(metas, stats)
    if preflight:  # said once, though a run is set up several times
        for text in warnings:
            warn(f"vlatune: warning: {text}")
    return Setup(
        metas=metas,
        training=training,
        held_out=held_out,
        specs=specs,
        adapter=adapter,
        policy=policy,
        binding=bindings[0],
        stats=stats,
        order=order,
        skipped=skipped,
        flow_samples=config.policy.flow_samples,
    )


def _check_stats(metas: tuple[DatasetMeta, ...], stats: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[str, ...]:
    where = " and ".join(f"dataset '{meta.root.url}'" for meta in metas)
    checked = (check_stats(where, key, values, metas[0].features[key].names) for key, values in stats.items())
    return tuple(text for warnings in checked for text in warnings)


def load_metas(config: RunConfig) -> tuple[DatasetMeta, ...]:
    options = parse_storage_options(config.dataset.storage_options)
    metas = tuple(load_meta(Root(url, options), argument="--dataset.root") for url in dataset_roots(config))
    for meta in metas:
        check_complete(meta)
    return metas


def _usable_episodes(
    config: RunConfig, metas: tuple[DatasetMeta, ...], specs: tuple[ReadSpec, ...], *, preflight: bool
) -> tuple[Selection, tuple[BadEpisode, ...]]:
    selected = select_episodes(metas, config.dataset.episodes)
    if config.dataset.on_bad_episode == "skip":
        bad = bad_episodes(config, metas, specs, selected, anew=preflight)
        return leave_out(selected, metas, bad), bad
    if preflight:
        check_first(metas, specs, selected)
    return selected, ()


def dataset_roots(config: RunConfig) -> tuple[str, ...]:
    if config.dataset.root:
        return config.dataset.root
    from vlatune.policies.hub import fetch_dataset

    assert config.dataset.repo_id is not None  # validate() has asked for one of the two
    return (str(fetch_dataset(config.dataset.repo_id, config.dataset.revision)),)


def _read_spec(config: RunConfig, number: int, meta: DatasetMeta, policy: PolicySpec, binding: Binding) -> ReadSpec:
    return ReadSpec(
        root=meta.root,
        dataset_index=number,
        tolerance_s=config.dataset.tolerance_s,
        cameras=tuple(camera_spec(meta, name, policy.image_hw) for name, _ in binding.cameras),
        vectors=(
            vector_spec(meta, STATE, is_float32=True),
            vector_spec(meta, ACTION, is_float32=True, offsets=tuple(range(policy.horizon))),
        ),
        tasks=meta.tasks,
    )


def _check_alike(meta: DatasetMeta, binding: Binding, first: Binding) -> None:
    """Datasets that are trained together must deliver the same columns."""
    for what in ("state_dim", "action_dim", "missing_cameras"):
        if getattr(binding, what) != getattr(first, what):
            raise ValueError(
                f"dataset '{meta.root.url}': its {what} is {getattr(binding, what)}, the first dataset's is {getattr(first, what)}; "
                f"datasets that are trained together must agree"
            )
