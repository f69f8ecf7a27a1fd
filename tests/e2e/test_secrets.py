"""Secrets of the environment appear neither in the files of a run nor in what the system and the cluster list."""

import json
import re

import pytest
from e2e.watched_run import CANARY
from repository_files import ROOT
from two_workers_run import TwoWorkersRun, can_unshare

CANARIES = [CANARY, "canaryA7c4", "0123456789abcdefcafe7c41"]


@pytest.fixture(scope="module")
def run(two_workers_run: TwoWorkersRun) -> dict[str, str]:
    """Return place -> text found there, after a run with a restart whose last error quotes every secret."""
    folder = two_workers_run.folder
    files = {str(path.relative_to(folder.parent)): path for path in folder.rglob("*") if path.is_file()}
    return {
        "printed": two_workers_run.printed,
        **{f"{what} that are listed": "\n".join(texts) for what, texts in two_workers_run.seen.items()},
        **{name: f"{name} {path.read_bytes().decode(errors='replace')}" for name, path in files.items()},
    }


@pytest.mark.timeout(900)
def test_no_secret_is_in_anything_written_or_listed(run: dict[str, str]) -> None:
    assert [(where, canary) for where, text in run.items() for canary in CANARIES if canary in text] == []


def test_all_places_were_searched(run: dict[str, str]) -> None:
    """Otherwise the test above proves nothing."""
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
    assert any(name.startswith("run/logs/hang-") for name in run)


@pytest.mark.skipif(not can_unshare(), reason="needs a separate network namespace")
def test_a_run_needs_no_network(run: dict[str, str]) -> None:
    assert json.loads(run["run/summary.json"].partition(" ")[2])["optimizer_steps"] == 12


@pytest.mark.skipif(not can_unshare(), reason="else others' listeners are listed, too")
def test_nothing_of_a_run_listens_but_on_loopback(run: dict[str, str]) -> None:
    lines = run["listening that are listed"].splitlines()
    assert any("gcs_server" in line for line in lines)
    assert [line for line in lines if not line.split()[4].startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:"))] == []
    assert [line for line in lines if line.startswith("udp")] == []


@pytest.mark.skipif(not can_unshare(), reason="else others' listeners are listed, too")
def test_every_listener_of_a_run_is_in_the_table(run: dict[str, str]) -> None:
    """Names of processes are compared, of which `ss` prints 15 letters; an ended process has none."""
    listening = set(re.findall(r'users:\(\("([^"]+)"', run["listening that are listed"]))
    reported = re.findall(r"`(ray::\w+|gcs_server|raylet|python)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert {"ray::RayTrainWo", "raylet", "gcs_server"} <= listening
    assert [name for name in listening if not any(name.partition(".")[0] == one[:15] for one in reported)] == []
