"""`--from_lerobot`: LeRobot's own config class, field by field, and what becomes of its files and commands."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from vlatune import cli
from vlatune.config import ImageTransformConfig, ImageTransformsConfig, RunConfig
from vlatune.flags import leaf_types, parse_flags
from vlatune.from_lerobot import translate
from vlatune.lerobot_fields import OPTIMIZERS, REQUIRED, ROWS, WHO_TRAINS
from vlatune.policies.registry import get_policy, policy_types

KNOWN = leaf_types(RunConfig)
COMMAND = "lerobot-train --policy.path=lerobot/pi05_base --policy.type=pi05 --dataset.repo_id=me/fold --dataset.root=/data/fold"
ACT = "lerobot-train --policy.type=act --dataset.repo_id=me/fold"
DIFFUSION = "lerobot-train --policy.type=diffusion --dataset.repo_id=me/fold"

WHOLE = ("env", "policy", "reward_model", "optimizer", "scheduler", "sample_weighting", "dataset.image_transforms.tfs")
"""Groups that are one field here: of several classes, or under names of the user's."""


def config(text: str, *more: str) -> RunConfig:
    return parse_flags([f"--from_lerobot={text}", *more], RunConfig)


def lerobot_fields(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> default of every field of LeRobot's config, groups that may be absent included."""
    found: dict[str, Any] = {}
    for one in fields(cls):
        kinds = [kind for kind in (one.type, *get_args(one.type)) if is_dataclass(kind)]
        name = f"{prefix}{one.name}"
        if kinds and name not in WHOLE:
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
def test_every_policy_is_told_on_as_lerobot_has_it(kind):
    theirs, card = lerobot_policy(kind), get_policy(kind)
    trained_with = [one.name for one in fields(theirs) if one.name.startswith(("optimizer_", "scheduler_"))]
    assert [name for name in trained_with if f"policy.{name}" not in ROWS and name not in card.overrides] == []
    for name in (one.removeprefix("policy.") for one in WHO_TRAINS):
        assert card.frozen_fields.get(name, False) == getattr(theirs, name, False), name
    for name, (default, _) in card.new_model_fields.items():
        first, _, rest = name.partition(".")
        value = getattr(theirs, first)
        assert (value[rest].value if rest else value) == default, name


def test_optimizers_have_lerobots_defaults():
    from lerobot.optim import optimizers

    theirs = {"adamw": optimizers.AdamWConfig(), "adam": optimizers.AdamConfig()}
    assert {name: {one.name: getattr(it, one.name) for one in fields(it)} for name, it in theirs.items()} == OPTIMIZERS


def test_no_row_is_of_a_field_that_lerobot_does_not_have(theirs):
    ours = [
        name
        for name in ROWS
        if not name.endswith(".") and name.partition(".")[0] not in ("policy", "optimizer", "scheduler")
    ]
    assert [name for name in ours if name not in theirs and name != "peft"] == []


def test_a_command_is_the_same_run():
    found = config(
        f'{COMMAND} --steps=3000 --batch_size=4 --seed=7 --rename_map=\'{{"a": "b"}}\' --policy.dtype=bfloat16'
    )
    assert (found.policy.path, found.policy.dtype, found.policy.train) == ("lerobot/pi05_base", "bfloat16", "full")
    assert (found.steps, found.batch_size, found.seed, found.rename_map) == (3000, 4, 7, {"a": "b"})
    assert (found.dataset.root, found.dataset.repo_id, found.dataset.eval_split) == (("/data/fold",), None, 0.0)
    assert (found.log_freq, found.save_freq, found.job_name) == (200, 20_000, "pi05"), "LeRobot's defaults, not ours"


def test_as_people_type_it():
    """Launched on several GPUs, over several lines, with values apart from their names."""
    text = f"accelerate launch --multi_gpu --num_processes=4 $(which lerobot-train) \\\n  {COMMAND.partition(' ')[2]} \\\n --steps 500"
    found = config(text)
    assert (found.num_workers, found.steps) == (4, 500)


def test_augmentation_is_lerobots():
    assert not config(COMMAND).dataset.image_transforms.enable
    found = config(f"{COMMAND} --dataset.image_transforms.enable=true --dataset.image_transforms.random_order=true")
    assert found.dataset.image_transforms == ImageTransformsConfig(enable=True, random_order=True)


def test_our_flags_go_before_it():
    assert config(COMMAND, "--steps=9", "--policy.train=heads").policy.train == "heads"
    assert config(COMMAND, "--steps=9").steps == 9


def test_who_trains():
    assert config(f"{COMMAND} --policy.train_expert_only=true").policy.train == "expert"
    found = config(f"{COMMAND} --peft.method_type=LORA --peft.r=64").policy
    assert (found.train, found.lora_rank, found.lora_alpha) == ("lora", 64, 8.0)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--policy.max_action_dim=20", "policy.max_action_dim=20: the base's config.json says it"),
        ("--resume=true", "resume=true: a run of LeRobot's cannot be continued"),
        ("--use_policy_training_preset=false --optimizer.type=sgd", "optimizer.type=sgd: the optimizers are AdamW and"),
        ("--use_policy_training_preset=false", "use_policy_training_preset=false without an optimizer.type"),
        ("--env=pusht", "nothing is simulated"),
        ("--policy.freeze_vision_encoder=true", "the vision tower is frozen with the language model"),
        ("--stepz=3", "stepz: LeRobot has no such field; did you mean steps?"),
        ("--peft.target_modules=all-linear", "peft.target_modules=all-linear"),
        ("--job.target=a10g", "runs are not sent to HF Jobs"),
    ],
)
def test_what_has_no_equivalent_is_named(flag, why):
    with pytest.raises(ValueError, match="there is nothing equivalent to") as error:
        translate(f"{COMMAND} {flag}", KNOWN)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            DIFFUSION,
            "policy.pretrained_backbone_weights=ResNet18_Weights.IMAGENET1K_V1: a new Diffusion Policy has null",
        ),
        ("lerobot-train --policy.path=me/mine --dataset.repo_id=a/b", "add --policy.type=TYPE to it"),
        ("lerobot-train --dataset.repo_id=a/b", "a command without --policy.type and --policy.path"),
        ("lerobot-train --policy.type=groot --dataset.repo_id=a/b", "policy.type=groot: there are pi05"),
    ],
)
def test_a_policy_that_cannot_be_made_is_named(command, why):
    with pytest.raises(ValueError, match="there is nothing equivalent to") as error:
        translate(command, KNOWN)
    assert why in str(error.value)


def test_all_that_has_no_equivalent_is_named_at_once():
    with pytest.raises(ValueError, match=r"save_checkpoint=false.*; nor to policy.use_amp=true"):
        translate(f"{COMMAND} --save_checkpoint=false --policy.use_amp=true", KNOWN)


def test_fields_of_the_policy_that_a_run_may_set():
    assert config(f"{COMMAND} --policy.chunk_size=20 --policy.n_action_steps=10").policy.overrides == {
        "chunk_size": 20,
        "n_action_steps": 10,
    }
    with pytest.raises(ValueError, match=r"policy.chunk_sise=20: .*; did you mean policy.chunk_size\?"):
        translate(f"{COMMAND} --policy.chunk_sise=20", KNOWN)


def test_a_new_model_is_made_with_lerobots_defaults_and_what_was_given():
    found = config(f"{ACT} --policy.chunk_size=40 --policy.n_action_steps=40 --policy.optimizer_lr_backbone=2e-5")
    defaults = {name: one.default for name, one in get_policy("act").overrides.items()}
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
    with pytest.raises(ValueError, match=r"policy.scheduler_name=polynomial: of diffusers' schedules there are"):
        translate(f"{DIFFUSION} --policy.scheduler_name=polynomial", KNOWN)


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_a_train_config_of_a_new_model_is_the_same_run(kind, tmp_path):
    """As `lerobot-train` writes it, optimizer and schedule of its preset included."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig

    policy = lerobot_policy(kind)
    policy.pretrained_backbone_weights, policy.n_action_steps = None, 9
    made = TrainPipelineConfig(dataset=DatasetConfig(repo_id="me/fold"), policy=policy)
    made.optimizer, made.scheduler = policy.get_optimizer_preset(), policy.get_scheduler_preset()
    made._save_pretrained(tmp_path)
    found = config(str(tmp_path / "train_config.json"))
    assert {name: getattr(policy, name) for name in found.policy.overrides} == found.policy.overrides
    assert found.policy.overrides.keys() == get_policy(kind).overrides.keys()
    theirs = {one.name: getattr(made.optimizer, one.name) for one in fields(made.optimizer)}
    assert {name: getattr(found.optimizer, name) for name in theirs} == theirs
    assert found.optimizer.type == made.optimizer.type
    assert found.scheduler.type == ("none" if made.scheduler is None else made.scheduler.type)


def test_what_of_smolvla_trains():
    command = "lerobot-train --policy.path=lerobot/smolvla_base --dataset.repo_id=me/fold"
    found = config(command)
    assert (found.policy.type, found.policy.train) == ("smolvla", "expert"), "LeRobot's own defaults"
    language = config(f"{command} --policy.train_expert_only=false --policy.train_state_proj=false").policy
    assert (language.train, language.overrides) == ("language", {"train_state_proj": False})
    whole = f"{command} --policy.train_expert_only=false --policy.freeze_vision_encoder=false"
    assert config(whole).policy.train == "full"


def test_the_base_of_a_folder_says_type_presets_and_what_trains(tmp_path):
    base = {"type": "smolvla", "train_expert_only": False, "optimizer_lr": 3e-4, "chunk_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(base))
    found = config(f"lerobot-train --policy.path={tmp_path} --dataset.repo_id=me/fold")
    assert (found.policy.type, found.policy.train, found.optimizer.lr) == ("smolvla", "language", 3e-4)
    assert found.policy.overrides == {}, "the base has it"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"its config.json cannot be read"):
        translate(f"lerobot-train --policy.path={tmp_path} --dataset.repo_id=me/fold", KNOWN)


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


def test_what_lerobot_does_not_look_at_is_told(capsys):
    assert config(f"{COMMAND} --optimizer.lr=0.5").optimizer.lr == 2.5e-5
    assert "left out: optimizer.lr (use_policy_training_preset is on)" in capsys.readouterr().err
    config(f"{COMMAND} --eval_steps=10 --dataset.eval_split=0.1")
    assert "max_eval_samples (a validation looks at --eval_samples" in capsys.readouterr().err


def test_wandb_as_lerobot_names_it():
    found = config(f"{COMMAND} --wandb.enable=true --wandb.entity=lab --wandb.mode=offline").wandb
    assert (found.enable, found.project, found.entity, found.mode) == (True, "lerobot", "lab", "offline")


def test_what_changes_nothing_is_told(capsys):
    config(f"{COMMAND} --num_workers=8")
    said = capsys.readouterr().err
    assert "left out: num_workers" in said
    assert "training workers" in said


@pytest.fixture(scope="module")
def train_config(tmp_path_factory) -> Path:
    """What `lerobot-train` writes beside a checkpoint, by its own class."""
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


def test_a_train_config_is_the_same_run(train_config):
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


def test_a_command_may_name_the_file(train_config):
    assert config(f"lerobot-train --config_path={train_config} --steps=5").steps == 5


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nowhere.json", "not a train_config.json that can be read"),
        ("rm -rf /", "nor a command of lerobot-train"),
        ("lerobot-train --steps='5", "is no command of a shell (No closing quotation)"),
        ("accelerate launch --num_processes=many lerobot-train", "--num_processes=many: expected a whole number"),
    ],
)
def test_what_is_neither_is_refused(given, why, capsys):
    assert cli.main(["train", f"--from_lerobot={given}"]) == cli.MISUSED
    assert why in capsys.readouterr().err


def test_a_file_that_is_no_config_is_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    assert cli.main(["train", f"--from_lerobot={tmp_path / 'x.json'}"]) == cli.MISUSED
    assert "there is no 'dataset' in it" in capsys.readouterr().err


PAGE = Path(__file__).parents[1] / "docs" / "from_lerobot.md"


def page_row(name: str) -> str:
    """A line of the page's table, made from the code's."""
    row = ROWS[name]
    theirs = f"`{name}*`" if name.endswith(".") else f"`{name}`"
    default = "" if row.default is REQUIRED else f"`{json.dumps(row.default)}`"
    if row.ours is not None:
        choices = f" ({', '.join(f'`{one}`' for one in row.values)})" if row.values else ""
        return f"| {theirs} | {default} | `--{row.ours}`{choices} |"
    return f"| {theirs} | {default} | {'left out' if row.harmless else '**none**'}: {row.why} |"


def test_the_page_has_every_row():
    text = PAGE.read_text(encoding="utf-8")
    missing = [page_row(name) for name in ROWS if page_row(name) not in text]
    assert missing == [], "docs/from_lerobot.md lacks:\n" + "\n".join(missing)
