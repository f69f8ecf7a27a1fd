"""`vlatune export RUN DIR`: merge a checkpoint and its base model into a folder LeRobot can load.

    config.json  model.safetensors  policy_preprocessor.json  policy_postprocessor.json
    *.safetensors (statistics)  README.md (model card)
    vlatune.json (names and dims of state and action, action rate; read by `vlatune eval`)
    tokenizer/ (if the base has its own)  files in the adapter's carried_files

Needs the checkpoint and the base model, not the dataset. DIR is written atomically. With
--push_to_hub, only these files are then pushed as one commit.

LeRobot resolves a tokenizer as a hub repository or a path relative to the current folder, not to
the policy's. So its absolute path is stored, until DIR is moved; README.md explains what to do
then. A pushed policy names its own repository, with the tokenizer files next to config.json, where
LeRobot looks for them.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.local_store import share
from vlatune.checkpoint.state_file import BASE_WEIGHTS, STATE, TrainState, read_state
from vlatune.checkpoint.store import choose, open_store
from vlatune.config.flags import config_from_dict
from vlatune.config.settings import ExportConfig, RunConfig
from vlatune.export.model_card import CARD, Exported, make_card
from vlatune.export.policy_files import (
    CONFIG,
    PREPROCESSOR,
    TOKENIZER_FOLDER,
    VLATUNE_FILE,
    make_record_file,
    read_policy_files,
    rename_map,
)
from vlatune.policies.base import (
    Binding,
    ModuleOptions,
    PolicyAdapter,
    PolicySpec,
    read_policy,
    trained_tensors,
)
from vlatune.policies.base_folder import base_weights, resolve_folder
from vlatune.policies.binding import check_stored
from vlatune.policies.processors import is_hub_name
from vlatune.registry import get_adapter, get_policy_info
from vlatune.run.external_paths import BASE, STORAGE, external_paths, only, require_allowed
from vlatune.run.run_folder import Run, read_config, read_run
from vlatune.storage.files import MAX_TOKENIZER_BYTES, atomic_folder, read_file, read_json, sync
from vlatune.storage.hub import open_repository, push, require_pushable

TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece", "chat_template")
"""Prefixes of tokenizer file names; a tokenizer may share a folder with a model."""
TOKENIZER_KINDS = (".json", ".txt", ".model", ".jinja")
"""Suffixes of tokenizer files; code is not copied."""


def export_run(
    run_dir: Path,
    folder: Path,
    options: ExportConfig,
    *,
    warn: Callable[[str], None],
    allowed: Collection[str] = (),
) -> Exported:
    """Write the folder; raise on conflicts and on damaged or missing inputs before writing.

    `allowed` are paths of the run's settings that the command line has named.
    """
    config, repository = read_config(run_dir), options.push_to_hub
    if repository is not None:
        require_pushable(repository)
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    if not is_empty_folder and (folder.exists() or folder.is_symlink()):
        raise ValueError(f"'{folder}' exists and is not an empty folder; choose another DIR, or remove it")
    require_allowed(run_dir, only(external_paths(config), [STORAGE]), trust_run=options.trust_run, allowed=allowed)
    store = open_store(run_dir, config.storage_path)
    step = choose(store, options.checkpoint or config.usual_checkpoint, warn=warn)
    with store.opened(step) as checkpoint:
        plan = make_plan(run_dir, checkpoint, read_state(store, step), options, allowed)
        if repository is not None:
            open_repository(repository, private=options.hub_private)  # check write access before the work
        with atomic_folder(folder) as temporary:
            weights = write_weights(plan, temporary)
            has_tokenizer = write_rest(plan, temporary, folder.resolve())
            done = Exported(
                folder=folder,
                repository=repository,
                config=plan.config,
                run=_read_results(run_dir, warn),
                optimizer_step=step,
                weights=weights,
                adapter=options.adapter,
                has_tokenizer=has_tokenizer,
                dataset=options.dataset,
                binding=plan.binding,
                loader=plan.adapter.loading_code(Path(plan.spec.folder)),
            )
            (temporary / CARD).write_bytes(make_card(done).encode())
            for path in (*temporary.rglob("*"), temporary):
                share(path)
                sync(path)
    if repository is not None:
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        return replace(done, repository=push(repository, files, f"Optimizer step {step}"))
    return done


def _read_results(run_dir: Path, warn: Callable[[str], None]) -> Run:
    """Read metrics for the model card; damaged ones do not prevent the export."""
    try:
        return read_run(run_dir, with_samples=False)
    except (ValueError, RuntimeError, OSError) as error:
        warn(f"vlatune: the model card lacks the run's results: {error}")
        return Run(run_dir.name)


@dataclass(frozen=True)
class Plan:
    """Validated content of the folder, determined before anything is written."""

    checkpoint: Path
    config: RunConfig
    """The checkpoint's config."""
    adapter: PolicyAdapter[Any]
    spec: PolicySpec
    binding: Binding
    policy_files: Mapping[str, bytes]
    """Validated config, processors and statistics."""
    options: ExportConfig


def make_plan(
    run_dir: Path, checkpoint: Path, state: TrainState, options: ExportConfig, allowed: Collection[str] = ()
) -> Plan:
    config = config_from_dict(RunConfig, state.config, f"checkpoint {checkpoint}")
    if options.base is None:
        require_allowed(run_dir, only(external_paths(config), [BASE]), trust_run=options.trust_run, allowed=allowed)
    if options.adapter and config.policy.train != "lora":
        raise ValueError(
            f"--adapter=true: the run was trained with --policy.train={config.policy.train} and has no adapters; leave the flag out"
        )
    if options.adapter and options.push_to_hub and not is_hub_name(config.policy.path or ""):
        raise ValueError(
            f"--adapter=true with --push_to_hub: the adapters would name their base as '{config.policy.path}', which exists only here; push all "
            f"weights (leave --adapter out)"
        )
    adapter: PolicyAdapter[Any] = get_adapter(config.policy.type)
    base = find_base(config, options.base, state)
    spec = read_policy(adapter, base, get_policy_info(config.policy.type), config.policy.overrides)
    check_stored(spec, state.binding, f"checkpoint {checkpoint}: {STATE}")
    dataset = _chosen_dataset(options, state.binding, config.dataset.root)
    files = read_policy_files(checkpoint, adapter.schema, dataset=dataset)
    binding = state.binding if dataset is None else state.binding.parts[dataset]
    return Plan(checkpoint, config, adapter, spec, binding, files, options)


def _chosen_dataset(options: ExportConfig, binding: Binding, roots: Sequence[str]) -> int | None:
    """Return the dataset to export; required with several robots, as a folder serves one."""
    number, known = options.dataset, range(len(binding.parts))
    if not known:
        if number is not None:
            raise ValueError(f"--dataset={number}: the run was trained on one robot; leave the flag out")
        return None
    if number not in known:
        each = ", ".join(f"{one}: {root}" for one, root in zip(known, roots, strict=False))
        raise ValueError(
            f"{'--dataset is missing' if number is None else f'--dataset={number}'}: the run was trained on {len(known)} robots, and an "
            f"exported folder has the dims, cameras and statistics of one; choose it with `vlatune export RUN DIR --dataset=N` ({each})"
        )
    return number


def export_text(done: Exported) -> str:
    """Return the summary that the command prints."""
    lines = [f"{done.folder}: optimizer step {done.optimizer_step}, {done.weights} weights"]
    if done.dataset is not None:
        lines.append(f"dims, cameras and statistics of dataset {done.dataset}; export once for each other robot")
    if names := rename_map(done.binding):
        lines.append(
            f"the preprocessor renames observations; LeRobot's programs need the flag --rename_map='{json.dumps(names)}'"
        )
    if (rate := done.config.dataset.action_fps) is not None:
        lines.append(f"{rate:.10g} actions per second: run it with --fps={rate:.10g}")
    if done.repository is not None:
        lines.append(f"pushed to {done.repository} with the model card {done.folder / CARD}")
    elif done.has_tokenizer:
        lines.append(
            f"LeRobot loads the tokenizer by its absolute path; after moving the folder, run the command in {done.folder / CARD}"
        )
    return "\n".join(lines)


def find_base(config: RunConfig, given: str | None, state: TrainState) -> Path:
    """Return the base model's folder; raise if it is not the one the run was trained on."""
    path = given or config.policy.path
    if path is None:
        raise ValueError("the checkpoint names no base model; give it with --base=FOLDER_OR_REPO")
    folder = resolve_folder(path, config.policy.revision if given is None else None)
    if base_weights(folder) != state.fingerprints[BASE_WEIGHTS]:
        raise ValueError(
            f"base model '{folder}': its weights differ from the base model of the run; give the right one with --base=FOLDER_OR_REPO"
        )
    return folder


def write_weights(plan: Plan, temporary: Path) -> str:
    """Write the merged weights, or only the adapters; return which weights were used."""
    from vlatune.checkpoint.state import load_result, write_adapter

    policy = plan.config.policy
    options = replace(ModuleOptions.of(policy), gradient_checkpointing=False)
    module: Any = plan.adapter.load_module(plan.spec, plan.binding, options)
    used = load_result(plan.checkpoint, trained_tensors(module), plan.options.weights)
    if plan.options.adapter:
        module.policy.config.save_pretrained(temporary)
        write_adapter(module.policy, temporary, policy)
    else:
        module.as_lerobot().save_pretrained(temporary)
    return used


def write_rest(plan: Plan, temporary: Path, folder: Path) -> bool:
    """Write config, processors and tokenizer; return whether the folder has a tokenizer.

    `folder` is the final path of `temporary`.
    """
    known = read_json(temporary, CONFIG).keys()  # LeRobot's keys: it rejects others
    record = make_record_file(plan.binding, plan.config.dataset.action_fps)
    for name, data in {**plan.policy_files, VLATUNE_FILE: record}.items():
        (temporary / name).write_bytes(data)
    config = read_json(temporary, CONFIG)
    (temporary / CONFIG).write_text(json.dumps({key: config[key] for key in config if key in known}, indent=2))
    if plan.options.adapter:
        from vlatune.checkpoint.state import mark_config

        mark_config(temporary / CONFIG)
    for name in plan.adapter.carried_files:
        if (Path(plan.spec.folder) / name).exists():
            (temporary / name).write_bytes(read_file(plan.spec.folder, name))
    repository = plan.options.push_to_hub
    if not _name_tokenizer(temporary, repository or str(folder / TOKENIZER_FOLDER)):
        return False
    assert plan.spec.tokenizer_file is not None  # a processor names it
    copy_tokenizer(Path(plan.spec.tokenizer_file), temporary if repository else temporary / TOKENIZER_FOLDER)
    return True


def copy_tokenizer(file: Path, target: Path) -> None:
    """Copy the tokenizer files beside `file` into a folder; code is not copied."""
    target.mkdir(exist_ok=True)
    for path in file.parent.iterdir():
        if path.is_file() and path.name.startswith(TOKENIZER_FILES) and path.suffix in TOKENIZER_KINDS:
            (target / path.name).write_bytes(read_file(path.parent, path.name, max_bytes=MAX_TOKENIZER_BYTES))


def _name_tokenizer(temporary: Path, name: str) -> bool:
    """Set the path or repository of the folder's tokenizer; hub tokenizers are not changed."""
    processor = read_json(temporary, PREPROCESSOR)
    settings = [step["config"] for step in processor["steps"] if (step.get("config") or {}).get("tokenizer_name")]
    own = [config for config in settings if not is_hub_name(config["tokenizer_name"])]
    for config in own:
        config["tokenizer_name"] = name
    (temporary / PREPROCESSOR).write_text(json.dumps(processor, indent=2))
    return bool(own)
