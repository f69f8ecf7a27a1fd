"""Start Ray nodes in separate network namespaces, connected by a virtual cable."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
OWN = ["--num-cpus=2", f"--object-store-memory={100 << 20}"]
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
    _call(
        *inside(name),
        *RAY,
        f"--address={address}",
        f"--node-ip-address={ADDRESSES[1]}",
        *OWN,
        '--resources={"vlatune_trainer": 1}',
    )


def start_nodes(
    names: Sequence[str],
    folder: Path,
    *,
    hide_on_second: Path | None = None,
    trainers: tuple[int, int] = (1, 1),
    **env: str,
) -> str:
    """Start a head and a node that take so many training workers; return the cluster's address.

    `hide_on_second` is a folder that the second node sees empty.
    """
    port = "6379"
    first, second = (f'--resources={{"vlatune_trainer": {number}}}' for number in trainers)
    _call(
        *inside(names[0]),
        *RAY,
        "--head",
        "--include-dashboard=false",
        f"--port={port}",
        f"--node-ip-address={ADDRESSES[0]}",
        *OWN,
        first,
        f"--temp-dir={folder}",
        **env,
    )
    address = f"{ADDRESSES[0]}:{port}"
    start = [*RAY, f"--address={address}", f"--node-ip-address={ADDRESSES[1]}", *OWN, second]
    if hide_on_second is not None:
        start = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{hide_on_second}" && exec "$@"', "sh", *start]
    _call(*inside(names[1]), *start, **env)
    return address


def run_inside(name: str, words: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    command = [*inside(name), *words]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False, timeout=600)


def inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


@contextmanager
def s3_inside(name: str, bucket: str) -> Iterator[dict[str, str]]:
    """Run an S3 server with an empty bucket on the first address; yield the variables that lead to it."""
    url = f"http://{ADDRESSES[0]}:5000"
    env = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "loopback", "AWS_SECRET_ACCESS_KEY": "loopback"}
    words = [*inside(name), sys.executable, "-m", "moto.server", "-H", ADDRESSES[0], "-p", "5000"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            make = f"""
import time, urllib.request
for _ in range(600):
    try:
        urllib.request.urlopen(urllib.request.Request("{url}/{bucket}", method="PUT"))
        break
    except OSError:
        time.sleep(0.1)
else:
    raise SystemExit("no answer")
"""
            _call(*inside(name), sys.executable, "-c", make)
            yield env
        finally:
            server.kill()


def copy_inside(name: str, source: str, target: str, **env: str) -> None:
    """Copy a folder to or from S3."""
    call = "get" if source.startswith("s3://") else "put"
    text = f"import fsspec; fsspec.filesystem('s3').{call}({source!r}, {target!r}, recursive=True)"
    _call(*inside(name), sys.executable, "-c", text, **env)


def _call(*words: str, **more: str) -> None:
    env = os.environ | {"RAY_AUTH_MODE": "disabled"} | more
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
