"""Flags, config files and recipes: values, priority, and messages about invalid ones."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.config.fields import field_help, leaf_types
from vlatune.config.flag_values import NULLS
from vlatune.config.flags import config_from_dict, flags_of, parse_command, parse_flags
from vlatune.config.help import help_text
from vlatune.config.settings import DoctorConfig, OptimizerConfig, RunConfig, to_json
from vlatune.registry import all_recipes


@dataclass(frozen=True)
class Inner:
    lr: float = 0.5
    """How
    fast."""
    count: int = 1


@dataclass(frozen=True)
class Outer:
    name: str
    """What it is called."""
    mode: Literal["slow", "fast"] = "slow"
    inner: Inner = field(default_factory=lambda: Inner(count=7))
    pair: tuple[float, float] = (0.1, 0.2)
    """Two numbers."""


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--steps=10"], "steps", 10),
        (["--steps", "10"], "steps", 10),
        (["--steps=10_000"], "steps", 10_000),
        (["--steps=010"], "steps", 10),
        (["--steps=1", "--steps=2"], "steps", 2),
        (["--optimizer.lr=1e-4"], "optimizer.lr", 1e-4),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.betas=[0.9, 0.999]"], "optimizer.betas", (0.9, 0.999)),
        (["--resume=true"], "resume", True),
        (["--resume"], "resume", True),
        (["--resume", "false"], "resume", False),
        (["--resume", "--steps=5"], "resume", True),
        (["--job_name=007"], "job_name", "007"),
        (["--job_name=no"], "job_name", "no"),
        (["--job_name=a=b"], "job_name", "a=b"),
        (["--output_dir=null"], "output_dir", None),
        (["--dataset.root=a"], "dataset.root", ("a",)),
        (["--dataset.root=a", "--dataset.root", "s3://b/c"], "dataset.root", ("a", "s3://b/c")),
        (["--dataset.root=[a,b]", "--dataset.root=c"], "dataset.root", ("a", "b", "c")),
        (["--dataset.episodes=[0,2]"], "dataset.episodes", (0, 2)),
        (["--dataset.episodes=3"], "dataset.episodes", (3,)),
        (["--dataset.episodes=0:3", "--dataset.episodes=7"], "dataset.episodes", (0, 1, 2, 7)),
        (["--dataset.episodes=[1:3, 7]"], "dataset.episodes", (1, 2, 7)),
        (["--dataset.episodes=null"], "dataset.episodes", None),
        (['--rename_map={"a.b": "c"}'], "rename_map", {"a.b": "c"}),
        (["--rename_map={}"], "rename_map", {}),
    ],
)
def test_a_flag_is_parsed_by_the_type_of_its_field(words: list[str], name: str, value: Any) -> None:
    found: Any = parse_flags(words, RunConfig)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batchsize=3"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["--batch-size=3"], "unknown flag --batch-size; did you mean --batch_size?"),
        (["--lr=3"], "unknown flag --lr; did you mean --optimizer.lr?"),
        (["--zzz"], "unknown flag --zzz"),
        (["--steps=many"], "--steps=many: expected a whole number"),
        (["--steps=1.5"], "--steps=1.5: expected a whole number"),
        (["--steps=true"], "--steps=true: expected a whole number"),
        (["--steps="], "--steps=: expected a whole number"),
        (["--steps"], "--steps: no value given; write --steps=VALUE"),
        (["--steps", "--resume"], "--steps: no value given; write --steps=VALUE"),
        (["--optimizer.lr=fast"], "--optimizer.lr=fast: expected a number, as 0.5 or 1e-4"),
        (["--optimizer.lr=nan"], "--optimizer.lr=nan: expected a number, as 0.5 or 1e-4"),
        (["--optimizer.betas=0.9"], "--optimizer.betas=0.9: expected a list of 2, as [FLOAT,FLOAT]"),
        (["--optimizer.betas=[1,2,3]"], "--optimizer.betas=[1,2,3]: expected a list of 2, as [FLOAT,FLOAT]"),
        (["--resume=yes"], "--resume=yes: expected true or false"),
        (["--dataset.episodes=[0,x]"], "--dataset.episodes=[0,x]: expected a whole number"),
        (
            ["--dataset.episodes=x", "--dataset.episodes=1"],
            "--dataset.episodes=x --dataset.episodes=1: expected a whole number",
        ),
        (["--dataset.episodes=5:3"], "--dataset.episodes=5:3: expected a range of 1 to"),
        (["--dataset.episodes=0:99999999"], "--dataset.episodes=0:99999999: expected a range"),
        (["--dataset.episodes=[0"], "--dataset.episodes=[0: expected a list, as [a,b]"),
        (["--rename_map=a:b"], '--rename_map=a:b: expected a mapping, as {"from": "to"}'),
        (["--rename_map={a: [1]}"], "--rename_map={a: [1]}: expected text"),
        (["extra"], "'extra' is not expected here; flags are written --name=value"),
        (["--recipe=tinny"], "unknown recipe 'tinny'; did you mean tiny? (there are tiny, "),
    ],
)
def test_an_invalid_flag_is_reported_with_its_value_and_what_is_expected(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_flags(words, RunConfig)
    assert str(caught.value).startswith(message)


def test_flags_override_the_file_which_overrides_the_recipe(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("recipe: tiny\nbatch_size: 5\noptimizer:\n  lr: 3e-4\nseed: 1\n")
    config = parse_flags([f"--config_path={file}", "--seed=2"], RunConfig)
    assert config.recipe == "tiny"
    assert config.policy.train == "full"  # the recipe's, over the default "expert"
    assert config.batch_size == 5  # the file's, over the recipe's 32
    assert config.seed == 2  # the flag's, over the file's
    assert config.optimizer == OptimizerConfig(lr=3e-4)  # one value of a group leaves the others as they are
    assert config.grad_accum == RunConfig().grad_accum
    other = parse_flags(["--recipe=pi05-heads", f"--config_path={file}"], RunConfig)
    assert (other.recipe, other.policy.train) == ("pi05-heads", "heads")  # the flag's recipe instead of the file's


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 3", "unknown key batchsize; did you mean batch_size?"),
        ("optimizer: {lrr: 3}", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("optimizer: 3", "optimizer must be a mapping of names to values"),
        ("- 3", "the file must be a mapping of names to values"),
        ("steps: many", "steps=many: expected a whole number"),
        ("steps: null", "steps=null: expected a whole number"),
        ("steps:", "steps=: expected a whole number"),
        ("job_name: [a]", "job_name=['a']: expected text"),
        ("dataset: {episodes: {}}", "dataset.episodes={}: expected a list, as [a,b]"),
        ("7: 8", "unknown key 7"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_file_and_key(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r".") as caught:
        parse_flags([f"--config_path={file}"], RunConfig)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_yaml_values_are_parsed_by_the_type_of_the_field(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "job_name: 007\noutput_dir: ~\nsteps: 010\nresume: true\noptimizer: {lr: 1e-4, betas: [0.8, 1e-1]}\n"
        "dataset:\n  episodes: 1:4\n  root: data\nrename_map: {a: no}\nscheduler:\n"
    )
    config = parse_flags([f"--config_path={file}", "--dataset.revision="], RunConfig)
    assert (config.job_name, config.output_dir, config.steps, config.resume) == ("007", None, 10, True)
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.8, 0.1))
    assert (config.dataset.episodes, config.dataset.root, config.dataset.revision) == ((1, 2, 3), ("data",), None)
    assert config.rename_map == {"a": "no"}


def test_an_unreadable_file_is_reported(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--config_path=.*none\.yaml: No such file or directory"):
        parse_flags([f"--config_path={tmp_path / 'none.yaml'}"], RunConfig)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"--config_path=.*broken\.json: not a YAML or JSON file: "):
        parse_flags([f"--config_path={broken}"], RunConfig)


def test_a_file_cannot_create_objects_or_long_messages(tmp_path) -> None:
    """Files are untrusted: no tags that name Python types, and nested aliases stay short in the message."""
    tagged = tmp_path / "tagged.yaml"
    tagged.write_text("steps: !!python/object/apply:os.getpid []")
    with pytest.raises(ValueError, match="expected a whole number"):
        parse_flags([f"--config_path={tagged}"], RunConfig)
    bomb = tmp_path / "bomb.yaml"
    levels = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    bomb.write_text("rename_map: {x: &a0 [1]" + "".join(f", x{i}: {level}" for i, level in enumerate(levels)) + "}")
    with pytest.raises(ValueError, match="expected text") as caught:
        parse_flags([f"--config_path={bomb}"], RunConfig)
    assert len(str(caught.value)) < 1000


def test_operands_may_stand_before_and_after_flags() -> None:
    assert parse_command(["a", "--name=x"], Outer, operands=("RUN",)) == (Outer("x"), ["a"])
    assert parse_command(["--name", "x", "a"], Outer, operands=("RUN",)) == (Outer("x"), ["a"])
    with pytest.raises(ValueError, match="RUN is missing"):
        parse_command(["--name", "x"], Outer, operands=("RUN",))


def test_any_frozen_dataclass_is_a_config() -> None:
    built = parse_flags(["--name=x", "--mode=fast", "--inner.lr=1"], Outer)
    assert built == Outer("x", mode="fast", inner=Inner(lr=1.0, count=7))  # count: the outer class's own default
    with pytest.raises(ValueError, match="--name is missing"):
        parse_flags([], Outer)
    with pytest.raises(ValueError, match="--mode=quick: expected one of slow, fast"):
        parse_flags(["--name=x", "--mode=quick"], Outer)


def configs() -> st.SearchStrategy[RunConfig]:
    text = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).filter(
        lambda one: one not in NULLS and not one.lstrip().startswith("[")
    )
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(
        RunConfig,
        job_name=text,
        output_dir=st.none() | text,
        steps=st.integers(0, 2**62),
        resume=st.booleans(),
        rename_map=st.dictionaries(text, text, max_size=3),
        optimizer=st.builds(OptimizerConfig, lr=numbers, betas=st.tuples(numbers, numbers)),
        dataset=st.builds(
            type(RunConfig().dataset),
            root=st.lists(text, max_size=3).map(tuple),
            episodes=st.none() | st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
        ),
    )


@given(configs())
def test_a_config_can_be_saved_and_written_as_flags(config: RunConfig) -> None:
    assert config_from_dict(RunConfig, json.loads(json.dumps(to_json(config))), "config.json") == config
    assert parse_flags(flags_of(config), RunConfig) == config


def test_help_shows_type_text_and_default_of_every_flag(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert field_help(Inner) == {"lr": "How fast."}
    assert help_text(Outer).splitlines() == [
        "flags:",
        "  --name=TEXT                     What it is called. (required)",
        "  --mode=slow|fast                (default slow)",
        "  --pair=[FLOAT,FLOAT]            Two numbers. (default 0.1, 0.2)",
        "  --config_path=FILE              YAML or JSON file with the same names; flags",
        "                                  override it.",
        "",
        "inner:",
        "  --inner.lr=FLOAT                How fast. (default 0.5)",
        "  --inner.count=INT               (default 7)",
    ]
    text = help_text(DoctorConfig)
    assert max(map(len, text.splitlines())) <= 80
    for name in leaf_types(DoctorConfig):
        assert re.search(rf"  --{re.escape(name)}=\S+\s+[A-Z]", text), f"no help text under {name}"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        *([f"--recipe={name}"] for name in all_recipes()),
        ["--recipe=pi05-full", "--policy.gradient_checkpointing=false", "--policy.path=null", "--dataset.weight=0.5"],
        ["--policy.type=act", "--policy.chunk_size=20", "--policy.pretrained_backbone_weights=null"],
        ["--recipe=act-tiny", "--policy.dim_model=128"],
        ['--dataset.image_transforms.tfs={"dark": {"type": "GammaCorrection", "kwargs": {"gamma": [0.5, 2]}}}'],
        ["--recipe=act", "--policy.chunk_size=7", "--policy.n_action_steps=7"],
        ["--recipe=pi05-expert", "--policy.num_inference_steps=5"],
    ],
)
def test_flags_of_a_config_reproduce_it(argv: list[str]) -> None:
    config = parse_flags(argv, RunConfig)
    assert parse_flags(flags_of(config), RunConfig) == config


def test_range_of_workers_sets_both_numbers(tmp_path):
    config = parse_flags(["--num_workers=2:8"], RunConfig)
    assert (config.min_workers, config.num_workers, config.global_batch) == (2, 8, 8 * 8)
    assert parse_flags(flags_of(config), RunConfig) == config
    (tmp_path / "run.yaml").write_text("num_workers: 2:4\n")
    assert parse_flags([f"--config_path={tmp_path / 'run.yaml'}"], RunConfig).min_workers == 2


@pytest.mark.parametrize("workers", ["8:2", "0:2", "2:", ":2", "2:4:8", "a:b"])
def test_invalid_range_of_workers_is_a_usage_error(workers):
    with pytest.raises(ValueError, match=f"^--num_workers={workers}: expected MIN:MAX"):
        parse_flags([f"--num_workers={workers}"], RunConfig)
