"""`vlatune export RUN DIR`: a checkpoint joined with its base into a folder that LeRobot loads.

    config.json  model.safetensors  policy_preprocessor.json  policy_postprocessor.json  *.safetensors (statistics)
    README.md (the model card)  *.png (its pictures)  tokenizer/ (where the base brings its own)  what else the policy carries along

Needs the checkpoint and the base, not the dataset. Written aside and renamed: DIR is whole or not there. With --push_to_hub
its files, and no others, are then one commit of a hub repository.

LeRobot finds a tokenizer by its name alone: a hub repository, or a path that it takes from the current folder, whatever
folder the policy is loaded from. So the full path is written, which holds until DIR is moved; README.md has the lines
for what comes then. What is pushed names its own repository, and has the tokenizer's files where LeRobot looks for them
there: beside config.json.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.local_store import share
from vlatune.checkpoint.model_card import CARD, PLOTS, CardFacts, make_card
from vlatune.checkpoint.policy_files import CONFIG, PREPROCESSOR, TOKENIZER_FOLDER, read_policy_files, rename_map
from vlatune.checkpoint.state_file import TrainState, read_state
from vlatune.checkpoint.store import choose, open_store
from vlatune.config import ExportConfig, RunConfig
from vlatune.dataset.storage.hub import open_repository, push, require_pushable
from vlatune.files import MAX_TOKENIZER_BYTES, read_file, read_json, sync, whole_folder
from vlatune.flags import config_from_dict
from vlatune.policies.base import Binding, ModuleOptions, PolicyAdapter, PolicySpec, read_policy, trained_tensors
from vlatune.policies.base_folder import base_weights, resolve_folder
from vlatune.policies.processors import is_hub_name
from vlatune.policies.registry import get_adapter, get_policy
from vlatune.report.run_folder import BESIDE, Run, read_config, read_run
from vlatune.report.run_places import BASE, STORAGE, only, places_of, require_trusted

TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece", "chat_template")
"""Beginnings of their names; a tokenizer may lie in one folder with a model."""
TOKENIZER_KINDS = (".json", ".txt", ".model", ".jinja")
"""And their ends: no code is carried along."""

WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True)
class Exported:
    folder: Path
    optimizer_step: int
    weights: str
    """`ema` or `trained`."""
    rename_map: dict[str, str]
    """The robot's camera names -> the policy's."""
    has_tokenizer: bool
    """The folder carries its own, and README.md says what that asks for."""
    dataset: int | None = None
    """Of several robots: whose folder it is."""
    pushed_to: str | None = None
    """Address of the hub repository that has it now."""


def export_run(run_dir: Path, folder: Path, options: ExportConfig, *, warn: Callable[[str], None]) -> Exported:
    """Write the folder; what is in the way, missing or damaged is refused before anything is written."""
    config, repository = read_config(run_dir), options.push_to_hub
    if repository is not None:
        require_pushable(repository)
    _check_target(folder)
    require_trusted(run_dir, only(places_of(config), [STORAGE]), trust_run=options.trust_run)
    store = open_store(run_dir, config.storage_path)
    step = choose(store, options.checkpoint, warn=warn)
    with store.opened(step) as checkpoint:
        plan = make_plan(run_dir, checkpoint, options)
        if repository is not None:
            open_repository(
                repository, private=options.hub_private
            )  # whether it may be written to is known before the work
        with whole_folder(folder) as aside:
            weights = write_weights(plan, aside)
            has_tokenizer = write_rest(plan, aside, folder.resolve())
            facts = CardFacts(
                repository=repository,
                config=_without_made_base(plan.config),
                run=_read_figures(run_dir, warn),
                optimizer_step=step,
                weights=weights,
                cameras=tuple(name for name, _ in plan.binding.cameras),
                rename_map=rename_map(plan.binding),
                adapter=options.adapter,
                has_tokenizer=has_tokenizer,
                dataset=options.dataset,
            )
            for name, data in make_card(facts).items():
                (aside / name).write_bytes(data)
            _keep(aside)
    address = None if repository is None else push(repository, listed_files(plan, folder), f"Optimizer step {step}")
    return Exported(folder, step, weights, rename_map(plan.binding), has_tokenizer, options.dataset, address)


def _without_made_base(config: RunConfig) -> RunConfig:
    """As the command had it: a base that the run made for itself was not named in it."""
    path = config.policy.path
    is_made = path is not None and Path(path).parent.name == config.run_dir.name and Path(path).name in BESIDE
    return replace(config, policy=replace(config.policy, path=None)) if is_made else config


def _read_figures(run_dir: Path, warn: Callable[[str], None]) -> Run:
    """For the card. Figures that are damaged are no reason to keep the weights from a robot."""
    try:
        return read_run(run_dir, [])
    except (ValueError, RuntimeError, OSError) as error:
        warn(f"vlatune: the model card has no figures of the run: {error}")
        return Run(run_dir.name)


@dataclass(frozen=True)
class Plan:
    """What goes into the folder, known and checked before the first byte is written."""

    checkpoint: Path
    config: RunConfig
    """Of the checkpoint."""
    adapter: PolicyAdapter[Any]
    spec: PolicySpec
    binding: Binding
    policy_files: Mapping[str, bytes]
    """Config, processors and statistics, checked."""
    options: ExportConfig


def make_plan(run_dir: Path, checkpoint: Path, options: ExportConfig) -> Plan:
    state = read_state(checkpoint)
    config = config_from_dict(RunConfig, state.config, f"checkpoint {checkpoint}")
    if options.base is None:
        require_trusted(run_dir, only(places_of(config), [BASE]), trust_run=options.trust_run)
    if options.adapter and config.policy.train != "lora":
        raise ValueError(
            f"--adapter=true: the run was trained with --policy.train={config.policy.train} and has no adapters; leave the flag out"
        )
    if options.adapter and options.push_to_hub and not is_hub_name(config.policy.path or ""):
        raise ValueError(
            f"--adapter=true with --push_to_hub: the adapters would name their base as '{config.policy.path}', which nobody else has; push all "
            f"weights (leave --adapter out)"
        )
    adapter: PolicyAdapter[Any] = get_adapter(config.policy.type)
    base, card = find_base(config, options.base, state), get_policy(config.policy.type)
    spec = read_policy(adapter, base, card, config.policy.overrides)
    binding = make_binding(state.binding)
    dataset = _chosen_dataset(options, binding, config.dataset.root)
    files = read_policy_files(checkpoint, adapter.schema, dataset=dataset)
    binding = binding if dataset is None else binding.parts[dataset]
    return Plan(checkpoint, config, adapter, spec, binding, files, options)


def listed_files(plan: Plan, folder: Path) -> dict[str, Path]:
    """Name -> file of an export; one that it would not have written is refused, wherever it came from."""
    known = {*WEIGHTS, CARD, *PLOTS, *plan.policy_files, *plan.adapter.carried_files}
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    strange = [
        name
        for name, path in found.items()
        if path.is_symlink() or not (name in known or _is_tokenizer_file(Path(name)))
    ]
    if strange:
        raise ValueError(
            f"'{folder}': {', '.join(strange)} is no file of an export, and nothing was pushed; remove DIR and give the command again "
            f"(what a policy needs beside its weights is named in its adapter's carried_files)"
        )
    return found


def _chosen_dataset(options: ExportConfig, binding: Binding, roots: Sequence[str]) -> int | None:
    """Of several robots one must be named; a folder has one robot's dims, cameras and statistics."""
    number, known = options.dataset, range(len(binding.parts))
    if not known:
        if number is not None:
            raise ValueError(f"--dataset={number}: the run was trained on one robot; leave the flag out")
        return None
    if number not in known:
        each = ", ".join(f"--dataset={one} for {root}" for one, root in zip(known, roots, strict=False))
        raise ValueError(
            f"{'--dataset is missing' if number is None else f'--dataset={number}'}: the run was trained on {len(known)} robots, and an "
            f"exported folder has the dims, cameras and statistics of one; choose it ({each}), and export once for each"
        )
    return number


def export_text(done: Exported) -> str:
    """What the person must know to use the folder."""
    lines = [f"{done.folder}: optimizer step {done.optimizer_step}, {done.weights} weights"]
    if done.dataset is not None:
        lines.append(
            f"it has the dims, cameras and statistics of dataset {done.dataset}; the run's other robots need a folder each"
        )
    if done.rename_map:
        lines.append(
            f"observations are renamed by its preprocessor; LeRobot's own programs put their flag in that place: --rename_map='{json.dumps(done.rename_map)}'"
        )
    if done.pushed_to is not None:
        lines.append(
            f"pushed to {done.pushed_to}; {done.folder} has the same files, and {CARD} in it is the model card"
        )
    elif done.has_tokenizer:
        lines.append(
            f"LeRobot finds its tokenizer where it is now; after moving the folder, load it with the two lines in {done.folder / CARD}"
        )
    return "\n".join(lines)


def find_base(config: RunConfig, given: str | None, state: TrainState) -> Path:
    """The base model's folder, if it is the one that the run was trained on."""
    path = given or config.policy.path
    assert path is not None  # the run could not have been trained
    folder = resolve_folder(path, config.policy.revision if given is None else None)
    if base_weights(folder) != state.fingerprints["base.weights"]:
        raise ValueError(
            f"base model '{folder}': its weights are not those that the run was trained on; give the right one with --base=FOLDER_OR_REPO"
        )
    return folder


def make_binding(stored: Mapping[str, Any]) -> Binding:
    raw = dict(stored)
    raw |= {key: tuple((ours, theirs) for ours, theirs in raw.get(key, ())) for key in ("cameras", "also")}
    raw |= {key: tuple(raw[key]) for key in ("missing_cameras", "action_names")}
    raw["parts"] = tuple(make_binding(part) for part in raw.get("parts", ()))
    return Binding(**raw)


def write_weights(plan: Plan, aside: Path) -> str:
    """The base's weights with what was trained in their place, or the adapters alone. Says which weights it took."""
    from vlatune.checkpoint.state import load_result, write_adapter

    policy = plan.config.policy
    options = replace(ModuleOptions.of(policy), compile=False, gradient_checkpointing=False)
    module: Any = plan.adapter.load_module(plan.spec, plan.binding, options)
    used = load_result(plan.checkpoint, trained_tensors(module), plan.options.weights)
    if plan.options.adapter:
        module.policy.config.save_pretrained(aside)
        write_adapter(module.policy, aside, policy)
    else:
        module.as_lerobot().save_pretrained(aside)
    return used


def write_rest(plan: Plan, aside: Path, folder: Path) -> bool:
    """Config and processors from the checkpoint, the rest and the tokenizer from the base; says whether there was one.

    `folder` is what `aside` will be.
    """
    known = read_json(aside, CONFIG).keys()  # LeRobot has written its own, and refuses other keys
    for name, data in plan.policy_files.items():
        (aside / name).write_bytes(data)
    config = read_json(aside, CONFIG)
    (aside / CONFIG).write_text(json.dumps({key: config[key] for key in config if key in known}, indent=2))
    if plan.options.adapter:
        from vlatune.checkpoint.state import mark_config

        mark_config(aside / CONFIG)
    for name in plan.adapter.carried_files:
        if (Path(plan.spec.folder) / name).exists():
            (aside / name).write_bytes(read_file(plan.spec.folder, name))
    repository = plan.options.push_to_hub
    if not _name_tokenizer(aside, repository or str(folder / TOKENIZER_FOLDER)):
        return False
    assert plan.spec.tokenizer_file is not None  # a processor names it
    _copy_tokenizer(Path(plan.spec.tokenizer_file), aside if repository else aside / TOKENIZER_FOLDER)
    return True


def _name_tokenizer(aside: Path, name: str) -> bool:
    """Name the folder's own tokenizer, by its full path or its repository; one of the hub stays named as it is, and is not copied."""
    processor = read_json(aside, PREPROCESSOR)
    settings = [step["config"] for step in processor["steps"] if (step.get("config") or {}).get("tokenizer_name")]
    own = [config for config in settings if not is_hub_name(config["tokenizer_name"])]
    for config in own:
        config["tokenizer_name"] = name
    (aside / PREPROCESSOR).write_text(json.dumps(processor, indent=2))
    return bool(own)


def _copy_tokenizer(tokenizer_file: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in tokenizer_file.parent.iterdir():
        if path.is_file() and _is_tokenizer_file(path):
            (target / path.name).write_bytes(read_file(path.parent, path.name, max_bytes=MAX_TOKENIZER_BYTES))


def _is_tokenizer_file(path: Path) -> bool:
    return path.name.startswith(TOKENIZER_FILES) and path.suffix in TOKENIZER_KINDS


def _check_target(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"'{folder}' exists and is not an empty folder; choose another DIR, or remove it")


def _keep(aside: Path) -> None:
    """Readable as its folder is, and through a power cut."""
    for path in (*aside.rglob("*"), aside):
        share(path)
        sync(path)
