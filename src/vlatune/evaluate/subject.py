"""Open what is evaluated: a run's checkpoint or a LeRobot folder, on held-out or other episodes.

A run is set up on its held-out episodes as in training. Otherwise the policy's own files define
what it was trained on (dims, names, statistics), and the dataset is validated against them; neither
the training data nor statistics of the new dataset are needed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlatune.batch import ACTION, STATE
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.state_file import read_state
from vlatune.checkpoint.store import Store, choose, open_store
from vlatune.config.settings import DatasetConfig, EvalConfig, RunConfig
from vlatune.console import warn
from vlatune.data.features import SELECT_DIMS, dim_names, with_dims, with_names
from vlatune.data.health.timestamps import with_timestamps
from vlatune.data.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.data.order.partition import select_episodes
from vlatune.export.policy_files import POLICY_FOLDER, TrainedOn, read_trained_on
from vlatune.policies.base import Binding, ModuleOptions, PolicyAdapter, PolicySpec, SelectedDims, read_policy
from vlatune.policies.base_folder import read_steps, resolve_folder
from vlatune.policies.binding import bind
from vlatune.policies.processors import CONFIG
from vlatune.registry import get_adapter, get_policy_info, policy_types
from vlatune.run.external_paths import BASE, STORAGE, external_paths, only, require_allowed
from vlatune.run.run_folder import read_config
from vlatune.run_setup import Inputs, base_path, make_inputs, read_specs
from vlatune.storage.files import read_json
from vlatune.storage.paths import PRETRAINED_FOLDER
from vlatune.storage.remote_fs import parse_storage_options
from vlatune.storage.root import Root

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    setup: Inputs
    """Inputs whose held-out episodes are evaluated."""
    options: ModuleOptions
    load: Callable[[Tensors], tuple[str, str]]
    """Load the weights into the given tensors; return the checkpoint and `ema` or `trained`, or the
    folder and `stored` for a LeRobot folder."""
    is_held_out: bool
    """True if the run excluded the episodes from training."""
    action_fps: float | None
    """Rate of the compared actions; None for the frame rate of the recording."""


def open_subject(path: Path, options: EvalConfig, allowed: Collection[str] = ()) -> Subject:
    """Open a run or a LeRobot folder, with all checks that need neither weights nor videos."""
    if is_policy_folder(path):
        return _open_policy_folder(path, options)
    inside = path / PRETRAINED_FOLDER
    if is_policy_folder(inside):  # LeRobot checkpoint
        raise ValueError(f"'{path}' is not a run folder; to evaluate the policy in it, use `vlatune eval {inside}`")
    config = replace(read_config(path), output_dir=str(path))  # the folder may have been moved
    named = external_paths(config) if options.dataset.root is None else only(external_paths(config), [STORAGE, BASE])
    require_allowed(path, named, trust_run=options.trust_run, allowed=allowed)
    store = open_store(path, config.storage_path)
    step = choose(store, options.checkpoint or config.usual_checkpoint, warn=lambda text: warn(f"vlatune: {text}"))
    if options.dataset.root is None:
        setup = make_inputs(config)
        if len(setup.held_out) == 0:
            raise ValueError(
                f"run '{path}' has no held-out episodes; train with --dataset.eval_split above 0, or give another dataset with "
                f"--dataset.root"
            )
    else:
        setup = _on_other_data(path, config, store, step, options)
    read_state(store, step, setup.policy)
    module_options = replace(ModuleOptions.of(config.policy), flow_samples=1)

    def load(trainable: Tensors) -> tuple[str, str]:
        with store.opened(step) as folder:
            return folder_name(step), load_result(folder, trainable, options.weights)

    is_held_out, rate = options.dataset.root is None, config.dataset.action_fps
    return Subject(setup, module_options, load, is_held_out=is_held_out, action_fps=rate)


def is_policy_folder(folder: Path) -> bool:
    """True for a LeRobot policy folder: its config.json has a top-level `type`."""
    return (folder / CONFIG).is_file() and isinstance(read_json(folder, CONFIG).get("type"), str)


def _on_other_data(path: Path, config: RunConfig, store: Store, step: int, options: EvalConfig) -> Inputs:
    """Set up another dataset from what the checkpoint records about the training data."""
    adapter: PolicyAdapter[Any] = get_adapter(config.policy.type)
    folder = resolve_folder(base_path(config), config.policy.revision)
    policy = read_policy(adapter, folder, get_policy_info(config.policy.type), config.policy.overrides)
    binding = read_state(store, step, policy).binding
    if binding.parts:
        raise ValueError(
            f"--dataset.root={options.dataset.root}: run '{path}' was trained on several robots, each with its own statistics; "
            f"choose one with `vlatune export {path} DIR --dataset=N`, and evaluate DIR"
        )
    with store.opened(step) as checkpoint:
        trained = read_trained_on(checkpoint / POLICY_FOLDER, policy, adapter.schema)
    names: dict[str, str] = {}
    for one in (config.rename_map, *config.dataset.rename_map, trained.rename_map):
        names |= one
    trained = replace(trained, rename_map=names, action_names=binding.action_names, selected=binding.selected)
    return _make_inputs(config, options, adapter, policy, trained)


def _open_policy_folder(path: Path, options: EvalConfig) -> Subject:
    """Open a LeRobot folder; raise if its policy type is unknown or it requires custom code."""
    if options.dataset.root is None:
        raise ValueError(
            f"'{path}' is a policy folder; give the dataset to evaluate it on with --dataset.root=FOLDER_OR_URL"
        )
    if options.checkpoint or options.weights != "auto":
        raise ValueError(
            f"'{path}' is a policy folder with one set of weights; leave --checkpoint and --weights out, or give a run folder"
        )
    name = str(read_json(path, CONFIG)["type"])[:80]
    if name not in policy_types():
        raise ValueError(f"policy '{path}': unknown type '{name}'; supported are {', '.join(policy_types())}")
    adapter: PolicyAdapter[Any] = get_adapter(name)
    read_steps(path, adapter.schema)
    policy = adapter.read_spec(path.resolve())
    trained = read_trained_on(path, policy, adapter.schema)
    config = RunConfig(dataset=DatasetConfig(action_fps=trained.action_fps))
    setup = _make_inputs(config, options, adapter, policy, trained)
    module_options = ModuleOptions(train=next(iter(get_policy_info(policy.type).train_modes)))
    stored = (str(path), "stored")
    return Subject(setup, module_options, lambda _: stored, is_held_out=False, action_fps=trained.action_fps)


def _make_inputs(
    config: RunConfig, options: EvalConfig, adapter: PolicyAdapter[Any], policy: PolicySpec, trained: TrainedOn
) -> Inputs:
    """Set up all selected episodes for evaluation, with the policy's statistics."""
    data = options.dataset
    meta = _load(options, trained)
    binding = bind(policy, meta, meta.names)
    binding = replace(binding, is_relative=trained.is_relative[: binding.action_dim])
    _check_trained(meta, binding, trained)
    old = config.dataset
    only_this = DatasetConfig(root=(str(data.root),), tolerance_s=old.tolerance_s, action_fps=old.action_fps)
    selected = select_episodes([meta], data.episodes)
    specs = read_specs(replace(config, dataset=only_this), [meta], policy, [binding], binding)
    specs, doubtful = with_timestamps([meta], specs, selected, "auto")
    for text in doubtful:
        warn(f"vlatune: warning: {text}")
    return Inputs((meta,), specs, selected, adapter, policy, binding, trained.stats)


def _load(options: EvalConfig, trained: TrainedOn) -> DatasetMeta:
    """Load the dataset with the policy's feature names.

    The user's rename map has priority over the policy's. Dims are selected as the user asks, else
    as in training if the dataset has the recorded layout.
    """
    data = options.dataset
    meta = load_meta(Root(str(data.root), parse_storage_options(data.storage_options)), argument="--dataset.root")
    check_complete(meta)
    given = options.rename_map
    usable = {ours: name for ours, name in trained.rename_map.items() if ours in meta.features and ours not in given}
    taken = {*given.values(), *(name for name in meta.features if name not in given and name not in usable)}
    free = {ours: name for ours, name in usable.items() if name not in taken}
    (meta,) = with_names([meta], given, [free], what=("--rename_map", "the policy's rename map"))
    (meta,) = with_dims([meta], [data.select_dims], SELECT_DIMS)
    as_trained = {one.key: one.dims for one in trained.selected if _is_as_recorded(meta, one, trained)}
    return with_dims([meta], [as_trained], "the policy's selection of dims")[0]


def _is_as_recorded(meta: DatasetMeta, selected: SelectedDims, trained: TrainedOn) -> bool:
    """True if a vector has the layout from which the policy's dims were selected."""
    feature = meta.features.get(meta.own(selected.key))
    if feature is None or feature.dims is not None or feature.shape != (selected.recorded,):
        return False
    names = dim_names(feature)
    if selected.key != ACTION or names is None or trained.action_names is None:
        return True
    return tuple(names[dim] for dim in selected.dims) == trained.action_names


def _check_trained(meta: DatasetMeta, binding: Binding, trained: TrainedOn) -> None:
    """Raise if the dims differ from those the policy was trained on; warn if only names differ."""
    for key, dims in ((STATE, binding.state_dim), (ACTION, binding.action_dim)):
        wanted = trained.dims.get(key, dims)
        if dims != wanted:
            select = f", or its {wanted} dims with {SELECT_DIMS}" if dims > wanted else ""
            raise ValueError(
                f"dataset '{meta.root.url}': '{meta.own(key)}' has {dims} dims, the policy was trained on {wanted}; evaluate it on a "
                f"dataset of the same robot, or choose another feature with --rename_map{select}"
            )
    has_names = meta.features[meta.own(ACTION)].names is not None
    if has_names and trained.action_names not in (None, binding.action_names):
        assert trained.action_names is not None  # for the type checker
        warn(
            f"vlatune: warning: dataset '{meta.root.url}': the dims of '{meta.own(ACTION)}' are called {', '.join(binding.action_names)}, "
            f"but the policy was trained on {', '.join(trained.action_names)}; check that it is the same robot"
        )
