"""Few bytes that ask for much end in one line, soon and in little memory."""

import json
import shutil
from pathlib import Path

import pytest
from measured import measured

MOST_BYTES = 320 << 20
"""Limit for a command that fails while it reads its input; its libraries take up to 180 MB."""


@pytest.fixture
def base(small_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_base, tmp_path / "base"))


def rejected(*words: object, message: str) -> None:
    """The command ends with one line that holds the text, in bounded memory."""
    found = measured("train", *words)
    assert (found.code, found.printed.count("\n")) == (2, 1), found.printed
    assert message in found.printed
    assert found.peak_bytes < MOST_BYTES


def test_ranges_are_counted_before_they_are_expanded(tmp_path, dataset_v3):
    config = tmp_path / "config.yaml"
    config.write_text("dataset:\n  episodes: [" + ", ".join(["'0:1000000'"] * 100) + "]\n")
    rejected(f"--config_path={config}", f"--dataset.root={dataset_v3}", message="expected at most 1,000,000 items")
    nested = ", ".join(["'[0:1000000]'"] * 100)
    config.write_text(f"dataset:\n  episodes: [{nested}]\n")
    rejected(f"--config_path={config}", f"--dataset.root={dataset_v3}", message="expected at most 1,000,000 items")


def test_image_transforms_are_counted(tmp_path, dataset_v3):
    config = tmp_path / "config.json"
    one = {"type": "ColorJitter", "kwargs": {"brightness": [0.8, 1.2]}, "weight": 1.0}
    transforms = {"enable": True, "tfs": {f"t{number}": one for number in range(101)}}
    config.write_text(json.dumps({"dataset": {"image_transforms": transforms}}))
    rejected(f"--config_path={config}", f"--dataset.root={dataset_v3}", message="101 transforms, the maximum is 100")
    transforms["tfs"] = {f"t{number}": one for number in range(100_000)}
    config.write_text(json.dumps({"dataset": {"image_transforms": transforms}}))
    rejected(f"--config_path={config}", f"--dataset.root={dataset_v3}", message="1,048,576")


def test_sampling_steps_of_a_base_and_of_a_flag(base, dataset_v3, tmp_path):
    flags = [f"--dataset.root={dataset_v3}", f"--policy.path={base}", f"--output_dir={tmp_path / 'run'}"]
    rejected(*flags, "--policy.num_inference_steps=65536", message="--policy.num_inference_steps=65536")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_inference_steps": 65536}))
    rejected(*flags, message="num_inference_steps")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_long_added_token(base, dataset_v3, tmp_path, file):
    tokenizer = next(base.rglob("tokenizer.json")).parent
    content = json.loads((tokenizer / file).read_text())
    if file == "tokenizer.json":
        added = content["added_tokens"]
        added.append({**added[0], "id": max(one["id"] for one in added) + 1, "content": "x" * (1 << 20)})
    else:
        content["additional_special_tokens"] = ["x" * (1 << 20)]
    (tokenizer / file).write_text(json.dumps(content))
    flags = [f"--dataset.root={dataset_v3}", f"--policy.path={base}", f"--output_dir={tmp_path / 'run'}"]
    rejected(*flags, message="1,048,576")
