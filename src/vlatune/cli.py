"""The command line: `vlatune COMMAND [operands] [--flag=value ...]`.

A command consists of a config class, which defines its flags and help, and a function. Heavy
modules are imported inside that function, so that help and flag errors are instant. Every command
ends with one line on the terminal and an exit code (`_explain`), never with a bare traceback.
"""

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from vlatune import __version__
from vlatune.config.flags import parse_command, takes_lerobot
from vlatune.config.settings import (
    DemoConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    InspectConfig,
    ReportConfig,
    RunConfig,
)
from vlatune.console import progress_bar, redacted, say, warn
from vlatune.errors import TerminatedError, did_you_mean
from vlatune.storage.files import make_folder, write_text
from vlatune.storage.paths import CONFIG_FILE, PRETRAINED_FOLDER, require_dataset, require_run

OK, FAILED, MISUSED, INTERRUPTED, SIGNALLED = 0, 1, 2, 130, 128
MAX_FOREIGN_TEXT = 300


@dataclass(frozen=True)
class Command:
    description: str
    flags: Callable[[], type]
    """Return the config class; a function, so that it is imported only when needed."""
    call: Callable[..., int | None]
    """Run the command with the config and the operands; may return an exit code."""
    operands: tuple[str, ...] = ()
    run_dir: Callable[..., Path] | None = None
    """Return the run folder for tracebacks, from the same arguments as `call`."""

    def usage(self, program: str, name: str) -> str:
        return " ".join([program, name, *self.operands, *(["[--flag=value ...]"] if fields(self.flags()) else [])])


def demo(options: DemoConfig) -> None:
    from vlatune.demo.demo import run_demo

    run_demo(options)


def make_dataset(spec: Any, folder: str) -> None:
    from vlatune.demo import generate

    with progress_bar("episodes") as show:
        generate.make_dataset(Path(folder), spec, on_episode=lambda index: show(index + 1, spec.episodes))
    say(f"{folder}: {spec.episodes} episodes")


def inspect(options: InspectConfig, *datasets: str) -> int:
    from vlatune.checks.inspect import (
        check_names,
        inspect_dataset,
        inspection_text,
        train_command,
        write_dataset_checksums,
    )

    names = options.rename_map
    with progress_bar("videos") as show:
        found = [inspect_dataset(one, videos=options.videos, rename_map=names, on_video=show) for one in datasets]
    check_names(found, names)
    if options.json:
        each = [one.to_json() for one in found]
        content = each[0] if len(each) == 1 else {"datasets": each}
        print(json.dumps(content | {"command": train_command(found, names)}), flush=True)
    else:
        width = shutil.get_terminal_size().columns
        texts = [inspection_text(one, width=width) for one in found]
        if command := train_command(found, names):
            texts.append(f"a tiny model trains on it, also on a CPU, with:\n  {command}")
        say("\n\n".join(texts))
    if options.write_checksums:
        for one in found:
            warn(f"vlatune: {write_dataset_checksums(one)}")
    return FAILED if any(one.has_failed for one in found) else OK


def doctor(options: DoctorConfig) -> int:
    from vlatune.checks.doctor import finding_text, outcome_text, run_doctor

    width = shutil.get_terminal_size().columns
    with progress_bar("checks") as show:
        found, page = run_doctor(
            options,
            on_check=show,
            on_finding=lambda one: (
                None if options.json or one.level == "skipped" else say(finding_text(one, width=width))
            ),
        )
    if options.json:
        print(json.dumps(found.to_json() | {"page": page and str(page)}), flush=True)
    else:
        say(outcome_text(found, page, width=width))
    return FAILED if found.level == "fail" else OK


def train(config: RunConfig) -> None:
    from vlatune.train.driver import launch

    launch.train(config)


def evaluate(options: EvalConfig, path: str) -> None:
    if options.dataset.root is not None:
        require_dataset(options.dataset.root, argument="--dataset.root")
    from vlatune.run.opened_run import opened_run

    with opened_run(path) as run:
        if not (run.folder / PRETRAINED_FOLDER).is_dir():  # LeRobot checkpoints have a separate message
            require_run(run.folder, files=(CONFIG_FILE,))
        from vlatune.evaluate.evaluate_run import evaluate_run

        if run.is_copy and options.output_dir is None:
            options = replace(options, output_dir=f"{run.folder.name}-eval")
        with progress_bar("batches") as show:
            figures = evaluate_run(run.folder, options, on_batch=show, allowed=run.allowed)
        if options.json:
            print(json.dumps(figures), flush=True)
        else:
            from vlatune.evaluate.eval_text import eval_text
            from vlatune.evaluate.evaluate_run import page_of

            say(f"{eval_text(figures, path)}\n\nreport: {page_of(run.folder, options, figures)}")


def export(options: ExportConfig, run_dir: str, folder: str) -> None:
    from vlatune.run.opened_run import opened_run

    with opened_run(run_dir) as run:
        require_run(run.folder, files=(CONFIG_FILE,))
        from vlatune.export.export import export_run, export_text

        options = replace(options, base=options.base or run.base)
        done = export_run(run.folder, Path(folder), options, warn=warn, allowed=run.allowed)
        say(export_text(done))


def report(options: ReportConfig, *run_dirs: str) -> None:
    from vlatune.run.opened_run import opened_run

    with ExitStack() as opened:
        runs = [opened.enter_context(opened_run(one)) for one in run_dirs]
        for run in runs:
            require_run(run.folder)
        from vlatune.report.compare import write_comparison
        from vlatune.report.html import write_report

        file = Path(options.output) if options.output else None
        if len(runs) > 1:
            page = write_comparison([run.folder for run in runs], file or Path("comparison.html"))
        else:
            (run,) = runs
            page = write_report(run.folder, file=file or (Path(f"{run.folder.name}.html") if run.is_copy else None))
    say(str(page))


def _synthetic_spec() -> type:
    from vlatune.demo.generate import SyntheticSpec

    return SyntheticSpec


COMMANDS = {
    "demo": Command(
        "generate a small dataset, fine-tune a tiny policy on it, evaluate it and write the report",
        flags=lambda: DemoConfig,
        call=demo,
        run_dir=lambda options: options.run_dir,
    ),
    "make-dataset": Command(
        "generate a LeRobot dataset, with the id of each frame in its pixels",
        flags=_synthetic_spec,
        call=make_dataset,
        operands=("DIR",),
    ),
    "inspect": Command(
        "show features, episodes, tasks, cameras, statistics and problems of datasets, and a command to train on them",
        flags=lambda: InspectConfig,
        call=inspect,
        operands=("DATASET...",),
    ),
    "doctor": Command(
        "check a run before it starts, with the flags of `train`; reports problems with remedies",
        flags=lambda: DoctorConfig,
        call=doctor,
    ),
    "train": Command(
        "fine-tune a policy on a dataset",
        flags=lambda: RunConfig,
        call=train,
        run_dir=lambda config: config.run_dir,
    ),
    "eval": Command(
        "report validation loss and open-loop action error of a run or a LeRobot policy on held-out or other data",
        flags=lambda: EvalConfig,
        call=evaluate,
        operands=("RUN",),
        run_dir=lambda _, run_dir: Path(run_dir),
    ),
    "export": Command(
        "write a checkpoint as a LeRobot pretrained_model folder",
        flags=lambda: ExportConfig,
        call=export,
        operands=("RUN", "DIR"),
        run_dir=lambda _, run_dir, __: Path(run_dir),
    ),
    "report": Command(
        "write RUN/report.html, or a page that compares several runs",
        flags=lambda: ReportConfig,
        call=report,
        operands=("RUN...",),
        run_dir=lambda _, run_dir, *__: Path(run_dir),
    ),
}


@dataclass(frozen=True)
class Program:
    """Commands of one program, and the source folder whose error messages are shown unchanged."""

    name: str
    commands: Mapping[str, Command]
    folder: Path


VLATUNE = Program("vlatune", COMMANDS, Path(__file__).parent)


def main(argv: Sequence[str] | None = None, program: Program = VLATUNE) -> int:
    """Run one command; return 0, 1 (runtime error), 2 (usage error) or 130 (Ctrl-C)."""
    run_dir = None
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if text := _information(program, words):
            print(text, flush=True)
            return OK
        command = program.commands[words[0]]
        usage = command.usage(program.name, words[0])
        config, operands = parse_command(words[1:], command.flags(), operands=command.operands, usage=usage)
        run_dir = command.run_dir(config, *operands) if command.run_dir else None
        code = command.call(config, *operands)
    except BrokenPipeError:  # e.g. `vlatune train --help | head`; discard buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("VLATUNE_TRACEBACK") == "1":
            warn("".join(traceback.format_exception(error)))
        text, code = _explain(error, run_dir, program)
        warn(f"vlatune: {text}")
        return code
    return code or OK


def run(program: Program = VLATUNE) -> NoReturn:
    """Run one command and exit the process with its exit code."""
    _import_nothing_from_here()
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a late call to Ray would start a cluster that nobody stops
    code = main(program=program)
    internals = sys.modules.get("vlatune.ray_internals")  # not loaded if no run was started
    if internals is not None and internals.is_blocked():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Ray's exit handlers would block
    sys.exit(code)


def _import_nothing_from_here() -> None:
    """Remove the working directory from the import path of this process and its Python children.

    `python -m`, `python -c` and an empty entry in PYTHONPATH add it, and it may be an untrusted
    dataset.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    here = os.path.realpath(os.curdir)
    installed = {os.path.realpath(folder) for folder in (*sysconfig.get_paths().values(), Path(__file__).parents[1])}
    if here in installed:
        return
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    if folders := os.environ.get("PYTHONPATH"):
        kept = [folder for folder in folders.split(os.pathsep) if os.path.realpath(folder) != here]
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)


def _information(program: Program, words: list[str]) -> str | None:
    """Return the version or a help text if the words ask for it; reject unknown commands."""
    match words:
        case []:
            raise ValueError(
                f"COMMAND is missing; usage: {program.name} COMMAND; `{program.name} --help` lists the commands"
            )
        case ["--version" | "-V", *_]:
            return f"vlatune {__version__}"
        case ["--help" | "-h", *_]:
            from vlatune.config.help import table

            commands = table({name: command.description for name, command in program.commands.items()})
            usage = f"usage: {program.name} COMMAND [--flag=value ...]"
            return f"{usage}\n\n{commands}\n\n`{program.name} COMMAND --help` lists a command's flags."
        case [name, *rest] if name in program.commands:
            command = program.commands[name]
            return _command_help(command, command.usage(program.name, name)) if {"--help", "-h"} & {*rest} else None
    hint = did_you_mean(words[0], program.commands) or f"; `{program.name} --help` lists the commands"
    raise ValueError(f"unknown command '{words[0]}'{hint}")


def _command_help(command: Command, usage: str) -> str:
    from vlatune.config.help import help_text, option_help, table
    from vlatune.registry import all_recipes, get_policy_info, policy_types

    cls = command.flags()
    parts = [f"usage: {usage}", f"{command.description[0].upper()}{command.description[1:]}."]
    if fields(cls):
        parts.append(help_text(cls))
    if takes_lerobot(cls):
        infos = [get_policy_info(name) for name in policy_types()]
        modes = {
            info.type: f"{info.title}: {', '.join(f'{mode} ({what})' for mode, what in info.train_modes.items())}"
            for info in infos
        }
        parts.append("policy types and their fine-tuning modes (--policy.train):\n" + table(modes))
        parts += [
            f"options of {info.title} (--policy.type={info.type}), named as in LeRobot:\n{option_help(info.options)}"
            for info in infos
            if fields(info.options)
        ]
        parts.append("recipes (--recipe):\n" + table({name: one.description for name, one in all_recipes().items()}))
    return "\n\n".join(parts)


def _explain(error: BaseException, run_dir: Path | None, program: Program) -> tuple[str, int]:
    """Return a one-line message for an error, and the exit code.

    A ValueError, RuntimeError or OSError raised by vlatune is a complete message for the user.
    Errors of libraries are shortened, and their traceback is written to a file.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, TerminatedError):
        return str(error), SIGNALLED + error.number
    code = MISUSED if isinstance(error, ValueError) else FAILED
    if isinstance(error, (ValueError, RuntimeError, OSError)) and _raised_in({VLATUNE.folder, program.folder}, error):
        return f"error: {' '.join(str(error).split())}", code
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"error: {error.filename}: {error.strerror}", code
    text = " ".join(str(error).split())
    short = text if len(text) <= MAX_FOREIGN_TEXT else f"{text[:MAX_FOREIGN_TEXT]}..."
    kept = _write_traceback(error, run_dir)
    return f"error: {type(error).__name__}: {short} (traceback in {kept})", code


def _raised_in(folders: set[Path], error: BaseException) -> bool:
    """True if the error was raised by a source file below one of the folders."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not folders.isdisjoint(Path(frames[-1].filename).parents)


def _write_traceback(error: BaseException, run_dir: Path | None) -> Path:
    """Write RUN/logs/traceback.txt if the run folder exists, else a temporary file."""
    text = redacted("".join(traceback.format_exception(error)))
    try:
        if run_dir is None or not run_dir.is_dir():
            raise FileNotFoundError(run_dir)
        path = make_folder(run_dir, "logs") / "traceback.txt"
        write_text(path, text)
    except (OSError, ValueError):  # no run folder, or not writable
        handle, name = tempfile.mkstemp(prefix="vlatune-traceback-", suffix=".txt")
        os.close(handle)
        path = Path(name)
        write_text(path, text)
    return path


if __name__ == "__main__":
    run()
