"""Where a hostile case is laid out: copies of an honest dataset, base model and run, and what must stay untouched.

A case is a row: what is put where, the command, what it must say and its exit code. The words of a command may hold
{dataset}, {older}, {base}, {run}, {out} and {outside}.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

CANARY = "canary-4f1d-must-not-be-carried-out"
INSPECT, REPORT, EXPORT = "inspect {dataset}", "report {run}", "export {run} {out}"
TRAIN = "train --dataset.root={dataset} --policy.path={base} --output_dir={out} --batch_size=4"
RESUME = (
    "train --resume=true --dataset.root={dataset} --policy.path={base} --output_dir={run} --batch_size=4 --steps=20 "
    "--dataset.run_length=4 --dataset.window_rows=8 --policy.train=heads"
)
DOCTOR = "doctor --html={outside}/../doctor.html"
"""In the place of `train`."""
COMPARE = "report {run} {outside}/../another --output={outside}/../compared.html"
READ = "read_lerobot {dataset}"
"""Not of the command line: the Python function, its rows taken. An error of it counts as the commands' exit codes do."""


@dataclass
class Place:
    """The folders of one case; copied when they are first asked for."""

    folder: Path
    honest: dict[str, Path]
    """dataset, older, base and run, as they are before anybody touched them."""

    @cached_property
    def dataset(self) -> Path:
        return self._copy("dataset")

    @cached_property
    def older(self) -> Path:
        """The same dataset in v2.1."""
        return self._copy("older")

    @cached_property
    def base(self) -> Path:
        return self._copy("base")

    @cached_property
    def run(self) -> Path:
        """A run of two steps with one checkpoint; it was made from the honest dataset and base."""
        return self._copy("run")

    @cached_property
    def outside(self) -> Path:
        """A folder of the user's that nobody may read from or write to."""
        folder = self.folder / "outside"
        (folder / "00000001").mkdir(parents=True)
        (folder / "00000001" / "precious").write_text(CANARY)
        (folder / "secret.json").write_text(json.dumps({"secret": CANARY}))
        return folder

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "00000002"

    @property
    def marker(self) -> Path:
        """What a payload would create."""
        return self.folder / "code-ran"

    def words(self, command: str) -> list[str]:
        names = [name for name in ("dataset", "older", "base", "run", "outside") if f"{{{name}}}" in command]
        paths = {name: getattr(self, name) for name in names} | {"out": self.folder / "out"}
        return [_filled(word, paths) for word in command.split()]

    def _copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.honest[name], self.folder / name))


def _filled(word: str, paths: dict[str, Path]) -> str:
    for name, path in paths.items():
        word = word.replace(f"{{{name}}}", str(path))
    return word


Make = Callable[[Place], None]


@dataclass(frozen=True)
class Case:
    name: str
    make: Make
    command: str
    says: str
    code: int = 2


# Makers: each takes which folder of the place, and the file in it.


def linked_out(which: str, file: str) -> Make:
    """A link to the user's own file, which has the right content or a secret one."""

    def make(place: Place) -> None:
        path = getattr(place, which) / file
        target = place.outside / path.name
        if path.exists():
            shutil.move(path, target)
        else:
            target = place.outside / "secret.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    return make


def replaced(which: str, file: str, by: Callable[[Path], None]) -> Make:
    def make(place: Place) -> None:
        path = getattr(place, which) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        by(path)

    return make


def a_socket(path: Path) -> None:
    """Its path is longer than a socket's may be: it is bound from its own folder."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content)


def as_fifo(which: str, file: str) -> Make:
    return replaced(which, file, a_fifo)


def changed_json(which: str, file: str, change: Callable[[dict[str, Any], Place], None]) -> Make:
    def make(place: Place) -> None:
        path = getattr(place, which) / file
        content = json.loads(path.read_text())
        change(content, place)
        path.write_text(json.dumps(content))

    return make


def with_step(which: str, file: str, step: dict[str, Any]) -> Make:
    """A processor file with one more step; MARKER in it is the path that its payload would create."""

    def change(content: dict[str, Any], place: Place) -> None:
        content["steps"].append(json.loads(json.dumps(step).replace("MARKER", str(place.marker))))

    return changed_json(which, file, change)


def resealed(make: Make) -> Make:
    """The same in the run's checkpoint, whose manifest is made anew: an attacker can compute hashes, too."""

    def make_and_seal(place: Place) -> None:
        make(place)
        manifest = place.checkpoint / "manifest.json"
        paths = [path for path in place.checkpoint.rglob("*") if path.is_file() and path != manifest]
        files = {path.relative_to(place.checkpoint).as_posix(): path.read_bytes() for path in paths}
        sealed = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": sealed}))

    return make_and_seal


def beside_another(make: Make) -> Make:
    """The same, beside a run that nobody touched."""

    def make_both(place: Place) -> None:
        shutil.copytree(place.honest["run"], place.folder / "another")
        make(place)

    return make_both


def updated(which: str, file: str, **values: Any) -> Make:
    return changed_json(which, file, lambda content, _: content.update(values))


nothing: Make = partial(lambda _: None)
