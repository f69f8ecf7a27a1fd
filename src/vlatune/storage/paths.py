"""Checks of paths on the command line, done before anything heavy is imported."""

from collections.abc import Sequence
from pathlib import Path

from vlatune.errors import did_you_mean

LOCAL_SCHEMES = ("", "file", "local")
CONFIG_FILE, METRICS_FILE, SUMMARY_FILE = "config.json", "metrics.jsonl", "summary.json"
RUN_FILES = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)
"""A run folder contains at least one of these files."""
PRETRAINED_FOLDER = "pretrained_model"


def is_local(url: str) -> bool:
    scheme, found, _ = url.partition("://")
    return not found or scheme in LOCAL_SCHEMES


def local_path(url: str) -> Path:
    return Path(url.partition("://")[2] or url).expanduser()


def run_url(run_dir: Path, storage_path: str) -> str:
    """Return the location of a run in --storage_path."""
    return f"{storage_path.rstrip('/')}/{run_dir.resolve().name}"


def require_run(path: Path, *, files: Sequence[str] = RUN_FILES) -> None:
    """Raise if a run folder contains none of the files."""
    if any((path / name).exists() for name in files):
        return
    found = f"it has no {' or '.join(files)}" if path.exists() else f"there is no such folder{similar(path)}"
    raise ValueError(f"'{path}' is not a run folder: {found}; RUN is the --output_dir of a run")


def require_dataset(url: str, *, argument: str) -> None:
    """Raise if a local dataset does not exist; URLs are not checked. `argument` is its flag."""
    folder = local_path(url)
    if is_local(url) and not (folder / "meta/info.json").exists():
        raise missing_dataset(url, argument=argument, is_folder=folder.is_dir())


def missing_dataset(url: str, *, argument: str, is_folder: bool) -> ValueError:
    """Return the error for a dataset whose folder or meta/info.json is missing."""
    if is_folder:
        return ValueError(
            f"dataset '{url}': it has no meta/info.json, so it is not a LeRobot dataset; "
            f"{argument} must be the folder that contains meta/, data/ and videos/"
        )
    hint = similar(local_path(url)) if is_local(url) else ""
    return ValueError(f"dataset '{url}': there is no such folder{hint}; check {argument}")


def is_repository(path: str) -> bool:
    """True if the path of a base model has the form of a Hub repository (owner/name)."""
    return not path.startswith((".", "/", "~")) and path.count("/") == 1


def require_base(path: str) -> None:
    """Raise if a --policy.path is neither a policy folder nor the name of a Hub repository; URLs are not checked."""
    if not is_local(path):
        return
    folder = local_path(path)
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists():
            raise ValueError(
                f"policy '{folder}': it has no {CONFIG_FILE}; --policy.path must be a LeRobot pretrained_model folder"
            )
    elif not is_repository(path):
        raise ValueError(
            f"--policy.path={path}: there is no such folder, and it is neither a hub repository (owner/name) nor a URL{similar(folder)}"
        )


def require_output(run_dir: Path, *, resumes: bool) -> None:
    """Raise if an --output_dir is a file, or with `resumes` if it contains no run."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run folder '{run_dir}': it is a file; use another --output_dir or --job_name")
    if resumes and not (run_dir / CONFIG_FILE).exists():
        raise ValueError(
            f"--resume=true: there is no run in '{run_dir}'{similar(run_dir)}; check --output_dir and --job_name"
        )


def similar(path: Path) -> str:
    """Return `; did you mean FOLDER?` if a sibling folder has a similar name, else ""."""
    try:
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    return did_you_mean(path.name, siblings, prefix=f"{path.parent}/" if path.parent != Path() else "")
