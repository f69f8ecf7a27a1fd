"""Run `lerobot-eval` on a simulated environment with the exported policy (`--env.type`).

It runs in a subprocess, because simulators bring conflicting libraries. The policy's processors are
checked first, since LeRobot executes what they name. The success rate is reported with a confidence
interval, because episodes are few.
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

from vlatune.config.settings import EvalConfig, ExportConfig
from vlatune.config.validate import validate_eval
from vlatune.console import printable, redacted, warn
from vlatune.errors import did_you_mean
from vlatune.evaluate.eval_text import weights_text
from vlatune.export.policy_files import read_trained_on
from vlatune.formatting import format_number, plural
from vlatune.run.run_folder import SIMULATION_FILE
from vlatune.run.verdict import success_text
from vlatune.storage.files import make_folder, read_json, write_json, write_text

PROGRAM = ("-P", "-m", "lerobot.scripts.lerobot_eval")
"""Python arguments that are equivalent to `lerobot-eval`."""
INFO_FILE, LOG_FILE = "eval_info.json", "lerobot_eval.log"
Z_95 = 1.959963984540054
"""Half width of the 95 % interval of a normal distribution, in standard deviations."""
MAX_LOG_TEXT = 300


ENVIRONMENTS = {
    "pusht": ("gym_pusht", "pip install 'gym-pusht>=0.1.5,<0.2' 'pymunk>=6.6,<7'"),
    "aloha": ("gym_aloha", "pip install 'gym-aloha>=0.1.4,<0.2'"),
    "libero": ("libero", "pip install 'hf-libero>=0.1.4,<0.2'"),
    "metaworld": ("metaworld", "pip install metaworld==3.0.0"),
    "robocasa": ("robocasa", "see LeRobot's documentation"),
    "robomme": ("robomme", "see LeRobot's documentation"),
    "vlabench": ("VLABench", "see LeRobot's documentation"),
}
"""LeRobot environment -> required module and how to install it; no real robots, no code downloads."""


def simulate(path: Path, options: EvalConfig) -> dict[str, Any]:
    """Export the policy, simulate, and return the results; fails early if a package is missing."""
    validate_eval(options)
    check_environment(str(options.env.type))
    if len(options.checkpoint) > 1 or "all" in options.checkpoint or options.weights == "both":
        raise ValueError(
            f"--env.type={options.env.type}: one variant is simulated at a time; choose it with --checkpoint=STEP and "
            f"--weights=ema or trained"
        )
    from vlatune.evaluate.evaluate_run import choose_device, output_folder

    device = str(choose_device(options.device))
    folder = make_folder(output_folder(path, options, is_own=False), str(options.env.type))
    (folder / INFO_FILE).unlink(missing_ok=True)  # result of an earlier simulation
    with _exported(path, options) as policy:
        warn(
            f"vlatune: lerobot-eval runs {plural(options.episodes, 'episode')} of {options.env.type}; log: {folder / LOG_FILE}"
        )
        _run(_command(policy, options, device, folder), folder / LOG_FILE)
    found = {
        "env": options.env.type,
        "task": options.env.task,
        "checkpoint": policy.checkpoint,
        "weights": policy.weights,
        "device": device,
        "seed": options.seed,
        **read_info(folder),
    }
    write_json(folder / SIMULATION_FILE, found)
    if policy.is_run and options.output_dir is None:
        from vlatune.report.html import write_report

        write_json(path / SIMULATION_FILE, found)
        write_report(path)
    return found


def check_environment(name: str) -> None:
    """Raise if the environment is unknown or its package is not installed."""
    if name not in ENVIRONMENTS:
        hint = did_you_mean(name, ENVIRONMENTS) or f"; there are {', '.join(ENVIRONMENTS)}"
        raise ValueError(f"--env.type={name}: not a supported environment{hint}")
    module, remedy = ENVIRONMENTS[name]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"--env.type={name}: the package {module} is not installed; {remedy}")


@dataclass(frozen=True)
class ExportedPolicy:
    folder: Path
    checkpoint: str
    weights: str
    rename_map: Mapping[str, str]
    """Rename map of the export, which lerobot-eval's flag replaces."""
    is_run: bool


@contextmanager
def _exported(path: Path, options: EvalConfig) -> Iterator[ExportedPolicy]:
    """Export a run's checkpoint to a temporary folder; a LeRobot folder is validated and kept."""
    from vlatune.evaluate.subject import is_policy_folder, read_policy_folder, reject_several_robots

    if is_policy_folder(path):
        adapter, spec = read_policy_folder(path, options)
        names = read_trained_on(path, spec, adapter.schema).rename_map
        yield ExportedPolicy(path.resolve(), str(path), "stored", names, is_run=False)
        return
    from vlatune.checkpoint.local_store import folder_name
    from vlatune.export.export import export_run

    reject_several_robots(path, options, f"--env.type={options.env.type}")
    chosen = ExportConfig(
        checkpoint=next(iter(options.checkpoint), None),
        weights="auto" if options.weights == "both" else options.weights,
        trust_run=options.trust_run,
    )
    with tempfile.TemporaryDirectory(prefix="vlatune-eval-") as temporary:
        done = export_run(
            path, Path(temporary) / "pretrained_model", chosen, warn=lambda text: warn(f"vlatune: {text}")
        )
        yield ExportedPolicy(done.folder, folder_name(done.optimizer_step), done.weights, done.rename_map, is_run=True)


def _command(policy: ExportedPolicy, options: EvalConfig, device: str, folder: Path) -> list[str]:
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
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
        raise RuntimeError(
            f"lerobot-eval failed with exit code {done.returncode}: {printable(last)[:MAX_LOG_TEXT]} (log: {log})"
        )


def read_info(folder: Path) -> dict[str, Any]:
    """Read LeRobot's eval_info.json."""
    file = folder / INFO_FILE
    try:
        per_task = read_json(folder, INFO_FILE)["per_task"]
        tasks = [(str(one["task_group"]), int(one["task_id"]), _episodes(one)) for one in per_task]
        found = _figures([episode for _, _, episodes in tasks for episode in episodes])
        rows = [_figures(episodes) | {"group": group, "task_id": number} for group, number, episodes in tasks]
    except FileNotFoundError:
        raise RuntimeError(f"lerobot-eval has not written {file} (log: {folder / LOG_FILE})") from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RuntimeError(
            f"'{file}' does not have the format of LeRobot 0.6 ({problem}); check its version"
        ) from error
    return found | {"tasks": rows}


Episodes = list[tuple[bool, float, float]]
"""(success, sum of rewards, highest reward) per episode."""


def _episodes(task: Mapping[str, Any]) -> Episodes:
    lists = (task["metrics"][key] for key in ("successes", "sum_rewards", "max_rewards"))
    return [(bool(success), float(total), float(most)) for success, total, most in zip(*lists, strict=True)]


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
    """Return the mean of the finite values, as LeRobot does."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return the Wilson 95 % confidence interval of a success rate.

    >>> [round(bound, 4) for bound in wilson(8, 10)], [round(bound, 4) for bound in wilson(0, 10)]
    ([0.4902, 0.9433], [0.0, 0.2775])
    """
    share, z2 = successes / count, Z_95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return (0.0 if successes == 0 else low), (1.0 if successes == count else high)


def simulation_text(found: Mapping[str, Any], path: str) -> str:
    """Format the results for the terminal."""
    task = f", task {printable(found['task'])}" if found["task"] else ""
    lines = [f"{path}: {weights_text(found)}, on {found['device']}, in {found['env']}{task} (seed {found['seed']})", ""]
    lines.append(f"  {'success':<20} {success_text(found)}")
    for key, label in (("mean_reward", "mean reward"), ("mean_max_reward", "mean highest reward")):
        value = found[key]
        lines.append(f"  {label:<20} {'not a number' if value is None else format_number(value)}")
    if len(found["tasks"]) > 1:
        lines += ["", "by task:"]
        lines += [f"  {printable(one['group'])} {one['task_id']:<14} {success_text(one)}" for one in found["tasks"]]
    return "\n".join(lines)
