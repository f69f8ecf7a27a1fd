"""Canary secrets in a real run: none is in anything that it writes, nor in what the system and the cluster list of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository_files import ROOT
from watched_run import CANARY, FROM_ENVIRONMENT

pytestmark = pytest.mark.early

VARIABLES = {
    "AWS_SECRET_ACCESS_KEY": "canaryA7c4/Qz5k/W9xT2nB8aws",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdefcafe7c41",
    "HF_TOKEN": "hf_canaryA7c4Qz5kW9xT2nB8",
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=canaryA7c4azure==;",
    "DATABASE_PW": "canaryA7c4pw",
    "SERVICE_BEARER": "canaryA7c4bearer",
    "SERVICE_JWT": "canaryA7c4jwt",
    "TLS_PEM": "-----BEGIN PRIVATE KEY-----\ncanaryA7c4pem\n-----END PRIVATE KEY-----",
}
CANARIES = [CANARY, "canaryA7c4", "0123456789abcdefcafe7c41"]


ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Before a command: it runs with a loopback interface and no other."""


def can_be_alone() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def run(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where -> all text that was found there, after a run of two steps whose last error quotes every secret."""
    folder = tmp_path_factory.mktemp("secrets")
    flags = {
        "dataset.root": dataset_v3,
        "policy.path": small_base,
        "policy.train": "heads",
        "output_dir": folder / "run",
    }
    flags |= {"steps": 2, "batch_size": 4, "log_freq": 1, "ray.num_cpus": 2, "save_freq": 1, "num_workers": 2}
    script = Path(__file__).parent / "watched_run.py"
    words = [
        sys.executable,
        str(script),
        str(folder / "seen.json"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    env = os.environ | VARIABLES | {FROM_ENVIRONMENT: ",".join(VARIABLES), "PYTHONPATH": ":".join(sys.path)}
    env.pop("VLATUNE_TRACEBACK", None)
    done = subprocess.run(
        [*ALONE, *words] if can_be_alone() else words, env=env, capture_output=True, text=True, check=False
    )
    assert (folder / "seen.json").exists(), done.stderr[-3000:]
    seen = json.loads((folder / "seen.json").read_text())
    files = {str(path.relative_to(folder)): path for path in (folder / "run").rglob("*") if path.is_file()}
    return {
        "printed": done.stdout + done.stderr,
        **{f"{what} that are listed": "\n".join(texts) for what, texts in seen.items()},
        **{name: f"{name} {path.read_bytes().decode(errors='replace')}" for name, path in files.items()},
    }


@pytest.mark.timeout(280)
def test_no_secret_is_in_anything_written_or_listed(run: dict[str, str]) -> None:
    assert [(where, canary) for where, text in run.items() for canary in CANARIES if canary in text] == []


def test_it_was_looked_at(run: dict[str, str]) -> None:
    """Else the test above shows nothing."""
    assert "error: OSError" in run["printed"]
    assert "s3://***@bucket" in run["printed"]
    assert "ray::" in run["arguments that are listed"]
    assert "entrypoint" in run["cluster that are listed"]
    assert "raylet" in run["files that are listed"]
    assert {
        "run/config.json",
        "run/metrics.jsonl",
        "run/report.html",
        "run/summary.json",
        "run/logs/traceback.txt",
    } <= run.keys()
    assert any("tfevents" in name for name in run)
    assert "***" in run["run/logs/traceback.txt"]


@pytest.mark.skipif(not can_be_alone(), reason="needs a network namespace of its own")
def test_a_run_needs_no_network(run: dict[str, str]) -> None:
    assert json.loads(run["run/summary.json"].partition(" ")[2])["optimizer_steps"] == 2


@pytest.mark.skipif(not can_be_alone(), reason="else others' listeners are listed, too")
def test_nothing_of_a_run_listens_but_on_loopback(run: dict[str, str]) -> None:
    lines = run["listening that are listed"].splitlines()
    assert any("gcs_server" in line for line in lines)
    assert [line for line in lines if not line.split()[4].startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:"))] == []
    assert [line for line in lines if line.startswith("udp")] == []


@pytest.mark.skipif(not can_be_alone(), reason="else others' listeners are listed, too")
def test_every_listener_of_a_run_is_in_the_table(run: dict[str, str]) -> None:
    """By the names of processes, of which `ss` has the first 15 letters; one that ends meanwhile has none."""
    listening = set(re.findall(r'users:\(\("([^"]+)"', run["listening that are listed"]))
    told = re.findall(r"`(ray::\w+|gcs_server|raylet|python)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert {"ray::RayTrainWo", "raylet", "gcs_server"} <= listening
    assert [name for name in listening if not any(name.partition(".")[0] == one[:15] for one in told)] == []
