"""The command line: help that answers at once, one line for every mistake, and the right exit code."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from vlatune import __version__, cli
from vlatune.config import EvalConfig, RunConfig

HEAVY = ("torch", "ray", "lerobot", "transformers", "datasets", "rich")
"""What takes seconds to import and has no business in a help text."""


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Let the training end with an error, raised inside `vlatune` or outside of it."""

    def end_with(error: BaseException) -> None:
        def train(config: RunConfig) -> None:
            raise error

        module = types.ModuleType("vlatune.train.driver.launch")
        module.train = train  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "vlatune.train.driver.launch", module)
        monkeypatch.setattr("vlatune.train.driver.launch", module, raising=False)

    return end_with


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What the command said on stderr, if it was one line and nothing else."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.rstrip("\n")


def test_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vlatune {__version__}\n"


def test_help_lists_the_commands(capsys) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert command.description.split()[0] in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_goes_to_stdout(name: str, capsys) -> None:
    assert cli.main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: vlatune {' '.join([name, *cli.COMMANDS[name].operands])}")
    assert err == ""


def test_help_of_train_lists_the_recipes(capsys) -> None:
    cli.main(["train", "--help"])
    out = capsys.readouterr().out
    assert "--policy.train=" in out
    assert "  pi05-heads " in out


def test_help_imports_nothing_heavy() -> None:
    """In a process of its own, since this one has imported everything by now."""
    code = (
        "import sys; from vlatune import cli\n"
        "for words in (['--help'], ['--version'], ['nonsense'], *([name, '--help'] for name in cli.COMMANDS)):\n"
        "    cli.main(words)\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    assert not heavy, f'vlatune {words}: imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND is missing; usage: vlatune COMMAND; `vlatune --help` lists the commands"),
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["frobnicate"], "unknown command 'frobnicate'; `vlatune --help` lists the commands"),
        (["eval"], "RUN is missing; usage: vlatune eval RUN [--flag=value ...]"),
        (["report"], "RUN is missing; usage: vlatune report RUN... [--flag=value ...]"),
        (["make-dataset", "--seed=3"], "DIR is missing; usage: vlatune make-dataset DIR [--flag=value ...]"),
        (["eval", "a", "b"], "'b' is not expected here; flags are written --name=value"),
        (["train", "--batchsize=3"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["demo", "--steps=x"], "--steps=x: expected a whole number"),
    ],
)
def test_a_misused_command_line_gets_one_line_and_exit_code_2(words: list[str], message: str, capsys) -> None:
    assert cli.main(words) == 2
    assert one_line(capsys) == f"vlatune: error: {message}"


def test_a_command_calls_one_function_with_what_was_parsed(monkeypatch, capsys) -> None:
    called: list[object] = []
    module = types.ModuleType("vlatune.evaluate.evaluate_run")

    def evaluate_run(run_dir: Path, options: EvalConfig, *, on_batch: Callable[[int, int], None]) -> dict[str, float]:
        on_batch(1, 1)  # to a person at a terminal only
        called.extend([run_dir, options])
        return {"loss": 0.5}

    module.evaluate_run = evaluate_run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "vlatune.evaluate.evaluate_run", module)
    assert cli.main(["eval", "runs/a", "--max_samples=3", "--json"]) == 0
    assert called == [Path("runs/a"), EvalConfig(max_samples=3, json=True)]
    assert capsys.readouterr() == ('{"loss": 0.5}\n', "")


def test_make_dataset_writes_one(tmp_path, capsys) -> None:
    folder = tmp_path / "data"
    assert cli.main(["make-dataset", str(folder), "--episodes=1", "--frames", "3", "--cameras=1"]) == 0
    assert (folder / "meta" / "info.json").is_file()
    assert capsys.readouterr().out == f"{folder}: 1 episodes\n"
    assert cli.main(["make-dataset", str(folder)]) == 2
    assert "exists and is not empty" in one_line(capsys)


def test_an_error_in_our_own_words_is_the_whole_message(tmp_path, capsys) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    text = one_line(capsys)
    assert text.startswith(f"vlatune: error: {tmp_path}: not a run folder")
    assert "traceback" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad\nvalue"), 2),
        (RuntimeError("bad value"), 1),
        (KeyError("bad value"), 1),
        (OSError("bad value"), 1),
    ],
)
def test_an_error_of_a_library_is_one_line_and_its_traceback_is_kept_in_the_run(
    tmp_path, capsys, ending, error: Exception, code: int
) -> None:
    ending(error)
    assert cli.main(["train", f"--output_dir={tmp_path}"]) == code
    kept = tmp_path / "logs" / "traceback.txt"
    assert one_line(capsys).endswith(f"(traceback in {kept})")
    assert "Traceback (most recent call last)" in kept.read_text()


def test_without_a_run_folder_the_traceback_goes_to_a_temporary_file(tmp_path, capsys, ending, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ending(KeyError("x" * 10_000))
    assert cli.main(["train", f"--output_dir={tmp_path / 'none'}"]) == 1
    text = one_line(capsys)
    assert len(text) < 600
    (kept,) = tmp_path.iterdir()
    assert f"(traceback in {kept})" in text


def test_a_missing_file_is_named(capsys, ending) -> None:
    ending(FileNotFoundError(2, "No such file or directory", "weights.bin"))
    assert cli.main(["train"]) == 1
    assert one_line(capsys) == "vlatune: error: weights.bin: No such file or directory"


def test_an_interrupt_is_one_line_and_exit_code_130(capsys, ending) -> None:
    ending(KeyboardInterrupt())
    assert cli.main(["train"]) == 130
    assert one_line(capsys) == "vlatune: interrupted"


def test_the_traceback_is_shown_when_asked_for(capsys, ending, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("VLATUNE_TRACEBACK", "1")
    ending(KeyError("x"))
    assert cli.main(["train", f"--output_dir={tmp_path}"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly() -> None:
    command = [sys.executable, "-m", "vlatune.cli", "train", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 1
