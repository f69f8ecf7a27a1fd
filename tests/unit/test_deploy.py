"""The files in deploy/: their syntax, the commands in them, and the names that they share."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from repository_files import ROOT

from vlatune import cli
from vlatune.config.flags import parse_command
from vlatune.config.settings import RunConfig
from vlatune.train.driver.ray_cluster import ray_environment

DEPLOY = ROOT / "deploy"
WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
DOCKERFILE, SLURM = ((DEPLOY / name).read_text(encoding="utf-8") for name in ("Dockerfile", "slurm.sh"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


JOB, COMPUTE, RAYJOB = (read(name) for name in ("anyscale_job.yaml", "anyscale_compute.yaml", "rayjob.yaml"))
ENTRYPOINTS = {"rayjob.yaml": RAYJOB["spec"]["entrypoint"], "anyscale_job.yaml": JOB["entrypoint"], "slurm.sh": SLURM}


def train_config(text: str) -> RunConfig:
    """Parse the only `vlatune train` command of a shell text."""
    [line] = re.findall(r"^vlatune (train .*?)(?:[;&]|$)", text.replace("\\\n", " "), re.MULTILINE)
    name, *words = shlex.split(line.replace('"$SLURM_JOB_NUM_NODES"', "4"))
    config, _ = parse_command(words, cli.COMMANDS[name].flags())
    assert isinstance(config, RunConfig)
    return config


def pods() -> dict[str, Any]:
    """Return the pods of rayjob.yaml by group."""
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"]} | {one["groupName"]: one for one in cluster["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def containers() -> Iterator[Any]:
    for pod in pods().values():
        yield from pod["containers"]


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_commands_are_parsed(name: str) -> None:
    config = train_config(ENTRYPOINTS[name])
    assert config.num_workers == 4
    assert config.run_dir.is_absolute() or "$shared" in str(config.run_dir)


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_shell_syntax(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=ENTRYPOINTS[name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stop_leaves_time_to_save() -> None:
    waits = {int(JOB["env_vars"][WAIT]): JOB["entrypoint"]}
    for container in containers():
        [wait] = [int(one["value"]) for one in container["env"] if one["name"] == WAIT]
        waits[wait] = RAYJOB["spec"]["entrypoint"]
    [signalled_s] = map(int, re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", SLURM, re.MULTILINE))
    waits[signalled_s] = SLURM
    assert all(wait_s >= train_config(text).grace_s + 30 for wait_s, text in waits.items())
    assert all(pod["terminationGracePeriodSeconds"] >= int(JOB["env_vars"][WAIT]) for pod in pods().values())


def test_images_and_versions() -> None:
    named = {JOB["image_uri"], *(one["image"] for one in containers())}
    named |= set(re.findall(r"docker build .* -t (\S+) ", DOCKERFILE))
    assert named == {f"YOUR_REGISTRY/vlatune:{VERSION}"}
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert f"\nray=={RAYJOB['spec']['rayClusterSpec']['rayVersion']} " in lock


def test_image_is_built_from_the_lock_without_root() -> None:
    steps = re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE, re.MULTILINE)
    assert (
        "RUN",
        "python -m pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements.lock",
    ) in steps
    copied = [one for step, words in steps if step == "COPY" for one in words.split()[:-1]]
    sent = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(copied) == sorted(sent)
    assert all((ROOT / one).exists() for one in copied)
    user = [words for step, words in steps if step == "USER"][-1]
    assert all(
        f"{one['runAsUser']}:{one['runAsGroup']}" == user for one in (pod["securityContext"] for pod in pods().values())
    )
    assert not re.search(r"https?://|\w\.\w+/", DOCKERFILE), "names a host"


def test_secrets_come_from_a_kubernetes_secret() -> None:
    assert all(one["envFrom"] == [{"secretRef": {"name": "vlatune-secrets"}}] for one in containers())
    names = {one["name"] for container in containers() for one in container["env"]} | JOB["env_vars"].keys()
    assert not [name for name in names if re.search("TOKEN|SECRET|KEY|PASSWORD", name)]
    assert "runtimeEnvYAML" not in RAYJOB["spec"]  # shown in Ray's dashboard


def test_anyscale_files_name_each_other() -> None:
    comments = (DEPLOY / "anyscale_compute.yaml").read_text(encoding="utf-8")
    assert f"compute-config create -n {JOB['compute_config']} -f deploy/anyscale_compute.yaml" in comments
    assert COMPUTE["head_node"]["resources"]["GPU"] == train_config(JOB["entrypoint"]).num_workers
    assert str(train_config(JOB["entrypoint"]).storage_path).startswith("s3://"), "it holds the copy of the run folder"
    assert all(group["min_nodes"] == group["max_nodes"] for group in COMPUTE["worker_nodes"])


@pytest.mark.parametrize("text", [DOCKERFILE, SLURM], ids=["Dockerfile", "slurm.sh"])
def test_clusters_have_the_settings_of_a_local_one(text: str) -> None:
    assert all(re.search(rf"\b{name}={value}\b", text) for name, value in ray_environment().items())
