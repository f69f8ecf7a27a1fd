"""No command imports a file of the working directory, the dataset, the run folder or the base, in any of its processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VLATUNE = [str(Path(sys.executable).with_name("vlatune"))]
MODULES = (
    *(
        "numpy",
        "av",
        "vlatune",
        "torch",
        "ray",
        "lerobot",
        "pyarrow",
        "safetensors",
        "fsspec",
        "transformers",
        "tokenizers",
        "gym_pusht",
    ),
    *("json", "pickle", "multiprocessing", "sitecustomize", "usercustomize", "lerobot_policy_evil", "evil"),
)
"""Imported by the driver, Ray's workers, torch, LeRobot (plug-ins by name) or Python itself; `evil` by an entry point."""
ENTRY_POINTS = (
    "[vlatune.policies]\nevil = evil:policy\n[torch.backends]\nevil = evil:load\n[fsspec.specs]\ns9 = evil:Fs\n"
)


@pytest.fixture
def hostile(dataset_v3: Path, small_base: Path, tmp_path: Path) -> Path:
    """A dataset with a base and a place for runs in it, all of them with Python files that write to ../mark."""
    folder = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
    shutil.copytree(small_base, folder / "base")
    (folder / "runs").mkdir()
    for place in (folder, folder / "base", folder / "runs"):
        for module in MODULES:
            text = f"open({str(tmp_path / 'mark')!r}, 'a').write({f'{place.name}/{module} '!r})\n"
            (place / f"{module}.py").write_text(text)
        (place / "evil-1.0.dist-info").mkdir()
        (place / "evil-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
        (place / "evil-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def run(
    folder: Path, *words: str, program: list[str] = VLATUNE, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [*program, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)


def mark(folder: Path) -> str:
    """The hostile modules that were imported."""
    file = folder.parent / "mark"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    "words", [["--version"], ["inspect", "."], ["doctor", "--recipe=pi05_small", "--dataset.root=."]]
)
def test_commands_without_ray(hostile, words):
    run(hostile, *words)
    assert mark(hostile) == ""


def test_the_working_directory_leaves_the_path_of_python_m_and_of_what_it_starts(hostile):
    """Python itself would import a `json.py` or `vlatune.py` before our first line; what comes later is not imported."""
    for module in ("vlatune", "json", "sitecustomize", "usercustomize", "fsspec"):
        (hostile / f"{module}.py").unlink()
    done = run(hostile, "inspect", ".", program=[sys.executable, "-m", "vlatune.cli"])
    assert (done.returncode, mark(hostile)) == (0, "")
    path = os.pathsep.join(["", os.environ["PYTHONPATH"]])
    done = run(hostile, "inspect", ".", PYTHONPATH=path)
    assert (done.returncode, mark(hostile)) == (0, "")


@pytest.mark.slow
def test_a_run_and_all_that_is_made_of_it(hostile):
    """Relative paths mean what they say, and no process imports from where they lead."""
    flags = ["--policy.type=pi05", "--policy.path=base", "--dataset.root=.", "--output_dir=runs/one", "--steps=2"]
    small = ["--batch_size=2", "--eval_freq=0", "--ray.num_cpus=2", "--ray.object_store_bytes=100000000"]
    done = run(hostile, "train", *flags, *small, "--storage_path=kept")
    assert (mark(hostile), done.returncode) == ("", 0), done.stderr
    assert list((hostile / "kept" / "one" / "checkpoints").glob("*/manifest.json"))
    for module in MODULES:
        shutil.copy(hostile / f"{module}.py", hostile / "runs" / "one")
    for place, words in (
        (".", ["eval", "runs/one"]),
        (".", ["export", "runs/one", "exported"]),
        ("runs/one", ["report", "."]),
    ):
        done = run(hostile / place, *words)
        assert (mark(hostile), done.returncode) == ("", 0), done.stderr
