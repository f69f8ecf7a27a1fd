"""Flags, config files and LeRobot configs: hostile content and secrets are rejected, and secrets are never printed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from unit.untrusted.conftest import CANARY
from unit.untrusted.damage import ESCAPE

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:can/ary-4f1d-must@bucket/x",
        f"https://{CANARY}@host/x",
        f"https://host/x?X-Amz-Signature={CANARY}",
        f"https://host/x?X-Goog-Signature={CANARY}",
        f"https://host/x?bearer={CANARY}",
        f"abfs://c@host/x?sv=1&sig={CANARY}",
    ],
)
def test_addresses_with_secrets_are_rejected(url, sandbox, vlatune) -> None:
    vlatune("inspect", url, code=2, mentions="a password, a token or a")
    vlatune("inspect", url, "--json=true", code=2, mentions="a password, a token or a")
    vlatune("train", *sandbox.train_flags(base=url), code=2, mentions="--policy.path")
    vlatune("train", *sandbox.train_flags(), f"--storage_path={url}", code=2, mentions="--storage_path")


@pytest.mark.parametrize("name", ["secret", "connection_string"])
def test_storage_options_with_secrets_are_rejected(name, sandbox, vlatune) -> None:
    flags = ["--dataset.root=s3://bucket/x", f"--policy.path={sandbox.base}"]
    options = json.dumps({name: CANARY})
    vlatune("train", *flags, f"--dataset.storage_options={options}", code=2, mentions=f"'{name}'")


def test_a_misspelt_flag_does_not_print_its_value(vlatune) -> None:
    vlatune("train", f"--dataset.rot=s3://a:{CANARY}@b/x", code=2, mentions="did you mean --dataset.root?")


@pytest.mark.parametrize("words", [("inspect", f"/no/{ESCAPE}"), (ESCAPE, "x"), ("train", f"--{ESCAPE}=1")])
def test_escapes_in_the_command_line(words, vlatune) -> None:
    vlatune(*words, code=2, mentions="?]0;owned?")


@pytest.mark.parametrize(
    ("content", "mention"),
    [
        ("!!python/object/apply:os.system ['mkdir code-ran']", "c.yaml"),
        (ALIASES, "unknown key a"),
        ("[" * 5000, "c.yaml"),
        ("a" * (17 << 20), "1,048,576"),
        ('"\\x1b]0;owned\\x07": 1\n', "?]0;owned?"),
        (f"token: {CANARY}\n", "token"),
        (f"steps: s3://a:{CANARY}@b\n", "steps"),
        (f'dataset:\n  root: ["s3://a:{CANARY}@b/x"]\n', "a password, a token or a"),
        (os.mkfifo, "is a FIFO"),
        (Path.mkdir, "c.yaml"),
        (lambda path: path.symlink_to("/dev/zero"), "c.yaml"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "special file",
)
def test_a_hostile_config_file(content, mention, sandbox, vlatune) -> None:
    config = sandbox.outside / "c.yaml"
    config.write_text(content) if isinstance(content, str) else content(config)
    flags = [f"--policy.path={sandbox.base}", f"--config_path={config}"]
    vlatune("train", *flags, code=2, mentions=mention)


@pytest.mark.parametrize(
    ("kind", "settings", "mention"),
    [
        ("os.system", {"command": [1]}, "'os.system'"),
        ("ColorJitter", {"__class__": [1]}, "__class__"),
        ("RandomAffine", {"degrees": [-1e999, 1e999]}, "RandomAffine"),
    ],
)
def test_augmentations_come_from_a_closed_list(kind, settings, mention, sandbox, vlatune) -> None:
    transforms = {"enable": True, "tfs": {"x": {"type": kind, "kwargs": settings}}}
    config = sandbox.folder / "c.json"
    config.write_text(json.dumps({"dataset": {"image_transforms": transforms}}))
    vlatune("train", *sandbox.train_flags(), f"--config_path={config}", code=2, mentions=mention)


def lerobot_config(**values: Any) -> str:
    """Return a train_config.json; `__` in a name separates levels."""
    content: dict[str, Any] = {"dataset": {"repo_id": "a/b"}, "policy": {"type": "pi05"}}
    for name, value in values.items():
        *path, last = name.split("__")
        here = content
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "mention"),
    [
        (os.mkfifo, "is a FIFO"),
        (lambda path: path.symlink_to("/dev/zero"), "outside of"),
        (" " * (17 << 20), "16,777,216"),
        ("[" * 100_000, "t.json"),
        ('{"dataset":' * 100 + "1" + "}" * 100, "depth of 65"),
        ('{"dataset": "x", "policy": {"type": "pi05"}}', "dataset"),
        (lerobot_config(policy__type="os.system"), "os.system"),
        (lerobot_config(policy__type=ESCAPE), "?]0;owned?"),
        (lerobot_config(**{ESCAPE: 1}), "?]0;owned?"),
        (lerobot_config(**{"\ud800": "\ud800"}), "no such field"),
        (lerobot_config(**{f"f{at}": 1 for at in range(200_000)}), "and 199,9"),
        (lerobot_config(**{"a." * 1_000_000: 1}), "no such field"),
        (lerobot_config(steps=10**400), "1000000000000000"),
        (lerobot_config(policy__path="a" * 100_000), "config.json"),
        (lerobot_config(dataset__root=f"s3://AKIA:{CANARY}@b/x", policy__path="x"), "a password"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "special file",
)
def test_a_hostile_lerobot_config(content, mention, sandbox, vlatune) -> None:
    config = sandbox.outside / "t.json"
    config.write_text(content) if isinstance(content, str) else content(config)
    vlatune("train", f"--from_lerobot={config}", code=2, mentions=mention)


def test_a_job_name_is_not_a_path(sandbox, vlatune) -> None:
    flags = [flag for flag in sandbox.train_flags() if "output_dir" not in flag]
    vlatune("train", *flags, "--job_name=../../x", code=2, mentions="--job_name=../../x")
