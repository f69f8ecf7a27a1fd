"""Base models from the hub: fetched at a revision with the token of the environment, or rejected in one line.

huggingface_hub reads its settings when it is imported, so each case is a process of its own, against a hub on the
loopback interface.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_hub import COMMIT, REPOSITORY, Hub, running_hub

TOKEN = "hf_thisMustNeverBeSeenAnywhere"
CODE = """
import sys
from vlatune.policies.base_folder import resolve_folder
from vlatune.policies.pi05.adapter import Pi05Adapter
try:
    folder = resolve_folder(sys.argv[1], sys.argv[2] or None)
    print(folder)
    Pi05Adapter().read_spec(folder)
except ValueError as error:
    print(error)
    sys.exit(2)
"""


def run(cache: Path, endpoint: str, *, repository: str = REPOSITORY, revision: str = "", **environment: str):
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"} | environment
    command = [sys.executable, "-c", CODE, repository, revision]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=settings, cwd=cache)


def rejected(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stdout
    assert lines[0].startswith(f"hub repository '{REPOSITORY}' cannot be fetched: ")
    assert TOKEN not in done.stdout + done.stderr
    return lines[0]


def test_a_repository_is_fetched_with_the_token_of_the_environment(small_base, tmp_path):
    with running_hub(Hub(small_base, token=TOKEN)) as hub:
        done = run(tmp_path, hub.endpoint, revision="main", HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stdout + done.stderr
        folder = Path(done.stdout.strip())
        assert folder.name == COMMIT
        assert (folder / "model.safetensors").read_bytes() == (small_base / "model.safetensors").read_bytes()
        assert f"Bearer {TOKEN}" in hub.seen
    assert TOKEN not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)
    offline = run(tmp_path, "http://127.0.0.1:9", revision=COMMIT, HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout, "what was fetched once is used without a network"


def test_retries_are_reported_in_one_line(small_base, tmp_path):
    failing = Hub(small_base, refusal=(503, ""), refused_path="/resolve/", refused_times=12)
    with running_hub(failing) as hub:
        done = run(tmp_path, hub.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hub.refused_times == 0
    (line,) = [line for line in done.stderr.splitlines() if "503" in line or "etry" in line or "again" in line]
    assert line == f"vlatune: hub repository '{REPOSITORY}': HTTP Error 503; retrying for up to half a minute"


@pytest.mark.parametrize(
    ("hub", "settings", "message"),
    [
        ({}, {}, "it does not exist, or it is private and no token is set; check the name, and set HF_TOKEN"),
        ({}, {"HF_TOKEN": TOKEN[:-1]}, "or it is private and the token that is set has no access"),
        ({"refusal": (403, "GatedRepo")}, {}, "it is gated and no token is set; request access on its page"),
        ({"token": None}, {"revision": "v9"}, "it has no such revision; check --policy.revision"),
        (
            {"refusal": (403, "")},
            {"HF_TOKEN": TOKEN[:-1]},
            "the hub returned status 403; check HF_TOKEN (the token that",
        ),
    ],
    ids=["unknown", "private", "gated", "revision", "no access"],
)
def test_a_repository_that_cannot_be_read(hub, settings, message, small_base, tmp_path):
    with running_hub(Hub(small_base, **{"token": TOKEN} | hub)) as running:
        assert message in rejected(run(tmp_path, running.endpoint, **settings))


@pytest.mark.parametrize("offline", ["0", "1"], ids=["no network", "offline mode"])
def test_no_network(tmp_path, offline):
    line = rejected(run(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE=offline))
    assert "the hub cannot be reached and the cache is incomplete; check the network, HF_HUB_OFFLINE" in line
