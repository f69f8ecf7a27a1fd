"""A recording of 34 dims with nested names, the way a user goes: inspect, doctor, train, eval, export, and LeRobot loads it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exported import load_lerobot
from lerobot.configs import PreTrainedConfig
from safetensors.numpy import load_file
from wide_dataset import NAMES, make_wide

from vlatune import cli
from vlatune.batch import ACTION, STATE
from vlatune.data.meta.dataset_meta import load_meta

CHOSEN = {ACTION: ["right_gripper", 3, "7:10"], STATE: ["left_arm_0", "20:24"]}
DIMS = {ACTION: [33, 3, 7, 8, 9], STATE: [0, 20, 21, 22, 23]}
SHORT = ["--steps=2", "--batch_size=4", "--dataset.eval_split=0.3", "--eval_freq=0", "--save_freq=2"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_wide(tmp_path_factory.mktemp("data") / "wide", names=[list(NAMES)])


def vlatune(*words, code=cli.OK):
    """Run the command in a separate process; return what it printed."""
    done = subprocess.run([sys.executable, "-m", "vlatune.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == cli.OK else done.stderr


def answer(capsys, *words):
    capsys.readouterr()  # LeRobot prints while it loads
    cli.main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_inspect_names_policies_that_fit_and_a_command_that_works(wide, capsys):
    """The command is one that `doctor`, which examines what `train` would do, finds nothing wrong with."""
    found = answer(capsys, "inspect", str(wide))
    assert [one["names"] for one in found["features"] if one["name"] == ACTION] == [list(NAMES)]
    problem = next(one for one in found["findings"] if one["check"] == "dims")
    assert "--policy.type=act, --policy.type=diffusion" in problem["remedy"]
    command = shlex.split(found["command"])
    assert command[:3] == ["vlatune", "train", "--recipe=act-tiny"]
    assert answer(capsys, "doctor", *command[2:], *SHORT)["status"] == "pass"
    flag = problem["remedy"].rpartition("such as the first: ")[2]
    words = ["--recipe=pi0-tiny", f"--dataset.root={wide}", *shlex.split(flag), *SHORT]
    assert answer(capsys, "doctor", *words)["status"] == "pass"


def test_doctor_prints_a_command_that_works(wide, capsys):
    given = ["--recipe=pi0-tiny", f"--dataset.root={wide}", *SHORT]
    found = answer(capsys, "doctor", *given)
    (failed,) = [one for one in found["findings"] if one["level"] == "fail"]
    assert failed["figures"] == {"dims": 34, "most": 32}
    assert "--recipe=act-tiny" in failed["flags"]
    assert answer(capsys, "doctor", *shlex.split(found["command"])[2:])["status"] == "pass"
    assert cli.main(["train", *given, f"--output_dir={wide.parent / 'none'}"]) == 2
    message = capsys.readouterr().err
    assert "--recipe=act-tiny or --recipe=diffusion-tiny" in message
    select = shlex.split(message[message.index("--dataset.select_dims=") :])[0]
    assert answer(capsys, "doctor", *given, select)["status"] == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny", "act-tiny"])
def test_selected_dims_from_training_to_a_robot(wide, tmp_path, capsys, recipe):
    run, folder, flag = tmp_path / "run", tmp_path / "policy", f"--dataset.select_dims={json.dumps(CHOSEN)}"
    train = ["train", f"--recipe={recipe}", f"--dataset.root={wide}", f"--output_dir={run}", *SHORT]
    vlatune(*train, flag)
    other = f"--dataset.select_dims={json.dumps({**CHOSEN, ACTION: ['0:5']})}"
    message = vlatune(*train, other, "--steps=4", "--resume", code=2)
    assert "--dataset.select_dims was" in message
    vlatune(*train, flag, "--steps=4", "--resume")

    names = {key: [NAMES[dim] for dim in dims] for key, dims in DIMS.items()}
    figures = answer(capsys, "eval", str(run), "--rollouts=1")
    assert [*figures["per_dim_error"]] == figures["action_names"] == names[ACTION]
    assert cli.main(["export", str(run), str(folder)]) == cli.OK
    capsys.readouterr()
    vectors = json.loads((folder / "vlatune.json").read_text())["vectors"]
    assert vectors == {
        key: {"names": names[key], "selected_dims": DIMS[key], "recorded_dims": 34} for key in (STATE, ACTION)
    }
    card = (folder / "README.md").read_text()
    assert "33, 3, 7, 8, 9" in card
    config = PreTrainedConfig.from_pretrained(folder)
    assert (config.input_features[STATE].shape, config.output_features[ACTION].shape) == ((5,), (5,))
    _check_normaliser(wide, folder)
    if recipe == "tiny":
        assert config.action_feature_names == names[ACTION]
        load_lerobot(folder)

    of_folder = answer(capsys, "eval", str(folder), f"--dataset.root={wide}", "--rollouts=1")
    cut = make_wide(tmp_path / "cut", cut=DIMS)
    of_cut = answer(capsys, "eval", str(folder), f"--dataset.root={cut}", "--rollouts=1")
    of_run = answer(capsys, "eval", str(run), f"--dataset.root={wide}", "--rollouts=1")
    for key in ("action_error", "val_loss", "per_dim_error", "num_samples"):
        assert of_folder[key] == of_cut[key] == of_run[key], key
    wrong = f"--dataset.select_dims={json.dumps({ACTION: [0]})}"
    assert cli.main(["eval", str(folder), f"--dataset.root={wide}", wrong]) == 2
    assert "'action' has 1 dims" in capsys.readouterr().err


def _check_normaliser(wide: Path, folder: Path) -> None:
    """LeRobot normalises with the statistics of the selected dims, in their order."""
    stats = load_meta(str(wide)).stats
    (file,) = folder.glob("policy_preprocessor_step_*_normalizer_processor.safetensors")
    for name, values in load_file(file).items():
        key, _, which = name.rpartition(".")
        if key in DIMS:
            np.testing.assert_array_equal(values, stats[key][which][DIMS[key]].astype(np.float32))
