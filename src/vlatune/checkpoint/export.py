"""`vlatune export RUN DIR`: a checkpoint joined with its base into a folder that LeRobot loads.

    config.json  model.safetensors  policy_preprocessor.json  policy_postprocessor.json  *.safetensors (statistics)
    tokenizer/ (where the base brings its own)  vlatune_size.json (only for models of odd size)

Needs the checkpoint and the base, not the dataset. Written aside and renamed: DIR is whole or not there.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.base_weights import base_weights
from vlatune.checkpoint.manifest import share
from vlatune.checkpoint.policy_files import CONFIG, PREPROCESSOR, TOKENIZER_FOLDER, read_policy_files, rename_map
from vlatune.checkpoint.state_file import TrainState, read_state
from vlatune.checkpoint.store import choose, open_store
from vlatune.config import ExportConfig, RunConfig
from vlatune.files import MAX_TOKENIZER_BYTES, read_file, read_json, sync
from vlatune.flags import config_from_dict
from vlatune.policies.base import Binding, ModuleOptions, PolicySpec
from vlatune.policies.hub import resolve_folder
from vlatune.policies.registry import get_adapter

TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece", "chat_template")
"""Beginnings of their names; a tokenizer may lie in one folder with a model."""
SIZE_FILE = "vlatune_size.json"
"""As policies/pi05_size.py names it; that module takes seconds to import."""


@dataclass(frozen=True)
class Exported:
    folder: Path
    optimizer_step: int
    weights: str
    """`ema` or `trained`."""
    rename_map: dict[str, str]
    """The robot's camera names -> the policy's."""
    has_tokenizer: bool
    """The folder carries its own."""


def export_run(run_dir: Path, folder: Path, options: ExportConfig, *, warn: Callable[[str], None]) -> Exported:
    """Write the folder; what is in the way, missing or damaged is refused before anything is written."""
    config = read_run_config(run_dir)
    _check_target(folder)
    store = open_store(run_dir, config.storage_path)
    step = choose(store, options.checkpoint, warn=warn)
    with store.opened(step) as checkpoint:
        plan = make_plan(checkpoint, options)
        with _aside(folder) as aside:
            weights = write_weights(plan, aside)
            has_tokenizer = write_rest(plan, aside)
    return Exported(folder, step, weights, rename_map(plan.binding), has_tokenizer)


@dataclass(frozen=True)
class Plan:
    """What goes into the folder, known and checked before the first byte is written."""

    checkpoint: Path
    config: RunConfig
    """Of the checkpoint."""
    spec: PolicySpec
    binding: Binding
    policy_files: Mapping[str, bytes]
    """Config, processors and statistics, checked."""
    options: ExportConfig


def make_plan(checkpoint: Path, options: ExportConfig) -> Plan:
    state = read_state(checkpoint)
    config = config_from_dict(RunConfig, state.config, f"checkpoint {checkpoint}")
    if options.adapter and config.policy.train != "lora":
        raise ValueError(
            f"--adapter=true: the run was trained with --policy.train={config.policy.train} and has no adapters; leave the flag out"
        )
    spec = get_adapter(config.policy.type).read_spec(find_base(config, options.base, state))
    return Plan(checkpoint, config, spec, make_binding(state.binding), read_policy_files(checkpoint), options)


def export_text(done: Exported) -> str:
    """What the person must know to use the folder."""
    lines = [f"{done.folder}: optimizer step {done.optimizer_step}, {done.weights} weights"]
    if done.rename_map:
        lines.append(
            f"cameras are renamed by its preprocessor; LeRobot's own programs put their flag in that place: --rename_map='{json.dumps(done.rename_map)}'"
        )
    if done.has_tokenizer:
        lines.append(
            f"its tokenizer lies beside it, and LeRobot looks for '{TOKENIZER_FOLDER}' from the current folder: run it from {done.folder}, "
            f"or override tokenizer_processor's tokenizer_name"
        )
    return "\n".join(lines)


def read_run_config(run_dir: Path) -> RunConfig:
    file = run_dir / "config.json"
    if not file.exists():
        raise ValueError(
            f"'{run_dir}' is not a run folder: there is no config.json in it; RUN is the --output_dir of a run"
        )
    return config_from_dict(RunConfig, read_json(run_dir, "config.json"), str(file))


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
    raw["cameras"] = tuple((ours, theirs) for ours, theirs in raw["cameras"])
    raw |= {key: tuple(raw[key]) for key in ("missing_cameras", "action_names")}
    return Binding(**raw)


def write_weights(plan: Plan, aside: Path) -> str:
    """The base's weights with what was trained in their place, or the adapters alone. Says which weights it took."""
    from vlatune.checkpoint.adapter import write_adapter
    from vlatune.checkpoint.state import load_result

    policy = plan.config.policy
    options = replace(ModuleOptions.of(policy), compile=False, gradient_checkpointing=False)
    module: Any = get_adapter(policy.type).load_module(plan.spec, plan.binding, options)
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    used = load_result(plan.checkpoint, trainable, plan.options.weights)
    if plan.options.adapter:
        write_adapter(module.policy, aside, policy)
    else:
        module.as_lerobot().save_pretrained(aside)
    return used


def write_rest(plan: Plan, aside: Path) -> bool:
    """Config and processors from the checkpoint, size and tokenizer from the base; says whether there was one."""
    for name, data in plan.policy_files.items():
        (aside / name).write_bytes(data)
    if plan.options.adapter:
        from vlatune.checkpoint.adapter import mark_config

        mark_config(aside / CONFIG)
    if (size := Path(plan.spec.folder) / SIZE_FILE).exists():
        (aside / SIZE_FILE).write_bytes(read_file(size.parent, SIZE_FILE))
    return _copy_tokenizer(plan.spec, aside)


def _copy_tokenizer(spec: PolicySpec, aside: Path) -> bool:
    """A tokenizer that lies in a folder comes along; one of the hub is named by the preprocessor, not copied."""
    steps = json.loads((aside / PREPROCESSOR).read_bytes())["steps"]
    if TOKENIZER_FOLDER not in [step.get("config", {}).get("tokenizer_name") for step in steps]:
        return False
    (aside / TOKENIZER_FOLDER).mkdir()
    for path in Path(spec.tokenizer_file).parent.iterdir():
        if path.is_file() and path.name.startswith(TOKENIZER_FILES):
            data = read_file(path.parent, path.name, max_bytes=MAX_TOKENIZER_BYTES)
            (aside / TOKENIZER_FOLDER / path.name).write_bytes(data)
    return True


def _check_target(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"'{folder}' exists and is not an empty folder; choose another DIR, or remove it")


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it at the end, and is gone if anything, Ctrl-C too, comes between."""
    aside = folder.with_name(f".{folder.name}.exporting")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            share(path)
            sync(path)
        aside.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
