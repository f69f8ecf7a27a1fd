"""Config -> the data and policy of a run, checked on the driver before Ray starts. No torch, no Ray.

Everything that can be wrong without opening a video is found here: dataset, cameras, widths, statistics,
tokenizer, batch against dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.config import RunConfig
from vlatune.dataset.meta import DatasetMeta, load_meta
from vlatune.dataset.order import OrderSpec, check_order, choose_lanes
from vlatune.dataset.reader import CameraSpec, ReadSpec, VectorSpec
from vlatune.dataset.select import Selection, hold_out, select_episodes
from vlatune.dataset.stats import feature_stats
from vlatune.pipeline.transforms import Transform
from vlatune.policies.base import Binding, Draw, PolicyAdapter, PolicySpec, bind, stats_needed
from vlatune.policies.hub import resolve_folder
from vlatune.policies.registry import get_adapter


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

    def transforms(self, epoch: int) -> tuple[Transform, ...]:
        return make_transforms(self.adapter, self.policy, self.binding, self.stats, self.order.seed, epoch)

    def transforms_of_epoch(self):
        """Epoch -> transforms, without dragging the episode tables into every read task."""
        return partial(make_transforms, self.adapter, self.policy, self.binding, self.stats, self.order.seed)


def make_transforms(
    adapter: PolicyAdapter,
    policy: PolicySpec,
    binding: Binding,
    stats: Mapping[str, Mapping[str, np.ndarray]],
    seed: int,
    epoch: int,
) -> tuple[Transform, ...]:
    return adapter.make_transforms(policy, binding, stats, Draw(seed, epoch))


def make_setup(config: RunConfig, *, lanes: int | None = None) -> Setup:
    """Read what the config names. `lanes` comes from the checkpoint when a run goes on."""
    metas = tuple(load_meta(root) for root in dataset_roots(config))
    adapter = get_adapter(config.policy.type)
    assert config.policy.path is not None  # validate() has asked for it
    policy = adapter.read_spec(resolve_folder(config.policy.path, config.policy.revision))
    bindings = [bind(policy, meta, config.rename_map) for meta in metas]
    for meta, binding in zip(metas, bindings, strict=True):
        _check_alike(meta, binding, bindings[0])
    selected = select_episodes(metas, config.dataset.episodes)
    training, held_out = hold_out(selected, config.dataset.eval_split, config.seed)
    order = OrderSpec(
        lengths=tuple(training.length.tolist()),
        seed=config.seed,
        global_batch=config.global_batch,
        lanes=lanes or choose_lanes(config.global_batch, config.num_workers),
        run_length=config.dataset.run_length,
        window_rows=config.dataset.window_rows,
    )
    check_order(order)
    return Setup(
        metas=metas,
        training=training,
        held_out=held_out,
        specs=tuple(_read_spec(config, number, meta, policy, bindings[number]) for number, meta in enumerate(metas)),
        adapter=adapter,
        policy=policy,
        binding=bindings[0],
        stats={key: feature_stats(metas, key, names) for key, names in stats_needed(policy).items()},
        order=order,
    )


def dataset_roots(config: RunConfig) -> tuple[str, ...]:
    if config.dataset.root:
        return config.dataset.root
    from vlatune.policies.hub import fetch_dataset

    assert config.dataset.repo_id is not None  # validate() has asked for one of the two
    return (str(fetch_dataset(config.dataset.repo_id, config.dataset.revision)),)


def _read_spec(config: RunConfig, number: int, meta: DatasetMeta, policy: PolicySpec, binding: Binding) -> ReadSpec:
    height, width = policy.image_hw
    return ReadSpec(
        root=meta.root,
        dataset_index=number,
        tolerance_s=config.dataset.tolerance_s,
        cameras=tuple(CameraSpec(name, meta.features[name].dtype, height, width) for name, _ in binding.cameras),
        vectors=(
            VectorSpec(STATE, "float32", meta.features[STATE].shape),
            VectorSpec(ACTION, "float32", meta.features[ACTION].shape, tuple(range(policy.horizon))),
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
