"""`--from_lerobot`: LeRobot's own config class, field by field, and what becomes of its files and commands."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from vlatune import cli
from vlatune.config import ImageTransformConfig, ImageTransformsConfig, RunConfig
from vlatune.flags import leaf_types, parse_flags
from vlatune.from_lerobot import REQUIRED, ROWS, translate

KNOWN = leaf_types(RunConfig)
COMMAND = "lerobot-train --policy.path=lerobot/pi05_base --policy.type=pi05 --dataset.repo_id=me/fold --dataset.root=/data/fold"

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
    from lerobot.optim.optimizers import AdamWConfig
    from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig
    from lerobot.policies.pi05 import PI05Config

    groups = {"optimizer": AdamWConfig, "scheduler": CosineDecayWithWarmupSchedulerConfig}
    names = [f"{group}.{one.name}" for group, cls in groups.items() for one in fields(cls)]
    assert [name for name in names if name not in ROWS] == []
    trained_with = [one.name for one in fields(PI05Config) if one.name.startswith(("optimizer_", "scheduler_"))]
    assert [name for name in trained_with if f"policy.{name}" not in ROWS] == []


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
        ("--policy.chunk_size=20", "policy.chunk_size=20: the base's config.json says it"),
        ("--resume=true", "resume=true: a run of LeRobot's cannot be continued"),
        ("--optimizer.type=sgd", "optimizer.type=sgd: AdamW is the only optimizer"),
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


def test_all_that_has_no_equivalent_is_named_at_once():
    with pytest.raises(ValueError, match=r"save_checkpoint=false.*; nor to policy.use_amp=true"):
        translate(f"{COMMAND} --save_checkpoint=false --policy.use_amp=true", KNOWN)


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
        return f"| {theirs} | {default} | `--{row.ours}` |"
    return f"| {theirs} | {default} | {'left out' if row.harmless else '**none**'}: {row.why} |"


def test_the_page_has_every_row():
    text = PAGE.read_text(encoding="utf-8")
    missing = [page_row(name) for name in ROWS if page_row(name) not in text]
    assert missing == [], "docs/from_lerobot.md lacks:\n" + "\n".join(missing)
