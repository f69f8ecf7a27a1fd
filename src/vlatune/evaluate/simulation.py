"""`vlatune eval RUN --env.type=...`: LeRobot's own `lerobot-eval` drives a simulated environment with the exported policy.

A process of its own, with its words in a log: simulators bring libraries that must not meet ours. What is handed over is a
LeRobot folder whose processors were checked (LeRobot runs what they name), what comes back is its eval_info.json. Success is a
share of few episodes, so it is told with the interval that it leaves open.
"""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.checkpoint.policy_files import read_trained_on
from vlatune.config import EvalConfig, ExportConfig
from vlatune.config_checks import validate_eval
from vlatune.console import printable, redacted, warn
from vlatune.errors import did_you_mean
from vlatune.files import read_json, write_json, write_text
from vlatune.report.formatting import format_number, plural
from vlatune.report.run_folder import SIMULATION_FILE
from vlatune.report.verdict import success_text

PROGRAM = ("-m", "lerobot.scripts.lerobot_eval")
"""Behind this Python: what the command `lerobot-eval` runs."""
INFO_FILE, LOG_FILE = "eval_info.json", "lerobot_eval.log"
Z_95 = 1.959963984540054
"""Of a normal distribution, 95 % lies so many deviations around its mean."""
MAX_LOG_TEXT = 300


@dataclass(frozen=True)
class Environment:
    """What must be installed beside LeRobot."""

    module: str
    install: str


ENVIRONMENTS = {
    "pusht": Environment("gym_pusht", "pip install 'gym-pusht>=0.1.5,<0.2' 'pymunk>=6.6,<7'"),
    "aloha": Environment("gym_aloha", "pip install 'gym-aloha>=0.1.4,<0.2'"),
    "libero": Environment("libero", "pip install 'hf-libero>=0.1.4,<0.2'"),
    "metaworld": Environment("metaworld", "pip install metaworld==3.0.0"),
    "robocasa": Environment("robocasa", "install robocasa as LeRobot's documentation says"),
    "robomme": Environment("robomme", "install robomme as LeRobot's documentation says"),
    "vlabench": Environment("VLABench", "install VLABench as LeRobot's documentation says"),
}
"""LeRobot's name of an environment -> what it needs; those that run on a real robot or fetch code are left out."""


def simulate(path: Path, options: EvalConfig) -> dict[str, Any]:
    """Export, hand over, read what came back; what is missing is named before anything heavy is imported."""
    validate_eval(options)
    check_environment(str(options.env.type))
    _check_one_variant(options)
    from vlatune.evaluate.evaluate_run import choose_device, output_folder

    device = str(choose_device(options.device))
    folder = output_folder(path, options, is_own=False) / str(options.env.type)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INFO_FILE).unlink(missing_ok=True)  # of an earlier one
    with _exported(path, options) as policy:
        warn(
            f"vlatune: lerobot-eval runs {plural(options.episodes, 'episode')} of {options.env.type}; its words are in {folder / LOG_FILE}"
        )
        _run(_command(policy, options, device, folder), folder / LOG_FILE)
    told = {"checkpoint": policy.checkpoint, "weights": policy.weights, "device": device, "seed": options.seed}
    found = {"env": options.env.type, "task": options.env.task} | told | read_info(folder)
    write_json(folder / SIMULATION_FILE, found)
    if policy.is_run and options.output_dir is None:
        from vlatune.report.html import write_report

        write_json(path / SIMULATION_FILE, found)
        write_report(path)
    return found


def check_environment(name: str) -> None:
    """One message with the remedy, before the policy is touched."""
    if name not in ENVIRONMENTS:
        hint = did_you_mean(name, ENVIRONMENTS) or f"; there are {', '.join(ENVIRONMENTS)}"
        raise ValueError(f"--env.type={name}: is not a simulated environment that can be used here{hint}")
    needed = ENVIRONMENTS[name]
    if importlib.util.find_spec(needed.module) is None:
        raise ValueError(f"--env.type={name}: the package {needed.module} is not installed; {needed.install}")


def _check_one_variant(options: EvalConfig) -> None:
    if len(options.checkpoint) > 1 or "all" in options.checkpoint or options.weights == "both":
        raise ValueError(
            f"--env.type={options.env.type}: one checkpoint with one kind of weights is simulated at a time; name one with --checkpoint "
            f"and --weights=ema or trained"
        )


@dataclass(frozen=True)
class HandedOver:
    folder: Path
    checkpoint: str
    weights: str
    rename_map: Mapping[str, str]
    """The export's own: LeRobot's programs put their flag in its place."""
    is_run: bool


@contextmanager
def _exported(path: Path, options: EvalConfig) -> Iterator[HandedOver]:
    """A run's checkpoint in a folder that is gone afterwards; a LeRobot folder as it is, once its files were checked."""
    from vlatune.evaluate.subject import is_policy_folder, read_policy_folder, refuse_several_robots

    if is_policy_folder(path):
        adapter, spec = read_policy_folder(path, options)
        names = read_trained_on(path, spec, adapter.schema).rename_map
        yield HandedOver(path.resolve(), str(path), "stored", names, is_run=False)
        return
    from vlatune.checkpoint.export import export_run
    from vlatune.checkpoint.local_store import folder_name

    refuse_several_robots(path, options, f"--env.type={options.env.type}")
    chosen = ExportConfig(
        checkpoint=next(iter(options.checkpoint), None),
        weights="auto" if options.weights == "both" else options.weights,
        trust_run=options.trust_run,
    )
    with tempfile.TemporaryDirectory(prefix="vlatune-eval-") as aside:
        done = export_run(path, Path(aside) / "pretrained_model", chosen, warn=lambda text: warn(f"vlatune: {text}"))
        yield HandedOver(done.folder, folder_name(done.optimizer_step), done.weights, done.rename_map, is_run=True)


def _command(policy: HandedOver, options: EvalConfig, device: str, folder: Path) -> list[str]:
    env, names = options.env, {**policy.rename_map, **options.rename_map}
    flags = {
        "policy.path": str(policy.folder),
        "policy.device": device,
        "env.type": str(env.type),
        **({"env.task": env.task} if env.task is not None else {}),
        **{f"env.{name}": value for name, value in env.options.items()},
        "eval.n_episodes": str(options.episodes),
        "output_dir": str(folder),
        "seed": str(options.seed),
        **({"rename_map": json.dumps(names)} if names else {}),
    }
    return [sys.executable, *PROGRAM, *(f"--{name}={value}" for name, value in flags.items())]


def _run(command: Sequence[str], log: Path) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, stdin=subprocess.DEVNULL
    )
    text = redacted(done.stdout.decode("utf-8", errors="replace"))
    write_text(log, text)
    if done.returncode:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        raise RuntimeError(
            f"lerobot-eval ended with exit code {done.returncode}: {printable(last)[:MAX_LOG_TEXT]}; all of it is in {log}"
        )


def read_info(folder: Path) -> dict[str, Any]:
    """What LeRobot's eval_info.json says, counted."""
    file = folder / INFO_FILE
    try:
        tasks = [_task(one) for one in read_json(folder, INFO_FILE)["per_task"]]
        overall = _joined(tasks)
    except FileNotFoundError:
        raise RuntimeError(
            f"lerobot-eval has ended and written no {file}; its words are in {folder / LOG_FILE}"
        ) from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RuntimeError(
            f"'{file}' is not as LeRobot 0.6 writes it ({type(error).__name__}: {error}); is another version installed?"
        ) from error
    rows = [_figures(of) | {"group": group, "task_id": number} for group, number, of in tasks]
    return _figures(overall) | {"tasks": rows}


Episodes = list[tuple[bool, float, float]]
"""(success, sum of rewards, highest reward)."""


def _task(one: Mapping[str, Any]) -> tuple[str, int, Episodes]:
    metrics = one["metrics"]
    lists = (metrics[key] for key in ("successes", "sum_rewards", "max_rewards"))
    episodes = [(bool(success), float(total), float(most)) for success, total, most in zip(*lists, strict=True)]
    return str(one["task_group"]), int(one["task_id"]), episodes


def _joined(tasks: Sequence[tuple[str, int, Episodes]]) -> Episodes:
    joined = [episode for _, _, episodes in tasks for episode in episodes]
    if not joined:
        raise ValueError("no episode in per_task")
    return joined


def _figures(episodes: Episodes) -> dict[str, Any]:
    successes, count = sum(success for success, _, _ in episodes), len(episodes)
    return {
        "episodes": count,
        "successes": successes,
        "success_rate": successes / count,
        "success_interval_95": list(wilson(successes, count)),
        "mean_reward": _mean([total for _, total, _ in episodes]),
        "mean_max_reward": _mean([most for _, _, most in episodes]),
    }


def _mean(values: Sequence[float]) -> float | None:
    """As LeRobot takes it: over those that are numbers."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's interval: shares with which so many successes are still likely, at 95 %; never outside 0 to 1.

    >>> [round(bound, 4) for bound in wilson(8, 10)], [round(bound, 4) for bound in wilson(0, 10)]
    ([0.4902, 0.9433], [0.0, 0.2775])
    """
    share, z2 = successes / count, Z_95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return (0.0 if successes == 0 else low), (1.0 if successes == count else high)


def simulation_text(found: Mapping[str, Any], path: str) -> str:
    """All of it, for a terminal."""
    which = "its own" if found["weights"] == "stored" else f"checkpoint {found['checkpoint']}, {found['weights']}"
    task = f", task {printable(found['task'])}" if found["task"] else ""
    lines = [f"{path}: {which} weights, on {found['device']}, in {found['env']}{task} (seed {found['seed']})", ""]
    lines.append(f"  {'success':<20} {success_text(found)}")
    for key, label in (("mean_reward", "mean reward"), ("mean_max_reward", "mean highest reward")):
        value = found[key]
        lines.append(f"  {label:<20} {'not a number' if value is None else format_number(value)}")
    if len(found["tasks"]) > 1:
        lines += ["", "by task:"]
        lines += [f"  {printable(one['group'])} {one['task_id']:<14} {success_text(one)}" for one in found["tasks"]]
    return "\n".join(lines)
