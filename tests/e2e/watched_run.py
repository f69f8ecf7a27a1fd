"""`python watched_run.py SEEN FAULT TRAIN_FLAGS...`: run `vlatune train` with a fault in its worker, and write to SEEN what others can see.

SEEN contains the arguments of its processes, the addresses they listen on, the cluster's jobs and key-value store, and the files of
Ray's session. At its end the run fails with an error that quotes every secret, as an error of a library may.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from local_runs import Fault, run_faulty_worker
from two_workers_run import FROM_ENVIRONMENT

from vlatune import cli
from vlatune.train.driver import launch

QUOTED = (
    "s3://AKIAX:{0}/{0}@bucket/x",
    "https://{0}@host/x",
    "https://host/x?X-Amz-Credential=AKIA&X-Amz-Signature={0}",
    "https://host/c/x?sv=2024-01-01&sig={0}",
    "S3FileSystem(pw='{0}', bearer='{0}', jwt='{0}', pem='{0}', connection_string='{0}')",
    "Authorization: Bearer {0}",
)
"""Errors of a library about a request."""
CANARY = "canaryA7c4Qz5kW9xT2nB8"

seen: dict[str, set[str]] = {"arguments": set(), "listening": set(), "cluster": set(), "files": set()}


def watch(until: threading.Event) -> None:
    while not until.wait(0.5):
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            try:
                seen["arguments"].add(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        seen["listening"] |= set(_listening())


def _listening() -> list[str]:
    try:
        return subprocess.run(["ss", "-ltnup"], capture_output=True, text=True, check=False).stdout.splitlines()[1:]
    except FileNotFoundError:  # a machine without it
        return []


def ask_cluster() -> Iterator[str]:
    """The jobs with their entry points, and every value of Ray's key-value store, as bytes are shown."""
    import ray
    from ray._private.worker import global_worker

    yield str(ray.get_runtime_context().runtime_env)
    gcs = global_worker.gcs_client
    yield str(gcs.get_all_job_info())
    for namespace in (
        None,
        b"fun",
        b"job",
        b"session",
        b"cluster",
        b"serve",
        b"tracing",
        b"dashboard",
        b"healthcheck",
        b"usage",
    ):
        for key in gcs.internal_kv_keys(b"", namespace):
            yield str(key) + str(gcs.internal_kv_get(key, namespace))


def keep_files() -> Iterator[str]:
    """The text of Ray's own files, while they are there."""
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    for path in session.rglob("*"):
        with suppress(OSError):  # a folder, a socket, or a file that Ray removes meanwhile
            yield f"{path.name} {path.read_bytes().decode(errors='replace')}"


def watched(train_until_done, fault: Fault):
    def train(*arguments) -> None:
        from vlatune.train.driver import ray_trainer

        ray_trainer.run_worker = partial(run_faulty_worker, (fault,), {})
        done = threading.Event()
        watcher = threading.Thread(target=watch, args=(done,))
        watcher.start()
        try:
            train_until_done(*arguments)
        finally:
            done.set()
            watcher.join()
            seen["cluster"] |= set(ask_cluster())
            seen["files"] |= set(keep_files())
        values = [os.environ[name] for name in os.environ[FROM_ENVIRONMENT].split(",")]
        raise OSError(" | ".join([*(text.format(CANARY) for text in QUOTED), *values]))

    return train


if __name__ == "__main__":
    file, fault, *flags = sys.argv[1:]
    launch._train_until_done = watched(launch._train_until_done, Fault(**json.loads(fault)))
    code = cli.main(["train", *flags])
    Path(file).write_text(json.dumps({name: sorted(texts) for name, texts in seen.items()}))
    sys.exit(code)
