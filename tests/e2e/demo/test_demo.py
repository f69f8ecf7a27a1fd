"""The demo of every policy through the command line: its tiny model learns on a CPU; `make-dataset` is silent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vlatune import cli
from vlatune.registry import PACKAGES, get_policy_info
from vlatune.run.run_folder import read_config

OTHERS = [name for name in PACKAGES if name != next(iter(PACKAGES))]
"""The first is the demo of `make demo`, which other tests run."""


def test_an_unknown_policy_is_rejected(capsys):
    assert cli.main(["demo", "--policy=akt"]) == cli.MISUSED
    assert "did you mean act" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_tiny_model_learns(name, tmp_path):
    """The held-out error is at most half of the mean action's, and larger without images or instruction."""
    assert cli.main(["demo", f"--policy={name}", f"--output_dir={tmp_path / 'demo'}"]) == cli.OK
    figures = json.loads((tmp_path / "demo/eval.json").read_text())
    assert figures["action_error"] <= 0.5 * figures["mean_action_error"], figures
    assert figures["blank_images_error"] > 1.5 * figures["action_error"], figures
    if get_policy_info(name).has_prompt:
        assert figures["blank_instruction_error"] > 1.5 * figures["action_error"], figures
    assert read_config(tmp_path / "demo").policy.type == name


def test_making_a_dataset_is_silent_and_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    """Run in a separate process, because encoders decide once per process whether they print."""
    code = """if True:
        import sys
        from pathlib import Path
        from vlatune.demo.generate import SyntheticSpec, make_dataset
        for codec in ("h264", "hevc", "av1"):
            make_dataset(Path(sys.argv[1], codec), SyntheticSpec(episodes=1, frames=3, codec=codec))
        assert not {"torch", "ray", "lerobot"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
