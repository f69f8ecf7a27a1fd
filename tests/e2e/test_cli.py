"""The command line: help, one-line errors, and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlatune import __version__, cli
from vlatune.config.settings import RunConfig
from vlatune.errors import TerminatedError

HEAVY = ("torch", "ray", "lerobot", "transformers", "datasets", "rich")
"""Packages that take seconds to import."""


def ending(error: BaseException) -> cli.Program:
    """Return a program whose `train` command raises an error."""

    def train(config: RunConfig) -> None:
        raise error

    command = cli.Command("train", flags=lambda: RunConfig, call=train, run_dir=lambda config: config.run_dir)
    return cli.Program("vlatune", {"train": command}, Path("/nowhere"))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return stderr, which must be the only output and one line."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.rstrip("\n")


def test_version_and_the_list_of_commands(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vlatune {__version__}\n"
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_goes_to_stdout(name: str, capsys) -> None:
    assert cli.main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: vlatune {' '.join([name, *cli.COMMANDS[name].operands])}")
    assert err == ""
    assert name != "train" or ("--policy.train=" in out and "  pi05-heads " in out)


def test_help_imports_nothing_heavy() -> None:
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
def test_a_usage_error_is_one_line_with_exit_code_2(words: list[str], message: str, capsys) -> None:
    assert cli.main(words) == 2
    assert one_line(capsys) == f"vlatune: error: {message}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad\nvalue"), 2),
        (RuntimeError("bad value"), 1),
        (KeyError("bad value"), 1),
        (OSError("bad value"), 1),
    ],
)
def test_an_error_of_a_library_is_one_line_with_its_traceback_in_the_run(tmp_path, capsys, error, code) -> None:
    assert cli.main(["train", f"--output_dir={tmp_path}"], ending(error)) == code
    kept = tmp_path / "logs" / "traceback.txt"
    assert one_line(capsys).endswith(f"(traceback in {kept})")
    assert "Traceback (most recent call last)" in kept.read_text()


def test_without_a_run_folder_the_traceback_is_a_temporary_file(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["train", f"--output_dir={tmp_path / 'none'}"], ending(KeyError("x" * 10_000))) == 1
    text = one_line(capsys)
    assert len(text) < 600
    (kept,) = tmp_path.iterdir()
    assert f"(traceback in {kept})" in text


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "weights.bin"),
            1,
            "error: weights.bin: No such file or directory",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TerminatedError("stopped", 15), 143, "stopped"),
    ],
)
def test_known_errors_have_a_short_message(capsys, error, code, text) -> None:
    assert cli.main(["train"], ending(error)) == code
    assert one_line(capsys) == f"vlatune: {text}"


def test_a_variable_shows_the_traceback(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("VLATUNE_TRACEBACK", "1")
    assert cli.main(["train", f"--output_dir={tmp_path}"], ending(KeyError("x"))) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly() -> None:
    command = [sys.executable, "-m", "vlatune.cli", "train", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 1
