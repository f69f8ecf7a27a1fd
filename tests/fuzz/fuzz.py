"""Change files at random and read them: `make fuzz`, and a few fixed cases in `make test-e2e`.

The number of a case decides which file is changed and how. A changed dataset goes through `inspect`, the preflight of
a run, one pass of reading and the policy's transforms, from a folder or a remote store, and one in eight through
`doctor`; a changed run goes through `report`, a comparison, and the loading of its checkpoint.

A case is a finding if the process crashes or hangs, uses too much memory or time, raises an error that vlatune does
not handle, or delivers changed rows of a dataset with checksums. Cases run in spawned worker processes, which are
replaced after a crash, a hang, or BATCH cases.
"""

import argparse
import faulthandler
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from mutate import mutate, replace_file

MAX_CPU_S, MAX_BYTES = 10.0, 1 << 30
HANG_S = 60.0
"""Wall-clock limit of a case; generous, because the machine may be busy."""
START_S = 300.0
"""Limit of a worker's imports and its first case."""
STACKS_S = 3.0
"""Time for a hanging worker to write the stacks of its threads."""
BATCH = 400
DOCTOR = 8
"""One in so many cases goes through `doctor`."""
REMOTE = "remote dataset"
GOOD = ("rejected", "unchanged", "reported", "changed")
SPEC = {"episodes": 4, "frames": 8, "episodes_per_file": 2, "height": 64, "width": 64, "vary_length": True}
spawned = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Outcome:
    case: int
    what: str
    """The changed file and the change."""
    result: str
    """rejected, unchanged, reported (rows differ, and `inspect` reports a problem), changed (rows differ, no report);
    or a finding: unhandled, crash, hang, slow, memory, undetected (rows differ in spite of checksums)."""
    message: str = ""

    @property
    def is_finding(self) -> bool:
        return self.result not in GOOD


class UnhandledError(Exception):
    """An error that the command line would show as a traceback."""


def make_base(base: Path, dataset: Path) -> None:
    """Make a small base model; imports torch and LeRobot."""
    from vlatune.data.meta.dataset_meta import load_meta
    from vlatune.policies.pi05.tiny import make_tiny_pi05

    meta = load_meta(str(dataset))
    state, action = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    sizes = {"state_dim": state, "action_dim": action, "horizon": 5, "image_size": 32}
    make_tiny_pi05(base, cameras=meta.cameras, tasks=meta.tasks, **sizes)


def make_originals(folder: Path, base: Path | None) -> None:
    """Make the files that the cases change, and the digests of their rows."""
    from unit.untrusted.run_without_training import make_run

    from vlatune import cli
    from vlatune.demo.generate import SyntheticSpec, make_dataset

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name, version in (("dataset", "v3.0"), ("dataset v2.1", "v2.1")):
        make_dataset(folder / name, SyntheticSpec(**SPEC, version=version))
        shutil.copytree(folder / name, folder / f"{name} with checksums")
        assert cli.main(["inspect", str(folder / f"{name} with checksums"), "--write_checksums=true"]) == 0
    if base is None:
        make_base(folder / "base", folder / "dataset")
    else:
        shutil.copytree(base, folder / "base")
    make_run(folder / "dataset", folder / "base", folder / "run")
    digests = {name: read_rows(str(folder / name), folder / "base", folder) for name in ("dataset", "dataset v2.1")}
    (folder / "digests.json").write_text(json.dumps(digests))


def read_rows(dataset: str, base: Path, work: Path) -> str:
    """Read all rows as a training worker does; return their digest."""
    import numpy as np

    from vlatune.data.reader import make_unit, read_unit
    from vlatune.data.transforms import apply_all
    from vlatune.run_setup import make_setup

    setup = make_setup(config_of(dataset, base, work), preflight=True)
    digest = sha256()
    meta, spec = setup.metas[0], setup.specs[0]
    for position, length in zip(setup.training.position.tolist(), setup.training.length.tolist(), strict=True):
        frames = np.arange(length)
        rows = apply_all(setup.training_transforms(), read_unit(spec, make_unit(meta, spec, position, frames, frames)))
        for name in sorted(rows):
            values = rows[name]
            digest.update(
                str(values.tolist()).encode() if values.dtype == object else np.ascontiguousarray(values).tobytes()
            )
    return digest.hexdigest()


def config_of(dataset: str, base: Path, work: Path) -> Any:
    from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig

    return RunConfig(
        dataset=DatasetConfig(root=(dataset,)),
        policy=PolicyConfig(path=str(base), train="heads"),
        output_dir=str(work / "out"),
        batch_size=4,
    )


def ask_doctor(dataset: str, base: Path, work: Path) -> None:
    """Run all checks and write the page; errors that become findings are checked, too."""
    from vlatune.checks import doctor

    convert = doctor.finding_of
    doctor.finding_of = lambda error, check: (_explain(error), convert(error, check))[1]
    try:
        found = doctor.examine(config_of(dataset, base, work), work)
    finally:
        doctor.finding_of = convert
    texts = [doctor.finding_text(one, width=120) for one in found.findings]
    texts.append(doctor.outcome_text(found, None, width=120))
    assert "".join(texts) + doctor.doctor_page(found) + json.dumps(found.to_json())


def read_run(run: Path, dataset: Path, base: Path, other: Path) -> None:
    """Write the reports, and read the settings and the checkpoint as a resume and an export do."""
    from unit.untrusted.run_without_training import run_config

    from vlatune.export.policy_files import read_policy_files
    from vlatune.policies.pi05.adapter import SCHEMA
    from vlatune.report.compare import write_comparison
    from vlatune.report.html import write_report
    from vlatune.run.run_folder import read_config
    from vlatune.train.driver.resume_rules import find_resume_point

    errors = []
    for step in (
        lambda: write_report(run),
        lambda: write_comparison([run, other], run.parent / "compared.html"),
        lambda: read_config(run),
        lambda: find_resume_point(run_config(dataset, base, run), say=lambda _: None),
        lambda: read_policy_files(run / "checkpoints/00000002", SCHEMA),
    ):
        try:
            step()
        except (ValueError, RuntimeError, OSError) as error:
            _explain(error)
            errors.append(error)
    if errors:
        raise errors[0]


def choose(folder: Path, case: int) -> tuple[str, str, random.Random]:
    """Return the kind of folder, the file, and the random generator of the change."""
    rng = random.Random(case)
    kind = rng.choice(("dataset", "dataset", "dataset", "dataset v2.1", "base", "run"))
    if kind in ("dataset", "dataset v2.1") and rng.random() < 0.3:
        kind += " with checksums"
    if kind == "dataset" and rng.random() < 0.2:
        kind = REMOTE
    source = folder / source_of(kind)
    files = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    files = [name for name in files if name != "meta/checksums.json" and not name.endswith((".lock",))]
    weights = [
        2.0 if name.endswith(".mp4") else 4.0 if name.startswith("meta/") or name.endswith((".json", ".jsonl")) else 1.0
        for name in files
    ]
    return kind, rng.choices(files, weights)[0], rng


def source_of(kind: str) -> str:
    return "dataset" if kind == REMOTE else kind


def run_case(folder: Path, case: int, work: Path) -> tuple[str, str, str]:
    """Change one file of a copy and read it; return (what, result, message)."""
    kind, file, rng = choose(folder, case)
    shutil.copytree(folder / source_of(kind), work / "x", copy_function=os.link)
    what = f"{kind}, {file}, {mutate(work / 'x' / file, rng)}"
    if kind == "run" and file.startswith("checkpoints/") and not file.endswith("manifest.json") and rng.random() < 0.7:
        recompute_hashes(work / "x/checkpoints/00000002")
        what += ", hashes recomputed"
    try:
        if case % DOCTOR == 0 and kind not in ("run", REMOTE):
            (work / "doctor").mkdir()
            ask_doctor(*_pair(folder, kind, work / "x"), work / "doctor")
        changed = _read(folder, kind, work / "x")
    except (Exception, KeyboardInterrupt) as error:
        return what, "rejected", _explain(error)
    return what, "undetected" if changed and "checksums" in kind else changed or "unchanged", ""


def _pair(folder: Path, kind: str, changed: Path) -> tuple[str, Path]:
    """Return the dataset and the base; one of them was changed."""
    return (str(folder / "dataset"), changed) if kind == "base" else (str(changed), folder / "base")


def recompute_hashes(checkpoint: Path) -> None:
    """Rewrite the manifest, as an attacker would."""
    manifest = checkpoint / "manifest.json"
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path != manifest]
    files = {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in paths}
    hashes = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    content = json.loads(manifest.read_text()) | {"files": hashes}
    replace_file(manifest, json.dumps(content).encode())


def _read(folder: Path, kind: str, changed: Path) -> str:
    """Return `reported` or `changed` if the rows differ from the original ones."""
    if kind == "run":
        read_run(changed, folder / "dataset", folder / "base", folder / "run")
        return ""
    if kind == "base":
        read_rows(*_pair(folder, kind, changed), changed.parent)
        return ""
    if kind == REMOTE:
        import fsspec

        memory = fsspec.filesystem("memory")
        name = f"{changed.parent.name}-{time.monotonic_ns()}"  # not in a cache of this process
        memory.put(str(changed), f"/{name}", recursive=True)
        try:
            return _differs(folder, kind, f"memory://{name}", changed.parent)
        finally:
            memory.rm(f"/{name}", recursive=True)
    return _differs(folder, kind, str(changed), changed.parent)


def _differs(folder: Path, kind: str, dataset: str, work: Path) -> str:
    from vlatune.checks.inspect import inspect_dataset, inspection_text, train_command

    found = inspect_dataset(dataset, videos=True)
    assert inspection_text(found, width=120) + str(train_command([found], {})) + json.dumps(found.to_json())
    original = json.loads((folder / "digests.json").read_text())[source_of(kind).removesuffix(" with checksums")]
    is_same = read_rows(dataset, folder / "base", work) == original
    return "" if is_same else "reported" if found.findings else "changed"


def _explain(error: BaseException) -> str:
    """Return the message of a handled error; raise for one that the command line would show as a traceback."""
    from vlatune import cli

    if isinstance(error, ValueError | RuntimeError | OSError) and cli._raised_in({cli.VLATUNE.folder}, error):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return str(error)
    raise UnhandledError(f"{type(error).__name__}: {error}") from error


def warm_up(folder: Path, work: Path) -> None:
    """Read originals first, so that imports and caches are not charged to the first case."""
    shutil.copytree(folder / "run", work / "run")
    _read(folder, "dataset", folder / "dataset")
    with suppress(ValueError):
        read_run(work / "run", folder / "dataset", folder / "base", folder / "run")
    ask_doctor(str(folder / "dataset"), folder / "base", work)


@dataclass(frozen=True)
class Subject:
    """What is fuzzed; the fuzzer's own test has another."""

    warm_up: Callable[[Path, Path], None] = warm_up
    run: Callable[[Path, int, Path], tuple[str, str, str]] = run_case


def serve(connection: Connection, folder: Path, work: Path, subject: Subject) -> None:
    """Run in a worker process: answer each case with (what, result, message) until None arrives."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (work / "output").open("w") as output, (work / "stacks").open("w") as stacks:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.enable(output)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        subject.warm_up(folder, work)
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address_space + 3 * MAX_BYTES,) * 2)
        connection.send("ready")
        while (case := connection.recv()) is not None:
            (work / str(case)).mkdir()
            connection.send(_measured(subject, folder, case, work / str(case)))
            shutil.rmtree(work / str(case))


def _measured(subject: Subject, folder: Path, case: int, work: Path) -> tuple[str, str, str]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_bytes, begin_s = _status("VmRSS"), time.process_time()
    try:
        found = subject.run(folder, case, work)
    except UnhandledError as error:
        found = ("", "unhandled", f"{error}\n{''.join(traceback.format_exception(error.__cause__)[-6:])}")
    except MemoryError:
        found = ("", "memory", "MemoryError")
    used_bytes, used_s = _status("VmHWM") - before_bytes, time.process_time() - begin_s
    if used_bytes > MAX_BYTES:
        return found[0], "memory", f"{used_bytes:,} bytes"
    return (found[0], "slow", f"{used_s:.1f} s") if used_s > MAX_CPU_S else found


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


class Worker:
    """A worker process, seen from the process that asks it."""

    def __init__(self, folder: Path, work: Path, subject: Subject) -> None:
        work.mkdir()
        self._folder, self._work = folder, work
        self._connection, theirs = spawned.Pipe()
        self._process = spawned.Process(target=serve, args=(theirs, folder, work, subject), daemon=True)
        self._process.start()
        theirs.close()
        self.is_alive, self.done = True, 0
        _, result, message = self._receive(START_S)
        if result:
            raise RuntimeError(f"a worker did not start ({result}): {message}")

    def run(self, case: int, hang_s: float) -> Outcome:
        self._connection.send(case)
        what, result, message = self._receive(hang_s)
        self.done += 1
        return Outcome(case, what or ", ".join(choose(self._folder, case)[:2]), result, message)

    def _receive(self, limit_s: float) -> tuple[str, str, str]:
        try:
            if self._connection.poll(limit_s):
                found = self._connection.recv()
                return ("", "", "") if found == "ready" else found
        except EOFError:
            self.is_alive = False
            self._process.join(30)
            return "", "crash", f"exit code {self._process.exitcode}\n{self._text('output')}"
        self.is_alive = False
        assert self._process.pid is not None  # it was started
        os.kill(self._process.pid, signal.SIGUSR1)
        self._process.join(STACKS_S)
        return "", "hang", self._text("stacks")

    def _text(self, name: str) -> str:
        return (self._work / name).read_text(errors="replace")[-3000:]

    def end(self) -> None:
        if self.is_alive:
            self._connection.send(None)
        else:
            self._process.kill()
        self._process.join(30)
        self._connection.close()
        shutil.rmtree(self._work, ignore_errors=True)


def run_cases(
    folder: Path, cases: Iterable[int], *, work: Path, hang_s: float = HANG_S, subject: Subject | None = None
) -> Iterator[Outcome]:
    """Yield the outcome of each case, run by one worker process after another."""
    numbers, worker = itertools.count(), None
    try:
        for case in cases:
            worker = worker or Worker(folder, work / str(next(numbers)), subject or Subject())
            yield worker.run(case, hang_s)
            if not worker.is_alive or worker.done >= BATCH:
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("FUZZ_MINUTES", "2")))
    parser.add_argument("--seed", type=int, default=0, help="the first case; the same seed gives the same cases")
    parser.add_argument("--cases", type=int, help="run so many cases instead of some minutes")
    parser.add_argument("--also", type=int, nargs="*", default=[], help="further cases")
    parser.add_argument("--base", type=Path, help="an existing base model")
    parser.add_argument("--case", type=int, help="run one case in this process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vlatune-fuzz-") as made:
        folder, work = Path(made) / "originals", Path(made) / "work"
        folder.mkdir()
        work.mkdir()
        maker = spawned.Process(target=make_originals, args=(folder, options.base))
        maker.start()
        maker.join()
        if maker.exitcode != 0:
            raise RuntimeError("the original files could not be made; see the error above")
        if options.case is not None:
            print("\n".join(run_case(folder, options.case, work)))
            return 0
        return _run(folder, work, options)


def _run(folder: Path, work: Path, options: argparse.Namespace) -> int:
    begin_s = time.monotonic()
    numbers = itertools.count(options.seed)
    if options.cases is not None:
        numbers = iter(range(options.seed, options.seed + options.cases))
    else:
        numbers = itertools.takewhile(lambda _: time.monotonic() < begin_s + 60 * options.minutes, numbers)
    results: Counter[str] = Counter()
    findings = 0
    for one in run_cases(folder, itertools.chain(options.also, numbers), work=work):
        results[one.result] += 1
        findings += one.is_finding
        if one.is_finding or one.result == "changed":
            print(f"case {one.case}: {one.what}: {one.result}\n{one.message}".strip(), flush=True)
    seconds = round(time.monotonic() - begin_s)
    print(
        json.dumps(
            {"cases": results.total(), "findings": findings, "seed": options.seed, "seconds": seconds, **results}
        )
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
