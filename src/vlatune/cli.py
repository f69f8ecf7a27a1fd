"""The command line: `vlatune COMMAND [operands] [--flag=value ...]`.

A command is a config class, which gives its flags and its help, and a function that calls one other function with
what was parsed. Those functions are imported when they are called, so that help and mistakes in flags answer at once.
However a command ends, the terminal gets one line and an exit code (`_explain`), never a bare traceback.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from vlatune import __version__
from vlatune.bench.options import FeedBench, ReaderBench, ResumeBench, StepBench, TrainBench
from vlatune.config import DemoConfig, DoctorConfig, EvalConfig, ExportConfig, ReportConfig, RunConfig
from vlatune.console import progress_bar, redacted, say, warn
from vlatune.errors import TerminatedError, did_you_mean
from vlatune.files import make_folder, write_text
from vlatune.flags import MissingOperandError, parse_command

OK, FAILED, MISUSED, INTERRUPTED, SIGNALLED = 0, 1, 2, 130, 128
MAX_FOREIGN_TEXT = 300


@dataclass(frozen=True)
class Command:
    description: str
    flags: Callable[[], type]
    """The config class; a function, so that it is imported only when needed."""
    call: Callable[..., int | None]
    """Takes the config, then the operands; may return an exit code."""
    operands: tuple[str, ...] = ()
    run_dir: Callable[..., Path] | None = None
    """The run folder, out of the same arguments: where a traceback belongs."""

    def usage(self, name: str) -> str:
        return " ".join(["vlatune", name, *self.operands, *(["[--flag=value ...]"] if fields(self.flags()) else [])])


@dataclass(frozen=True)
class NoFlags:
    """For a command that has none."""


def demo(options: DemoConfig) -> None:
    from vlatune.demo import run_demo

    run_demo(options)


def make_dataset(spec: Any, folder: str) -> None:
    from vlatune.dataset.synthetic import generate

    with progress_bar("episodes") as show:
        generate.make_dataset(Path(folder), spec, on_episode=lambda index: show(index + 1, spec.episodes))
    say(f"{folder}: {spec.episodes} episodes")


def inspect(options: Any, *datasets: str) -> int:
    from vlatune.inspect.inspection import inspect_dataset, write_dataset_checksums
    from vlatune.inspect.text import check_names, command_text, inspection_text, train_command

    names = options.rename_map
    with progress_bar("videos") as show:
        found = [inspect_dataset(one, videos=options.videos, rename_map=names, on_video=show) for one in datasets]
    check_names(found, names)
    if options.json:
        each = [asdict(one) for one in found]
        whole = each[0] if len(each) == 1 else {"datasets": each}
        print(json.dumps(whole | {"command": train_command(found, names)}), flush=True)
    else:
        width = shutil.get_terminal_size().columns
        texts = [*(inspection_text(one, width=width) for one in found), command_text(found, names)]
        say("\n\n".join(text for text in texts if text))
    if options.write_checksums:
        for one in found:
            warn(f"vlatune: {write_dataset_checksums(one)}")
    return FAILED if any(one.has_errors for one in found) else OK


def doctor(options: DoctorConfig) -> int:
    from vlatune.doctor.doctor_report import doctor_text, run_doctor

    with progress_bar("checks") as show:
        found, page = run_doctor(options, on_check=show)
    if options.json:
        print(json.dumps(found.to_json() | {"page": page and str(page)}), flush=True)
    else:
        say(doctor_text(found, page, width=shutil.get_terminal_size().columns))
    return FAILED if found.status == "fail" else OK


def train(config: RunConfig) -> None:
    from vlatune.train.driver import launch

    launch.train(config)


def evaluate(options: EvalConfig, path: str) -> None:
    if options.env.type is not None:
        from vlatune.evaluate.simulation import simulate, simulation_text

        found = simulate(Path(path), options)
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            say(simulation_text(found, path))
        return
    from vlatune.evaluate.evaluate_run import evaluate_run

    with progress_bar("batches") as show:
        figures = evaluate_run(Path(path), options, on_batch=show)
    if options.json:
        print(json.dumps(figures), flush=True)
    else:
        from vlatune.evaluate.eval_text import eval_text
        from vlatune.evaluate.evaluate_run import page_of

        say(f"{eval_text(figures, path)}\n\nreport: {page_of(Path(path), options, figures)}")


def export(options: ExportConfig, run_dir: str, folder: str) -> None:
    from vlatune.checkpoint.export import export_run, export_text

    done = export_run(Path(run_dir), Path(folder), options, warn=warn)
    say(export_text(done))


def report(options: ReportConfig, *run_dirs: str) -> None:
    from vlatune.report.compare import write_comparison
    from vlatune.report.html import watch, write_report

    folders, reload_s = [Path(one) for one in run_dirs], options.every_s if options.watch else None
    file = Path(options.output) if options.output else None

    def write() -> Path:
        if len(folders) > 1:
            return write_comparison(folders, file or Path("comparison.html"), reload_s=reload_s)
        return write_report(folders[0], file=file, reload_s=reload_s)

    if options.watch:
        watch(write, folders, every_s=options.every_s, say=say)
    else:
        say(str(write()))


def bench(_: NoFlags, name: str) -> None:
    """Reached only with a name that is none: each benchmark is a command of its own."""
    hint = did_you_mean(name, BENCHMARKS) or f"; there are {', '.join(BENCHMARKS)}"
    raise ValueError(f"unknown benchmark '{name}'{hint}")


def run_benchmark(name: str, options: Any) -> None:
    match name:
        case "reader":
            from vlatune.bench.reader.reader_bench import run
        case "feed":
            from vlatune.bench.feed.feed_bench import run
        case "step":
            from vlatune.bench.step.step_bench import run
        case "resume":
            from vlatune.bench.resume.resume_bench import run
        case _:
            from vlatune.bench.train.train_bench import run
    run(options)


def bench_table(_: NoFlags, *places: str) -> None:
    from vlatune.bench import results_table

    results_table.run(places)


def _inspect_options() -> type:
    from vlatune.inspect.inspection import InspectOptions

    return InspectOptions


def _synthetic_spec() -> type:
    from vlatune.dataset.synthetic.generate import SyntheticSpec

    return SyntheticSpec


COMMANDS = {
    "demo": Command(
        "make a small dataset, fine-tune a small model on it, evaluate it, write the report",
        flags=lambda: DemoConfig,
        call=demo,
        run_dir=lambda options: options.run_dir,
    ),
    "make-dataset": Command(
        "synthesise a LeRobot dataset, with each frame's id burned into its pixels",
        flags=_synthetic_spec,
        call=make_dataset,
        operands=("DIR",),
    ),
    "inspect": Command(
        "features, episodes, tasks, cameras, statistics and sizes of datasets, what is wrong with them, and how to train on them",
        flags=_inspect_options,
        call=inspect,
        operands=("DATASET...",),
    ),
    "doctor": Command(
        "check a run before it costs anything: takes all flags of `train`, starts nothing, and says what would mend what it finds",
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
        "validation loss and open-loop action error of a run, or of a LeRobot policy's folder, on held-out episodes or another dataset",
        flags=lambda: EvalConfig,
        call=evaluate,
        operands=("RUN",),
        run_dir=lambda _, run_dir: Path(run_dir),
    ),
    "export": Command(
        "write a run's checkpoint as a LeRobot pretrained_model folder",
        flags=lambda: ExportConfig,
        call=export,
        operands=("RUN", "DIR"),
        run_dir=lambda _, run_dir, __: Path(run_dir),
    ),
    "report": Command(
        "write RUN/report.html anew; of several runs, a page that compares them",
        flags=lambda: ReportConfig,
        call=report,
        operands=("RUN...",),
        run_dir=lambda _, run_dir, *__: Path(run_dir),
    ),
    "bench": Command(
        "measure one part against its peers: reader, feed, step, resume, train; table: results and bars; `vlatune bench NAME --help` lists its flags",
        flags=lambda: NoFlags,
        call=bench,
        operands=("NAME",),
    ),
}

BENCHMARKS = {
    name: Command(description, flags=lambda own=settings: own, call=partial(run_benchmark, name))
    for name, settings, description in (
        ("reader", ReaderBench, "how near to the decoder's limit a dataset is read"),
        ("feed", FeedBench, "whether a consumer is kept fed, and nothing spills"),
        ("step", StepBench, "what a micro-step of a policy costs, and how often it waits"),
        ("resume", ResumeBench, "what a checkpoint and a killed process cost"),
        ("train", TrainBench, "the whole, end to end, against `lerobot-train` itself"),
    )
} | {
    "table": Command(
        "the last lines of benchmarks, in files or folders, beside the bars: a Markdown table",
        flags=lambda: NoFlags,
        call=bench_table,
        operands=("FILE...",),
    )
}
"""Commands of two words, `bench NAME`, with flags of their own."""


@dataclass(frozen=True)
class Invocation:
    """A command line, understood."""

    call: Callable[[], int | None]
    run_dir: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (the world), 2 (the user's input) or 130 (Ctrl-C)."""
    run_dir = None
    try:
        invocation = _make_invocation(list(sys.argv[1:] if argv is None else argv))
        run_dir = invocation.run_dir
        code = invocation.call()
    except BrokenPipeError:  # `vlatune train --help | head`; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("VLATUNE_TRACEBACK") == "1":
            warn("".join(traceback.format_exception(error)))
        text, code = _explain(error, run_dir)
        warn(f"vlatune: {text}")
        return code
    return code or OK


def run() -> NoReturn:
    """The program `vlatune`: one command, and this process ends with its code."""
    code = main()
    internals = sys.modules.get("vlatune.ray_internals")  # not loaded where no run was started
    if internals is not None and internals.is_asked():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what Ray has registered for the end would not come back
    sys.exit(code)


def _make_invocation(words: list[str]) -> Invocation:
    match words:
        case []:
            raise ValueError("COMMAND is missing; usage: vlatune COMMAND; `vlatune --help` lists the commands")
        case ["--version" | "-V", *_]:
            return Invocation(partial(print, f"vlatune {__version__}", flush=True))
        case ["--help" | "-h", *_]:
            return Invocation(partial(print, _help(), flush=True))
        case [name, *_] if name not in COMMANDS:
            hint = did_you_mean(name, COMMANDS) or "; `vlatune --help` lists the commands"
            raise ValueError(f"unknown command '{name}'{hint}")
    name, command, rest = _find_command(words)
    if "--help" in rest or "-h" in rest:
        return Invocation(partial(print, _command_help(name, command), flush=True))
    return _make_command_invocation(name, command, rest)


def _find_command(words: list[str]) -> tuple[str, Command, list[str]]:
    """The name of a command, the command, and what comes after the name."""
    name, *rest = words
    of_bench = [word for word in rest if word in BENCHMARKS] if name == "bench" else []
    if of_bench:
        rest.remove(of_bench[0])
        return f"bench {of_bench[0]}", BENCHMARKS[of_bench[0]], rest
    return name, COMMANDS[name], rest


def _make_command_invocation(name: str, command: Command, words: list[str]) -> Invocation:
    try:
        config, operands = parse_command(words, command.flags(), operands=command.operands)
    except MissingOperandError as error:
        raise ValueError(f"{error}; usage: {command.usage(name)}") from None
    run_dir = command.run_dir(config, *operands) if command.run_dir else None
    return Invocation(partial(command.call, config, *operands), run_dir)


def _help() -> str:
    from vlatune.flags import table

    commands = table({name: command.description for name, command in COMMANDS.items()})
    return (
        f"usage: vlatune COMMAND [--flag=value ...]\n\n{commands}\n\n`vlatune COMMAND --help` lists a command's flags."
    )


def _command_help(name: str, command: Command) -> str:
    from vlatune.flags import help_text, table
    from vlatune.policies.registry import all_recipes

    cls = command.flags()
    parts = [f"usage: {command.usage(name)}", f"{command.description[0].upper()}{command.description[1:]}."]
    if fields(cls):
        parts.append(help_text(cls))
    if any(field.name == "recipe" for field in fields(cls)):
        parts.append("policies and what --policy.train may be:\n" + table(_policy_lines()))
        parts += _override_parts()
        parts.append("recipes:\n" + table({one: recipe.description for one, recipe in all_recipes().items()}))
    return "\n\n".join(parts)


def _policy_lines() -> dict[str, str]:
    from vlatune.policies.registry import get_policy, policy_types

    cards = {name: get_policy(name) for name in policy_types()}
    ways = {name: ", ".join(f"{way} ({what})" for way, what in card.train_ways.items()) for name, card in cards.items()}
    return {name: f"{card.title}: {ways[name]}" for name, card in cards.items()}


def _override_parts() -> list[str]:
    """Of each policy: the fields of its config that a run may change."""
    from vlatune.flags import flag_lines
    from vlatune.policies.registry import get_policy, policy_types

    cards = [card for card in map(get_policy, policy_types()) if card.overrides]
    return [
        f"settings of {card.title} (--policy.type={card.type}), as LeRobot's:\n"
        + flag_lines({f"policy.{name}": (one.kind, one.help, one.default) for name, one in card.overrides.items()})
        for card in cards
    ]


def _explain(error: BaseException, run_dir: Path | None) -> tuple[str, int]:
    """One line about how a command ended, and its exit code.

    A ValueError, RuntimeError or OSError that vlatune's own code raised is a message to the user and complete in
    itself. What a library raised is cut short here and kept whole in a file.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, TerminatedError):
        return str(error), SIGNALLED + error.number
    code = MISUSED if isinstance(error, ValueError) else FAILED
    if isinstance(error, (ValueError, RuntimeError, OSError)) and _raised_by_us(error):
        return f"error: {' '.join(str(error).split())}", code
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"error: {error.filename}: {error.strerror}", code
    text = " ".join(str(error).split())
    short = text if len(text) <= MAX_FOREIGN_TEXT else f"{text[:MAX_FOREIGN_TEXT]}..."
    kept = _write_traceback(error, run_dir)
    return f"error: {type(error).__name__}: {short} (traceback in {kept})", code


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(__file__).parent in Path(frames[-1].filename).parents


def _write_traceback(error: BaseException, run_dir: Path | None) -> Path:
    """RUN/logs/traceback.txt where the run folder exists, else a temporary file."""
    text = redacted("".join(traceback.format_exception(error)))
    try:
        path = _log_folder(run_dir) / "traceback.txt"
        write_text(path, text)
    except (OSError, ValueError):  # no run folder, or one that is not to be written to
        handle, name = tempfile.mkstemp(prefix="vlatune-traceback-", suffix=".txt")
        os.close(handle)
        path = Path(name)
        write_text(path, text)
    return path


def _log_folder(run_dir: Path | None) -> Path:
    if run_dir is None or not run_dir.is_dir():
        raise FileNotFoundError(run_dir)
    return make_folder(run_dir, "logs")


if __name__ == "__main__":
    run()
