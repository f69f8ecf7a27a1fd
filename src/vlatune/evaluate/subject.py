"""What is evaluated, and on which episodes: a run's checkpoints or a LeRobot folder, on held-out episodes or another dataset.

A run on its own held-out episodes is set up as training sets it up. Otherwise the policy's own files say what it was trained
on (dims, names, statistics: a checkpoint carries the very files that its export has), and the dataset is held against them:
neither the dataset that it was trained on nor statistics of the new one are needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlatune.batch import ACTION, STATE
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.policy_files import POLICY_FOLDER, TrainedOn, read_trained_on
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.state_file import read_state
from vlatune.checkpoint.store import Store, choose, open_store
from vlatune.config import DatasetConfig, EvalConfig, RunConfig
from vlatune.console import warn
from vlatune.dataset.features import with_names
from vlatune.dataset.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.dataset.order.partition import pick, select_episodes
from vlatune.dataset.order.sample_order import OrderSpec
from vlatune.dataset.storage.remote_fs import parse_storage_options
from vlatune.dataset.storage.root import Root
from vlatune.files import read_json
from vlatune.policies.base import Binding, ModuleOptions, PolicyAdapter, PolicySpec, read_policy
from vlatune.policies.base_folder import read_steps, resolve_folder
from vlatune.policies.binding import bind
from vlatune.policies.processors import CONFIG
from vlatune.policies.registry import get_adapter, get_policy, policy_types
from vlatune.report.run_folder import read_config
from vlatune.report.run_places import BASE, STORAGE, only, places_of, require_trusted
from vlatune.run_setup import Setup, base_path, make_setup, read_specs

Tensors = dict[str, torch.Tensor]
PRETRAINED_FOLDER = "pretrained_model"


@dataclass(frozen=True)
class Variant:
    """Weights that are in the module now."""

    checkpoint: str
    weights: str
    """`ema` or `trained`; of a LeRobot folder `stored`."""


@dataclass(frozen=True)
class Subject:
    setup: Setup
    """Its held-out episodes are those that are looked at."""
    options: ModuleOptions
    variants: Callable[[Tensors], Iterator[Variant]]
    """Puts one after the other into the tensors that a checkpoint holds; the first is the newest."""
    is_held_out: bool
    """Whether the episodes are those that the run has kept out of training."""


def open_subject(path: Path, options: EvalConfig) -> Subject:
    """Everything that can be wrong without a weight or a video is found here."""
    if is_policy_folder(path):
        return _of_folder(path, options)
    config = replace(_run_config(path), output_dir=str(path))  # the folder may have been moved
    named = places_of(config) if options.dataset.root is None else only(places_of(config), [STORAGE, BASE])
    require_trusted(path, named, trust_run=options.trust_run)
    store = open_store(path, config.storage_path)
    steps = wanted_steps(store, options.checkpoint)
    if options.dataset.root is None:
        setup = make_setup(config)
        if len(setup.held_out) == 0:
            raise ValueError(
                f"run '{path}' holds no episodes out; train with --dataset.eval_split above 0 to evaluate, or name another dataset "
                f"with --dataset.root"
            )
    else:
        setup = _on_other_data(path, config, store, steps[0], options)
    one_draw = replace(ModuleOptions.of(config.policy), flow_samples=1)
    kinds = ("ema", "trained") if options.weights == "both" else (options.weights,)

    def variants(trainable: Tensors) -> Iterator[Variant]:
        for step in steps:
            with store.opened(step) as folder:
                for wanted in kinds:
                    yield Variant(folder_name(step), load_result(folder, trainable, wanted))

    return Subject(setup, one_draw, variants, is_held_out=options.dataset.root is None)


def is_policy_folder(folder: Path) -> bool:
    """Whether it is a policy's in LeRobot's layout: its config.json names a type, that of a run has it under `policy`."""
    return (folder / CONFIG).is_file() and isinstance(read_json(folder, CONFIG).get("type"), str)


def wanted_steps(store: Store, names: Sequence[str]) -> list[int]:
    """The newest first: it gives the run's figures, the others stand beside it."""
    if "all" in names:
        names = [str(step) for step in store.steps()]
    steps = {choose(store, name, warn=lambda text: warn(f"vlatune: {text}")) for name in names or [None]}
    return sorted(steps, reverse=True)


def _run_config(path: Path) -> RunConfig:
    inside = path / PRETRAINED_FOLDER
    if is_policy_folder(inside):  # of a LeRobot checkpoint
        raise ValueError(
            f"'{path}' is not a run folder; the policy that is in it is evaluated with `vlatune eval {inside}`"
        )
    return read_config(path)


def _on_other_data(path: Path, config: RunConfig, store: Store, step: int, options: EvalConfig) -> Setup:
    """By what the checkpoint says of the run's own data."""
    adapter: PolicyAdapter[Any] = get_adapter(config.policy.type)
    folder = resolve_folder(base_path(config), config.policy.revision)
    policy = read_policy(adapter, folder, get_policy(config.policy.type), config.policy.overrides)
    with store.opened(step) as checkpoint:
        binding = read_state(checkpoint).binding
        _refuse_parts(path, binding, f"--dataset.root={options.dataset.root}")
        trained = read_trained_on(checkpoint / POLICY_FOLDER, policy, adapter.schema)
    maps, names = (config.rename_map, *config.dataset.rename_map, trained.rename_map), tuple(binding["action_names"])
    own = {ours: theirs for one in maps for ours, theirs in one.items()}
    return _make_setup(config, options, adapter, policy, replace(trained, rename_map=own, action_names=names))


def refuse_several_robots(path: Path, options: EvalConfig, flag: str) -> None:
    """Of a run: what `flag` asks for needs the statistics of one."""
    config = _run_config(path)
    require_trusted(path, only(places_of(config), [STORAGE]), trust_run=options.trust_run)
    store = open_store(path, config.storage_path)
    with store.opened(wanted_steps(store, ())[0]) as checkpoint:
        _refuse_parts(path, read_state(checkpoint).binding, flag)


def _refuse_parts(path: Path, binding: Mapping[str, Any], flag: str) -> None:
    if binding.get("parts"):
        raise ValueError(
            f"{flag}: run '{path}' was trained on several robots, each with its own statistics; choose one with `vlatune export {path} "
            f"DIR --dataset=N`, and evaluate DIR"
        )


def read_policy_folder(path: Path, options: EvalConfig) -> tuple[PolicyAdapter[Any], PolicySpec]:
    """What a LeRobot folder says, if it is of a policy that is known and nothing in it asks for code."""
    if options.checkpoint or options.weights != "auto":
        raise ValueError(
            f"'{path}' is a policy's folder, with one set of weights; leave --checkpoint and --weights out, or give a run's folder"
        )
    name = str(read_json(path, CONFIG)["type"])[:80]
    if name not in policy_types():
        raise ValueError(f"policy '{path}': its type '{name}' is not known; known are {', '.join(policy_types())}")
    adapter: PolicyAdapter[Any] = get_adapter(name)
    read_steps(path, adapter.schema)
    return adapter, adapter.read_spec(path.resolve())


def _of_folder(path: Path, options: EvalConfig) -> Subject:
    """Of a LeRobot folder, whoever trained it."""
    if options.dataset.root is None:
        raise ValueError(
            f"'{path}' is a policy's folder, which does not say what to evaluate it on; name a dataset with --dataset.root=FOLDER_OR_URL"
        )
    adapter, policy = read_policy_folder(path, options)
    trained = read_trained_on(path, policy, adapter.schema)
    setup = _make_setup(RunConfig(), options, adapter, policy, trained)
    way = ModuleOptions(train=next(iter(get_policy(policy.type).train_ways)))
    return Subject(setup, way, lambda _: iter([Variant(str(path), "stored")]), is_held_out=False)


def _make_setup(
    config: RunConfig, options: EvalConfig, adapter: PolicyAdapter[Any], policy: PolicySpec, trained: TrainedOn
) -> Setup:
    """As for training, but that all episodes are looked at and the statistics are the policy's."""
    data = options.dataset
    meta = _load(options, trained.rename_map)
    binding = bind(policy, meta, meta.names)
    _check_trained(meta, binding, trained)
    old = config.dataset
    only_this = DatasetConfig(root=(str(data.root),), tolerance_s=old.tolerance_s, action_fps=old.action_fps)
    selected = select_episodes([meta], data.episodes)
    none = pick(selected, selected.length < 0)
    return Setup(
        metas=(meta,),
        training=none,
        held_out=selected,
        specs=read_specs(replace(config, dataset=only_this), [meta], policy, [binding], binding),
        adapter=adapter,
        policy=policy,
        binding=binding,
        stats=trained.stats,
        order=OrderSpec(lengths=(), seed=0, global_batch=1, lanes=1, run_length=1, window_rows=1),
        batch_size=options.batch_size,
    )


def _load(options: EvalConfig, own: Mapping[str, str]) -> DatasetMeta:
    """The dataset under the policy's names: by the user's map, and by the policy's own where that says nothing."""
    data = options.dataset
    meta = load_meta(Root(str(data.root), parse_storage_options(data.storage_options)), argument="--dataset.root")
    check_complete(meta)
    given = options.rename_map
    usable = {ours: theirs for ours, theirs in own.items() if ours in meta.features and ours not in given}
    taken = {*given.values(), *(name for name in meta.features if name not in given and name not in usable)}
    free = {ours: theirs for ours, theirs in usable.items() if theirs not in taken}
    return with_names([meta], given, [free], what=("--rename_map", "the policy's own map of names"))[0]


def _check_trained(meta: DatasetMeta, binding: Binding, trained: TrainedOn) -> None:
    """Dims that the policy was not trained on are refused; other names of as many are said."""
    for key, dims in ((STATE, binding.state_dim), (ACTION, binding.action_dim)):
        wanted = trained.dims.get(key, dims)
        if dims != wanted:
            raise ValueError(
                f"dataset '{meta.root.url}': '{meta.own(key)}' has {dims} dims, the policy was trained on {wanted}; evaluate it on a "
                f"dataset of its own robot, or name another feature with --rename_map"
            )
    has_names = meta.features[meta.own(ACTION)].names is not None
    if has_names and trained.action_names not in (None, binding.action_names):
        assert trained.action_names is not None  # for the type checker
        warn(
            f"vlatune: warning: dataset '{meta.root.url}': the dims of '{meta.own(ACTION)}' are called {', '.join(binding.action_names)}; "
            f"those that the policy was trained on, {', '.join(trained.action_names)}: is it the same robot?"
        )
