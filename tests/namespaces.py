"""Ray nodes in network namespaces of their own, connected by a virtual cable."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
OWN = ["--num-cpus=2", f"--object-store-memory={100 << 20}", '--resources={"vlatune_trainer": 1}']
"""Resources of a node."""


def can_make_namespaces() -> bool:
    """True if this user may create network and mount namespaces."""
    try:
        subprocess.run(["unshare", "-nm", "ip", "link", "add", "type", "veth"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return os.geteuid() == 0


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Create two connected namespaces; at the end, their processes are killed."""
    names = (f"vla{os.getpid()}a", f"vla{os.getpid()}b")
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        _call("ip", "link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "v0")
            for link in ("lo", "v0"):
                _call("ip", "-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def kill_all(name: str) -> None:
    """Kill the processes of a namespace."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in map(int, found.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def unplug(name: str) -> None:
    """Cut the cable, as if the machine had lost its power."""
    _call("ip", "-n", name, "link", "set", "v0", "down")


def replace_second(name: str, address: str) -> None:
    """Replace the second node by a new one with the same resources."""
    kill_all(name)
    _call("ip", "-n", name, "link", "set", "v0", "up")
    _call(*inside(name), *RAY, f"--address={address}", f"--node-ip-address={ADDRESSES[1]}", *OWN)


def start_nodes(names: Sequence[str], folder: Path, *, hide_on_second: Path | None = None) -> str:
    """Start a head and a node with one training worker each; return the cluster's address.

    `hide_on_second` is a folder that the second node sees empty.
    """
    port = "6379"
    _call(
        *inside(names[0]),
        *RAY,
        "--head",
        "--include-dashboard=false",
        f"--port={port}",
        f"--node-ip-address={ADDRESSES[0]}",
        *OWN,
        f"--temp-dir={folder}",
    )
    address = f"{ADDRESSES[0]}:{port}"
    start = [*RAY, f"--address={address}", f"--node-ip-address={ADDRESSES[1]}", *OWN]
    if hide_on_second is not None:
        start = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{hide_on_second}" && exec "$@"', "sh", *start]
    _call(*inside(names[1]), *start)
    return address


def run_inside(name: str, words: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    command = [*inside(name), *words]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False, timeout=600)


def inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _call(*words: str) -> None:
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
