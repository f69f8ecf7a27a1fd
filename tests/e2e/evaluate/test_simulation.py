"""`vlatune eval --env.type`: the arguments of `lerobot-eval`, and its results.

A fake program takes the same flags and writes eval_info.json in the format of LeRobot 0.6.1; LeRobot's parser checks the flags.
gym-pusht is not installed for the tests.
"""

import json
import sys
from pathlib import Path

import pytest
from run_copies import copy_run

from vlatune import cli
from vlatune.evaluate import simulation
from vlatune.evaluate.simulation import ENVIRONMENTS, read_info, wilson

FAKE = """
import json, pathlib, sys
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
policy, out = (pathlib.Path(given[name]) for name in ("policy.path", "output_dir"))
print("fake lerobot-eval of", given["env.type"])
if given.get("env.task") == "broken":
    sys.exit("ValueError: no such task")
assert (policy / "model.safetensors").stat().st_size and (policy / "policy_preprocessor.json").exists()
successes = [n % 4 == 0 for n in range(int(given["eval.n_episodes"]))]
metrics = {
    "sum_rewards": [float(n) for n in range(len(successes))],
    "max_rewards": [1.0 if one else 0.5 for one in successes],
    "successes": successes,
    "video_paths": [str(out / "videos/pusht_0/eval_episode_0.mp4")],
    "predicted_video_paths": [],
}
overall = {"avg_sum_reward": 0.0, "avg_max_reward": 0.0, "pc_success": 0.0, "n_episodes": len(successes), "eval_s": 1.0}
info = {"per_task": [{"task_group": "pusht", "task_id": 0, "metrics": metrics}], "per_group": {}, "overall": overall}
(out / "eval_info.json").write_text(json.dumps(info, indent=2))
(out / "given.json").write_text(json.dumps(given))
"""


@pytest.fixture
def fake_eval(monkeypatch, tmp_path):
    """Replace lerobot-eval, and make the environment's package importable."""
    (tmp_path / "site" / "gym_pusht").mkdir(parents=True)
    (tmp_path / "site" / "gym_pusht" / "__init__.py").write_text("raise ImportError('only the simulation imports it')")
    (tmp_path / "fake_eval.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(simulation, "PROGRAM", (str(tmp_path / "fake_eval.py"),))


@pytest.fixture
def run_dir(run_of, tmp_path) -> Path:
    return copy_run(run_of("act"), tmp_path / "run")


def test_a_run_is_exported_simulated_and_reported(fake_eval, run_dir, figures, tmp_path, capsys):
    words = (run_dir, "--env.type=pusht", "--episodes=8", "--seed=3", '--env.options={"episode_length": "20"}')
    found = figures(*words)
    assert (found["successes"], found["episodes"], found["success_rate"]) == (2, 8, 0.25)
    assert found["success_interval_95"] == pytest.approx([0.0715, 0.5907], abs=1e-4)
    assert (found["mean_reward"], found["mean_max_reward"]) == (3.5, 0.625)
    assert (found["checkpoint"], found["weights"], found["env"]) == ("00000002", "trained", "pusht")
    folder = tmp_path / "run-eval" / "pusht"
    given = json.loads((folder / "given.json").read_text())
    assert given.pop("policy.path").endswith("/pretrained_model")
    assert given == {
        "policy.device": "cpu",
        "env.type": "pusht",
        "env.episode_length": "20",
        "eval.n_episodes": "8",
        "output_dir": str(folder),
        "seed": "3",
    }
    assert json.loads((folder / "simulation.json").read_text()) == found
    assert "lerobot-eval of pusht" in (folder / "lerobot_eval.log").read_text()
    assert cli.main(["eval", *map(str, words)]) == cli.OK
    text, page = capsys.readouterr().out, (run_dir / "report.html").read_text()
    rate = "25 % (2 of 8 episodes; 95 % confidence: 7.1 % to 59 %)"
    assert rate in text
    assert rate in page


def test_the_temporary_export_is_removed_and_a_given_folder_stays(fake_eval, run_dir, figures, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    figures(run_dir, "--env.type=pusht", "--episodes=1")
    assert not list((tmp_path / "temporary").iterdir())
    assert cli.main(["export", str(run_dir), str(tmp_path / "policy")]) == cli.OK
    found = figures(
        tmp_path / "policy", "--env.type=pusht", "--episodes=1", '--rename_map={"pixels": "observation.image"}'
    )
    given = json.loads((tmp_path / "policy-eval" / "pusht" / "given.json").read_text())
    assert given["policy.path"] == str(tmp_path / "policy")
    assert json.loads(given["rename_map"]) == {"pixels": "observation.image"}
    assert found["weights"] == "stored"
    assert (tmp_path / "policy" / "model.safetensors").exists()


def test_a_failure_reports_the_last_line_of_the_program(fake_eval, run_dir, capsys, tmp_path):
    assert cli.main(["eval", str(run_dir), "--env.type=pusht", "--env.task=broken"]) == cli.FAILED
    err = capsys.readouterr().err
    assert "exit code 1: ValueError: no such task" in err
    assert "Traceback" not in err
    assert not (run_dir / "simulation.json").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--env.type=pusht",), "pip install 'gym-pusht"),
        (("--env.type=push",), "did you mean pusht?"),
        (("--env.type=pusht", "--dataset.root=x"), "--dataset.root"),
        (("--env.task=PushT-v0",), "--env.type"),
        (("--env.type=pusht", "--episodes=0"), "--episodes=0"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run_is_read(flags, named, rejected, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert named in rejected(tmp_path / "run", *flags)


def test_several_variants_are_rejected(fake_eval, rejected, run_dir):
    for flag in ("--checkpoint=all", "--weights=both"):
        assert "--checkpoint=STEP" in rejected(run_dir, "--env.type=pusht", flag)


def test_the_environments_exist_in_lerobot():
    from lerobot.envs import EnvConfig

    assert set(ENVIRONMENTS) <= set(EnvConfig.get_known_choices())


def test_lerobots_parser_accepts_the_flags(run_of, tmp_path, monkeypatch):
    import draccus
    from lerobot.configs.eval import EvalPipelineConfig

    from vlatune.config.settings import EvalConfig, EvalEnvConfig
    from vlatune.evaluate.simulation import ExportedPolicy, _command

    assert cli.main(["export", str(run_of("act")), str(tmp_path / "policy")]) == cli.OK
    env = EvalEnvConfig(type="pusht", task="PushT-v0", options={"episode_length": "7"})
    policy = ExportedPolicy(tmp_path / "policy", "1", "trained", {"a": "b"}, is_run=True)
    _, *words = _command(policy, EvalConfig(env=env, episodes=2), "cpu", tmp_path / "out")
    flags = words[len(simulation.PROGRAM) :]
    monkeypatch.setattr(sys, "argv", ["lerobot-eval", *flags])  # where it looks for the policy's path
    rest = [flag for flag in flags if not flag.startswith("--policy.path")]
    found = draccus.parse(EvalPipelineConfig, args=[flag for flag in rest if not flag.startswith("--policy.")])
    assert (found.env.type, found.env.task, found.env.episode_length) == ("pusht", "PushT-v0", 7)
    assert (found.eval.n_episodes, found.output_dir, found.rename_map) == (2, tmp_path / "out", {"a": "b"})
    assert (found.policy.type, found.policy.device) == ("act", "cpu")


def test_results_in_another_format_are_rejected(tmp_path):
    with pytest.raises(RuntimeError, match=r"not written .*eval_info.json"):
        read_info(tmp_path)
    for content in ("{}", '{"per_task": []}', '{"per_task": [{"metrics": {}}]}', "[]"):
        (tmp_path / "eval_info.json").write_text(content)
        with pytest.raises((RuntimeError, ValueError), match=r"format of LeRobot 0.6|expected a JSON object"):
            read_info(tmp_path)


def test_rewards_that_are_not_finite_are_ignored_as_in_lerobot(tmp_path):
    metrics = {"successes": [True, False], "sum_rewards": [2.0, float("nan")], "max_rewards": [float("nan")] * 2}
    tasks = [{"task_group": "libero_10", "task_id": number, "metrics": metrics} for number in (0, 3)]
    (tmp_path / "eval_info.json").write_text(json.dumps({"per_task": tasks}))
    found = read_info(tmp_path)
    assert (found["episodes"], found["successes"], found["mean_reward"], found["mean_max_reward"]) == (4, 2, 2.0, None)
    assert [one["task_id"] for one in found["tasks"]] == [0, 3]


@pytest.mark.parametrize(("successes", "count"), [(0, 1), (1, 1), (0, 50), (50, 50), (13, 50), (1, 1000)])
def test_the_confidence_interval_is_wilsons(successes, count):
    """The observed share lies 1.96 standard deviations of a bound away from that bound."""
    low, high = wilson(successes, count)
    share = successes / count
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(1.959964 * (bound * (1 - bound) / count) ** 0.5, rel=1e-5)
