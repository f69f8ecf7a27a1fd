"""`--from_lerobot`: the table against LeRobot's config classes, and translated files and commands."""

import json
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest

from vlatune import cli
from vlatune.config.flags import parse_flags
from vlatune.config.from_lerobot import translate
from vlatune.config.lerobot_fields import FROZEN, REQUIRED, ROWS
from vlatune.config.settings import ImageTransformConfig, RunConfig
from vlatune.registry import get_policy_info, policy_types

COMMAND = "lerobot-train --policy.path=lerobot/pi05_base --policy.type=pi05 --dataset.repo_id=me/fold --dataset.root=/data/fold"
ACT = "lerobot-train --policy.type=act --dataset.repo_id=me/fold"
SMOLVLA = "lerobot-train --policy.path=lerobot/smolvla_base --dataset.repo_id=me/fold"
DIFFUSION = "lerobot-train --policy.type=diffusion --dataset.repo_id=me/fold"
NO_PRESET = "--use_policy_training_preset=false"

SUMMARY = (
    "env",
    "policy",
    "reward_model",
    "optimizer",
    "scheduler",
    "sample_weighting",
    "dataset.image_transforms.tfs",
)
"""Groups that are one field here, because their classes or names vary."""


def config(text: str, *more: str) -> RunConfig:
    return parse_flags([f"--from_lerobot={text}", *more], RunConfig)


def lerobot_fields(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> default of every field of LeRobot's config, groups that may be absent included."""
    found: dict[str, Any] = {}
    for one in fields(cls):
        kinds = [kind for kind in (one.type, *get_args(one.type)) if is_dataclass(kind)]
        name = f"{prefix}{one.name}"
        if kinds and name not in SUMMARY:
            found |= lerobot_fields(kinds[0], f"{name}.")
        else:
            found[name] = one.default
    return found


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    from lerobot.configs.train import TrainPipelineConfig

    return lerobot_fields(TrainPipelineConfig)


def has_row(name: str) -> bool:
    parts = name.split(".")
    return name in ROWS or any(".".join(parts[:number]) + "." in ROWS for number in range(1, len(parts)))


def test_every_field_of_lerobot_has_a_row(theirs):
    assert len(theirs) > 50
    assert [name for name in theirs if name != "policy" and not has_row(name)] == []


def test_defaults_are_lerobots_own(theirs):
    for name, row in ROWS.items():
        if name in theirs and row.default is not REQUIRED and not name.startswith("peft."):
            real = theirs[name]
            assert row.default == ({} if name == "rename_map" else real), name


def test_fields_of_optimizer_schedule_and_policy_have_rows():
    from lerobot.optim import optimizers, schedulers

    groups = {
        "optimizer": (optimizers.AdamWConfig, optimizers.AdamConfig),
        "scheduler": (
            schedulers.CosineDecayWithWarmupSchedulerConfig,
            schedulers.CosineAnnealingWithWarmupSchedulerConfig,
            schedulers.ConstantWithWarmupSchedulerConfig,
            schedulers.DiffuserSchedulerConfig,
        ),
    }
    names = [f"{group}.{one.name}" for group, kinds in groups.items() for cls in kinds for one in fields(cls)]
    assert [name for name in names if name not in ROWS] == []
    known = {f"scheduler.{name}": values for name in ("type", "name") if (values := ROWS[f"scheduler.{name}"].values)}
    assert {one.get_choice_name(one) for one in groups["scheduler"]} == set(known["scheduler.type"])


def lerobot_policy(kind: str) -> Any:
    from lerobot.policies.factory import make_policy_config

    return make_policy_config(kind, device="cpu", push_to_hub=False)


@pytest.mark.parametrize("kind", policy_types())
def test_policy_metadata_matches_lerobot(kind):
    theirs, info = lerobot_policy(kind), get_policy_info(kind)
    trained_with = [one.name for one in fields(theirs) if one.name.startswith(("optimizer_", "scheduler_"))]
    assert [name for name in trained_with if f"policy.{name}" not in ROWS and name not in info.option_defaults] == []
    for name in FROZEN:
        assert (name in info.frozen_fields) == getattr(theirs, name, False), name
    for name, (default, _) in info.new_model_fields.items():
        first, _, rest = name.partition(".")
        value = getattr(theirs, first)
        assert (value[rest].value if rest else value) == default, name


def test_every_row_is_a_field_of_lerobot(theirs):
    ours = [
        name
        for name in ROWS
        if not name.endswith(".") and name.partition(".")[0] not in ("policy", "optimizer", "scheduler")
    ]
    newer = ("ema.", "parallelism.", "accelerator.", "trackio.", "checkpoint_format", "dataset.exclude_episodes")
    assert [name for name in ours if name not in theirs and name != "peft" and not name.startswith(newer)] == []


@pytest.mark.parametrize(
    ("command", "values"),
    [
        (f"{COMMAND} --dataset.image_transforms.enable=true", {"dataset.image_transforms.enable": True}),
        (COMMAND, {"dataset.image_transforms.enable": False, "dataset.eval_split": 0.0, "policy.train": "full"}),
        (COMMAND, {"log_freq": 200, "save_freq": 20_000, "job_name": "pi05"}),  # LeRobot's defaults, not ours
        (COMMAND, {"policy.path": "lerobot/pi05_base", "dataset.root": ("/data/fold",), "dataset.repo_id": None}),
        (f"{COMMAND} --steps=30 --batch_size=4 --seed=7", {"steps": 30, "batch_size": 4, "seed": 7}),
        (f'{COMMAND} --rename_map=\'{{"a": "b"}}\'', {"rename_map": {"a": "b"}}),
        (
            f"{COMMAND} --policy.chunk_size=20 --policy.n_action_steps=10",
            {"policy.overrides": {"chunk_size": 20, "n_action_steps": 10}},
        ),
        (SMOLVLA, {"policy.type": "smolvla", "policy.train": "expert"}),  # LeRobot's own defaults
        (
            f"{SMOLVLA} --policy.train_expert_only=false --policy.train_state_proj=false",
            {"policy.train": "language", "policy.overrides": {"train_state_proj": False}},
        ),
        (
            f"{SMOLVLA} --policy.train_expert_only=false --policy.freeze_vision_encoder=false",
            {"policy.train": "full"},
        ),
        (f"{COMMAND} --wandb.enable=true --wandb.entity=lab", {"wandb.project": "lerobot", "wandb.entity": "lab"}),
        (f"{COMMAND} --dataset.eval_split=0.2 --eval_steps=10", {"dataset.hold_out": "last_of_task"}),
        (f"{COMMAND} --dataset.exclude_episodes=[1,2]", {"dataset.exclude_episodes": (1, 2)}),
        (f"{COMMAND} --policy.train_expert_only=true", {"policy.train": "expert"}),
        (f"{COMMAND} --peft.method_type=LORA --peft.r=64", {"policy.train": "lora", "policy.lora_rank": 64}),
        (
            f"accelerate launch --mixed_precision=bf16 --num_processes=4 $(which lerobot-train) \\\n {SMOLVLA[14:]} --steps 5",
            {"num_workers": 4, "policy.dtype": "bfloat16", "steps": 5},
        ),
        (
            f"accelerate launch --multi_gpu --num-processes 2 -m lerobot.scripts.lerobot_train {COMMAND[14:]}",
            {"num_workers": 2, "policy.dtype": None},
        ),
        (f"torchrun --nnodes=2 --nproc-per-node=8 {COMMAND}", {"num_workers": 16}),
        (f"accelerate launch --mixed_precision=no {COMMAND}", {"policy.dtype": None}),
        (f"accelerate launch --mixed_precision=bf16 {COMMAND} --policy.dtype=float32", {"policy.dtype": "float32"}),
    ],
)
def test_a_setting_of_the_command_is_translated(command, values):
    found = config(command)
    assert {name: attrgetter(name)(found) for name in values} == values


def test_our_flags_override_the_command():
    found = config(COMMAND, "--steps=9", "--policy.train=heads")
    assert (found.steps, found.policy.train) == (9, "heads")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"{COMMAND} --policy.max_action_dim=20", "policy.max_action_dim=20: set by the config.json of the base model"),
        (f"{COMMAND} --resume=true", "resume=true: LeRobot runs cannot be resumed"),
        (f"{COMMAND} {NO_PRESET} --optimizer.type=sgd", "optimizer.type=sgd: supported optimizers are"),
        (f"{COMMAND} {NO_PRESET}", "use_policy_training_preset=false: LeRobot requires an optimizer.type"),
        (f"{COMMAND} --policy.freeze_vision_encoder=true", "the vision tower is only frozen together with"),
        (f"{COMMAND} --stepz=3", "stepz: LeRobot has no such field; did you mean steps?"),
        (f"{COMMAND} --policy.chunk_sise=20", "did you mean policy.chunk_size?"),
        (f"{DIFFUSION} --policy.scheduler_name=polynomial", "policy.scheduler_name=polynomial: supported diffusers"),
        (DIFFUSION, "policy.pretrained_backbone_weights=ResNet18_Weights.IMAGENET1K_V1: must be null for a new"),
        ("lerobot-train --policy.path=me/mine --dataset.repo_id=a/b", "add --policy.type=TYPE"),
        ("lerobot-train --dataset.repo_id=a/b", "a command without --policy.type and --policy.path"),
        ("lerobot-train --policy.type=groot --dataset.repo_id=a/b", "policy.type=groot: must be one of pi05"),
        (f"accelerate launch --mixed_precision=bf16 {ACT}", "--mixed_precision=bf16: ACT computes in float32"),
        (f"accelerate launch --mixed_precision=fp16 {COMMAND}", "--mixed_precision=fp16: supported are bf16 and no"),
        (f"accelerate launch --config_file=a.yaml {COMMAND}", "--config_file=a.yaml: launcher files are not read"),
    ],
)
def test_settings_without_an_equivalent_are_named(command, why):
    with pytest.raises(ValueError, match="no equivalent for") as error:
        translate(command)
    assert why in str(error.value)


def test_all_fields_without_an_equivalent_are_named_at_once():
    with pytest.raises(ValueError, match=r"save_checkpoint=false.*; policy.use_amp=true"):
        translate(f"{COMMAND} --save_checkpoint=false --policy.use_amp=true")


def test_a_new_model_has_lerobots_defaults_and_the_given_values():
    found = config(f"{ACT} --policy.chunk_size=40 --policy.n_action_steps=40 --policy.optimizer_lr_backbone=2e-5")
    defaults = get_policy_info("act").option_defaults
    assert found.policy.overrides == defaults | {
        "chunk_size": 40,
        "n_action_steps": 40,
        "optimizer_lr_backbone": 2e-5,
    }
    assert (found.policy.train, found.optimizer.type, found.scheduler.type) == ("full", "adamw", "none")
    assert (found.optimizer.lr, found.optimizer.betas, found.optimizer.grad_clip_norm) == (1e-5, (0.9, 0.999), 10.0)
    random = config(f"{ACT} --policy.pretrained_backbone_weights=null")
    assert random.policy.overrides["pretrained_backbone_weights"] is None


def test_diffusion_with_its_optimizer_and_schedule():
    found = config(f"{DIFFUSION} --policy.pretrained_backbone_weights=null --policy.scheduler_warmup_steps=300")
    assert (found.optimizer.type, found.optimizer.betas, found.optimizer.weight_decay) == ("adam", (0.95, 0.999), 1e-6)
    assert (found.scheduler.type, found.scheduler.num_warmup_steps) == ("diffuser", 300)
    assert found.policy.overrides["use_group_norm"] is False, "LeRobot's default, not ours"
    constant = f"{DIFFUSION} --policy.pretrained_backbone_weights=null --policy.scheduler_name=constant_with_warmup"
    assert config(constant).scheduler.type == "constant_with_warmup"


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_a_train_config_of_a_new_model_gives_the_same_run(kind, tmp_path):
    """The file is written by `lerobot-train`, with optimizer and schedule of its preset."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig

    policy = lerobot_policy(kind)
    policy.pretrained_backbone_weights, policy.n_action_steps = None, 9
    made = TrainPipelineConfig(dataset=DatasetConfig(repo_id="me/fold"), policy=policy)
    made.optimizer, made.scheduler = policy.get_optimizer_preset(), policy.get_scheduler_preset()
    made._save_pretrained(tmp_path)
    found = config(str(tmp_path / "train_config.json"))
    assert {name: getattr(policy, name) for name in found.policy.overrides} == found.policy.overrides
    assert found.policy.overrides.keys() == get_policy_info(kind).option_defaults.keys()
    theirs = {one.name: getattr(made.optimizer, one.name) for one in fields(made.optimizer)}
    assert {name: getattr(found.optimizer, name) for name in theirs} == theirs
    assert found.optimizer.type == made.optimizer.type
    assert found.scheduler.type == ("none" if made.scheduler is None else made.scheduler.type)


def test_type_presets_and_mode_are_read_from_a_local_base(tmp_path):
    base = {"type": "smolvla", "train_expert_only": False, "optimizer_lr": 3e-4, "chunk_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(base))
    found = config(f"lerobot-train --policy.path={tmp_path} --dataset.repo_id=me/fold")
    assert (found.policy.type, found.policy.train, found.optimizer.lr) == ("smolvla", "language", 3e-4)
    assert found.policy.overrides == {}, "the base has it"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read config.json"):
        translate(f"lerobot-train --policy.path={tmp_path} --dataset.repo_id=me/fold")


def test_optimizer_and_schedule_without_the_preset():
    own = f"{COMMAND} --use_policy_training_preset=false --policy.optimizer_lr=9"
    found = config(
        f"{own} --optimizer.type=adam --optimizer.lr=1e-4 --scheduler.type=diffuser --scheduler.name=constant"
    )
    assert (found.optimizer.type, found.optimizer.lr, found.optimizer.weight_decay) == ("adam", 1e-4, 0.0)
    assert (found.optimizer.betas, found.optimizer.grad_clip_norm) == ((0.9, 0.999), 10.0)
    assert found.scheduler.type == "none"
    cosine = config(f"{own} --optimizer.type=adamw --scheduler.type=cosine_annealing_with_warmup")
    assert (cosine.optimizer.lr, cosine.scheduler.type) == (1e-3, "diffuser")


def test_ignored_settings_are_reported(capsys):
    launcher = "CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=hf_secret accelerate launch --main_process_port=29501 --use_fsdp"
    assert config(f"{launcher} {COMMAND} --optimizer.lr=0.5 --num_workers=8").optimizer.lr == 2.5e-5
    (line,) = capsys.readouterr().err.splitlines()
    ignored = "optimizer.lr, num_workers, --main_process_port, --use_fsdp, CUDA_VISIBLE_DEVICES, HF_TOKEN"
    assert line.endswith(f": {ignored}")


@pytest.fixture(scope="module")
def train_config(tmp_path_factory) -> Path:
    """Return the file that `lerobot-train` writes beside a checkpoint."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.pi05 import PI05Config
    from lerobot.transforms import ImageTransformConfig, ImageTransformsConfig

    policy = PI05Config(
        device="cpu", push_to_hub=False, train_expert_only=True, optimizer_lr=1e-4, gradient_checkpointing=True
    )
    policy.pretrained_path = Path("lerobot/pi05_base")
    made = TrainPipelineConfig(
        dataset=DatasetConfig(
            repo_id="me/fold",
            episodes=[0, 2],
            image_transforms=ImageTransformsConfig(
                enable=True,
                max_num_transforms=2,
                tfs={"dark": ImageTransformConfig(0.5, "GammaCorrection", {"gamma": (0.5, 2.0)})},
            ),
        ),
        policy=policy,
        steps=77,
        batch_size=3,
        job_name="fold",
    )
    made.optimizer, made.scheduler = policy.get_optimizer_preset(), policy.get_scheduler_preset()
    folder = tmp_path_factory.mktemp("lerobot")
    made._save_pretrained(folder)
    return folder / "train_config.json"


def test_a_train_config_gives_the_same_run(train_config):
    found = config(str(train_config))
    assert (found.policy.path, found.policy.train, found.policy.type) == ("lerobot/pi05_base", "expert", "pi05")
    assert (found.steps, found.batch_size, found.job_name) == (77, 3, "fold")
    assert (found.dataset.repo_id, found.dataset.episodes, found.dataset.root) == ("me/fold", (0, 2), ())
    assert (found.optimizer.lr, found.optimizer.grad_clip_norm) == (1e-4, 1.0)
    assert (found.scheduler.num_warmup_steps, found.scheduler.num_decay_steps) == (1000, 30_000)
    assert found.policy.gradient_checkpointing
    augmentation = found.dataset.image_transforms
    assert (augmentation.enable, augmentation.max_num_transforms, augmentation.random_order) == (True, 2, False)
    assert augmentation.tfs == {"dark": ImageTransformConfig(0.5, "GammaCorrection", {"gamma": (0.5, 2.0)})}


def test_a_command_may_contain_config_path(train_config):
    assert config(f"lerobot-train --config_path={train_config} --steps=5").steps == 5


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nowhere.json", "not a readable train_config.json"),
        ("rm -rf /", "nor a lerobot-train command"),
        ("lerobot-train --steps=5 && lerobot-train --steps=6", 'give one lerobot-train command: "&&"'),
        ("lerobot-train --steps=5; lerobot-train --steps=6", 'give one lerobot-train command: ";"'),
        ("lerobot-train --steps=5 | tee log", 'give one lerobot-train command: "|"'),
        ("lerobot-train --steps=5 > log", 'give one lerobot-train command: ">"'),
        ("cd /data\nlerobot-train --steps=5", 'give one lerobot-train command: "\\n"'),
        ("lerobot-train --steps=5 lerobot-train", "'lerobot-train' belongs to no flag"),
        ("lerobot-train --steps='5", "is not a shell command (No closing quotation)"),
        (f"accelerate launch --num_processes=many {COMMAND}", "--num_processes=many: expected a whole number"),
    ],
)
def test_anything_but_one_command_is_rejected(given, why, capsys):
    assert cli.main(["train", f"--from_lerobot={given}"]) == cli.MISUSED
    assert why in capsys.readouterr().err


@pytest.fixture
def newer_config(tmp_path) -> Path:
    """A train_config.json as LeRobot 0.7 writes it, as far as it differs from 0.6."""
    ema = {"enable": True, "decay": 0.99, "update_after_step": 0, "inv_gamma": 1.0, "power": 0.75, "use_for_eval": True}
    made = {
        "dataset": {"repo_id": "me/fold", "exclude_episodes": None, "eval_split": 0.0},
        "policy": {"type": "pi05", "pretrained_path": "lerobot/pi05_base", "dtype": "float32", "memory_frames": 6},
        "steps": 50,
        "checkpoint_format": "safetensors",
        "parallelism": {"dp_replicate": 4, "dp_shard": 1, "context_parallel": {"ring_degree": 1}, "cfg_parallel": 1},
        "accelerator": {
            "mixed_precision": "bf16",
            "gradient_accumulation": {"steps": 1},
            "fsdp": {"reshard_after_forward": True, "wrap_modules": None},
            "compile": {"enabled": False, "backend": "inductor", "mode": None, "regional": True},
            "activation_checkpointing": {"mode": "none"},
        },
        "ema": ema | {"min_decay": 0.0, "max_decay": 0.9999},
        "trackio": {"enable": False, "project": "lerobot"},
    }
    path = tmp_path / "train_config.json"
    path.write_text(json.dumps(made))
    return path


def test_a_train_config_of_lerobot_0_7_gives_the_same_run(newer_config):
    found = config(str(newer_config))
    assert (found.num_workers, found.policy.dtype, found.optimizer.ema_decay) == (4, "bfloat16", 0.99)
    assert found.steps == 50


@pytest.mark.parametrize(
    ("names", "value", "why"),
    [
        (("ema", "decay"), None, "ema.enable=true: only a constant decay"),
        (("ema", "update_after_step"), 10, "ema.update_after_step=10: the moving average starts with the first step"),
        (("parallelism", "dp_shard"), 8, "parallelism.dp_shard=8: use --num_workers with --fsdp=true"),
        (("parallelism", "cfg_parallel"), 2, "parallelism.cfg_parallel=2"),
        (("accelerator", "mixed_precision"), "fp16", "accelerator.mixed_precision=fp16: supported are bf16 and no"),
        (("accelerator", "gradient_accumulation", "steps"), 2, "LeRobot counts micro-batches as steps"),
        (("trackio", "enable"), True, "trackio.enable=true: Trackio is not supported"),
        (("policy", "use_visual_memory"), True, "policy.use_visual_memory=true: observation memory is not supported"),
        (("policy", "rtc_training_max_delay"), 5, "policy.rtc_training_max_delay=5"),
    ],
)
def test_fields_of_lerobot_0_7_without_an_equivalent_are_named(newer_config, names, value, why):
    made = json.loads(newer_config.read_text())
    inner = made
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    newer_config.write_text(json.dumps(made))
    with pytest.raises(ValueError, match="no equivalent for") as caught:
        translate(str(newer_config))
    assert why in str(caught.value)
