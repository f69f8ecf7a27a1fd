"""Changed files through everything that reads them: `make fuzz`, and a short fixed part of it in `make test`.

A case is a number: it decides the file and the change. It goes through `inspect`, the preflight of a run, one pass of
reading and of the policy's transforms, from a folder or from a remote store, and one of eight through all checks of
`doctor` before; or through `report`, alone and beside another run, and the loading of a checkpoint. It fails when the process dies, hangs, takes too much memory, or an error comes out that vlatune did not mean;
and when rows of a dataset with checksums come out changed. Of rows that change without checksums it is told how many, and
of how many `inspect` had said something.

Cases run one after the other in worker processes that are spawned, never forked: a fork of a process with threads may hang
by itself, and then a hang would prove nothing. So a hang is the file's, it is run once, and the stacks of all threads are
printed. Seconds in which the kernel kept a case waiting for a core do not count: on a busy machine they say nothing of
the file. A worker that died or hangs is replaced, and each has had enough after BATCH cases.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutate import mutate, replace_file

LIMIT_S, LIMIT_BYTES = 10.0, 1 << 30
START_S = 300.0
"""For a worker's imports and its first, honest case."""
KILL_S = 3.0
"""A case that hangs gets so long to write down where."""
BATCH = 400
DOCTOR = 8
READY = "ready"
spawned = multiprocessing.get_context("spawn")
GOOD = ("refused", "fine", "told", "changed")


SPEC = {"episodes": 4, "frames": 8, "episodes_per_file": 2, "height": 64, "width": 64, "vary_length": True}
"""Of the honest datasets."""


@dataclass(frozen=True)
class Outcome:
    case: int
    kind: str
    """dataset, older, base or run; with checksums where they were written before the change."""
    what: str
    """File and change."""
    result: str
    """refused, fine, told (other rows, of which `inspect` spoke), changed (without a word); or what is wrong: bare, crash, hang,
    memory, silent."""
    said: str = ""
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.result not in GOOD


def make_honest(folder: Path, base: Path | None) -> None:
    """What the cases are copies of, and what comes out of it."""
    maker = spawned.Process(target=_make_honest, args=(folder, base))
    maker.start()
    maker.join()
    if maker.exitcode != 0:
        raise RuntimeError("the honest files could not be made; see above")


def make_base(base: Path, dataset: Path) -> None:
    """Most of what making the honest files costs: torch and LeRobot are imported for it."""
    from vlatune.dataset.meta.dataset_meta import load_meta
    from vlatune.policies.pi05.small import make_small_pi05

    meta = load_meta(str(dataset))
    state, action = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    sizes = {"state_dim": state, "action_dim": action, "horizon": 5, "image_size": 32}
    make_small_pi05(base, cameras=meta.cameras, tasks=meta.tasks, **sizes)


def _make_honest(folder: Path, base: Path | None) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))
    from honest_run import make_run

    from vlatune import cli
    from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name, version in (("dataset", "v3.0"), ("older", "v2.1")):
        make_dataset(folder / name, SyntheticSpec(**SPEC, version=version))
        shutil.copytree(folder / name, folder / f"{name} with checksums")
        assert cli.main(["inspect", str(folder / f"{name} with checksums"), "--write_checksums=true"]) == 0
    if base is None:
        make_base(folder / "base", folder / "dataset")
    else:
        shutil.copytree(base, folder / "base")
    make_run(folder / "dataset", folder / "base", folder / "run")
    digests = {name: read_rows(str(folder / name), folder / "base", folder) for name in ("dataset", "older")}
    (folder / "digests.json").write_text(json.dumps(digests))


def read_rows(dataset: str, base: Path, place: Path) -> str:
    """One pass as a worker of a run makes it; a digest of all that comes out."""
    import numpy as np

    from vlatune.dataset.reader import make_unit, read_unit
    from vlatune.pipeline.transforms import apply_all
    from vlatune.run_setup import make_setup

    setup = make_setup(config_of(dataset, base, place), preflight=True)
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


def config_of(dataset: str, base: Path, place: Path) -> Any:
    from vlatune.config import DatasetConfig, PolicyConfig, RunConfig

    return RunConfig(
        dataset=DatasetConfig(root=(dataset,)),
        policy=PolicyConfig(path=str(base), train="heads"),
        output_dir=str(place / "out"),
        batch_size=4,
    )


def ask_doctor(dataset: str, base: Path, place: Path) -> None:
    """All of its checks, and the page; an error that it tells of as one of its findings is looked at, too."""
    from vlatune.doctor import examine
    from vlatune.doctor.doctor_report import doctor_page, doctor_text

    tell = examine.refused
    examine.refused = lambda error: (_explain(error), tell(error))[1]
    try:
        found = examine.examine(config_of(dataset, base, place), place)
    finally:
        examine.refused = tell
    assert doctor_text(found, None, width=120) + doctor_page(found) + json.dumps(found.to_json())


def read_run(run: Path, dataset: Path, base: Path, other: Path) -> None:
    """Reports, settings, and the newest checkpoint as a resume and an export take it."""
    from vlatune.checkpoint.policy_files import read_policy_files
    from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
    from vlatune.policies.pi05.adapter import SCHEMA
    from vlatune.report.compare import write_comparison
    from vlatune.report.html import write_report
    from vlatune.report.run_folder import read_config
    from vlatune.train.driver.resume_rules import find_resume_point

    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(base), train="heads"),
        output_dir=str(run),
        steps=20,
        batch_size=4,
    )
    errors = []
    for step in (
        lambda: write_report(run),
        lambda: write_comparison([run, other], run.parent / "compared.html"),
        lambda: read_config(run),
        lambda: find_resume_point(config, say=lambda _: None),
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
    """(kind, file, the generator of the change) of a case."""
    rng = random.Random(case)
    kind = rng.choice(("dataset", "dataset", "dataset", "older", "base", "run"))
    if kind in ("dataset", "older") and rng.random() < 0.3:
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


REMOTE = "remote dataset"


def source_of(kind: str) -> str:
    return "dataset" if kind == REMOTE else kind


def run_case(folder: Path, case: int, place: Path) -> dict[str, str]:
    """In a worker: change one file of a copy, and read it."""
    kind, file, rng = choose(folder, case)
    shutil.copytree(folder / source_of(kind), place / "x", copy_function=os.link)
    what = f"{file}, {mutate(place / 'x' / file, rng)}"
    if kind == "run" and file.startswith("checkpoints/") and not file.endswith("manifest.json") and rng.random() < 0.7:
        seal(place / "x/checkpoints/00000002")
        what += ", sealed anew"
    try:
        if case % DOCTOR == 0 and kind not in ("run", REMOTE):
            (place / "doctor").mkdir()
            ask_doctor(*_pair(folder, kind, place / "x"), place / "doctor")
        changed = _read(folder, kind, place / "x")
    except (Exception, KeyboardInterrupt) as error:
        return {"kind": kind, "what": what, "result": "refused", "said": _explain(error)}
    result = "silent" if changed and "checksums" in kind else changed or "fine"
    return {"kind": kind, "what": what, "result": result, "said": ""}


def _pair(folder: Path, kind: str, changed: Path) -> tuple[str, Path]:
    """(dataset, base), one of which was changed."""
    return (str(folder / "dataset"), changed) if kind == "base" else (str(changed), folder / "base")


def seal(checkpoint: Path) -> None:
    """Right hashes for what was changed: an attacker can compute them, and what lies behind them is reached, too."""
    manifest = checkpoint / "manifest.json"
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path != manifest]
    files = {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in paths}
    sealed = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    content = json.loads(manifest.read_text()) | {"files": sealed}
    replace_file(manifest, json.dumps(content).encode())


def _read(folder: Path, kind: str, changed: Path) -> str:
    """`told` or `changed` where other rows came out than of the honest one."""
    if kind == "run":
        read_run(changed, folder / "dataset", folder / "base", folder / "run")
        return ""
    if kind == "base":
        read_rows(*_pair(folder, kind, changed), changed.parent)
        return ""
    if kind == REMOTE:
        import fsspec

        memory = fsspec.filesystem("memory")
        name = f"{changed.parent.name}-{time.monotonic_ns()}"  # never one that a cache of this process knows
        memory.put(str(changed), f"/{name}", recursive=True)
        try:
            return _differs(folder, kind, f"memory://{name}", changed.parent)
        finally:
            memory.rm(f"/{name}", recursive=True)
    return _differs(folder, kind, str(changed), changed.parent)


def _differs(folder: Path, kind: str, dataset: str, place: Path) -> str:
    from vlatune.inspect.inspection import inspect_dataset
    from vlatune.inspect.text import command_text, inspection_text

    found = inspect_dataset(dataset, videos=True)
    assert inspection_text(found, width=120) + command_text([found], {}) + json.dumps(asdict(found))
    honest = json.loads((folder / "digests.json").read_text())[source_of(kind).partition(" ")[0]]
    is_same = read_rows(dataset, folder / "base", place) == honest
    return "" if is_same else "told" if found.problems else "changed"


def _explain(error: BaseException) -> str:
    """What the command line would say; what it would call a traceback ends the child."""
    from vlatune import cli

    if isinstance(error, ValueError | RuntimeError | OSError) and cli._raised_by_us(error):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return str(error)
    raise BareError(f"{type(error).__name__}: {error}") from error


class BareError(Exception):
    """An error that nobody meant."""


def warm_up(folder: Path, place: Path) -> None:
    """An honest case of each kind: imports and caches are not charged to the first."""
    shutil.copytree(folder / "run", place / "run")
    _read(folder, "dataset", folder / "dataset")
    with suppress(ValueError):
        read_run(place / "run", folder / "dataset", folder / "base", folder / "run")
    ask_doctor(str(folder / "dataset"), folder / "base", place)


@dataclass(frozen=True)
class Subject:
    """What is fuzzed; the fuzzer's own test has another."""

    begin: Callable[[Path, Path], None] = warm_up
    run: Callable[[Path, int, Path], dict[str, str]] = run_case


def work(answers: Connection, folder: Path, place: Path, subject: Subject) -> None:
    """A worker's whole life: what it begins with, then the cases that it is asked for, each told in one answer."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (place / "said").open("w") as said, (place / "stacks").open("w") as stacks:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        faulthandler.enable(said)
        faulthandler.register(
            signal.SIGUSR1, file=stacks
        )  # when it is asked for: a look at threads that run may end the process
        subject.begin(folder, place)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 3 * LIMIT_BYTES,) * 2)  # not the machine's end
        answers.send(READY)
        while (case := answers.recv()) is not None:
            own = place / str(case)
            own.mkdir()
            found = _measured(subject, folder, case, own)
            shutil.rmtree(own)
            answers.send(found)


def _measured(subject: Subject, folder: Path, case: int, place: Path) -> dict[str, str]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begun = _status("VmRSS")
    try:
        found = subject.run(folder, case, place)
    except BareError as error:
        told = "".join(traceback.format_exception(error.__cause__)[-6:])
        found = {"result": "bare", "said": f"{error}\n{told}"}
    except MemoryError:
        found = {"result": "memory", "said": "MemoryError"}
    grown = _status("VmHWM") - begun
    return found | {"result": "memory", "said": f"{grown:,} bytes"} if grown > LIMIT_BYTES else found


def _status(name: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Worker:
    """A worker process, as the one that asks sees it."""

    def __init__(self, folder: Path, place: Path, limit_s: float, subject: Subject) -> None:
        place.mkdir()
        self._folder, self._place, self._limit_s = folder, place, limit_s
        self.answers, theirs = spawned.Pipe()
        self._process = spawned.Process(target=work, args=(theirs, folder, place, subject), daemon=True)
        self._process.start()
        theirs.close()
        self.case: int | None = None
        self.done, self._begun_s, self._is_ready = 0, time.monotonic(), False
        self._waited_s: dict[str, float] = {}

    @property
    def is_idle(self) -> bool:
        return self._is_ready and self.case is None

    @property
    def late_s(self) -> float:
        """How long it is overdue."""
        most_s = self._limit_s if self._is_ready else START_S
        return -1.0 if self.is_idle else self._seconds() - most_s

    def ask(self, case: int) -> None:
        self.case, self._begun_s, self._waited_s = case, time.monotonic(), self._waited()
        self.answers.send(case)

    def _seconds(self) -> float:
        """Since it was asked, without those in which the thread that waited longest for a core waited."""
        waited = self._waited()
        longest_s = max((waited[thread] - self._waited_s.get(thread, 0.0) for thread in waited), default=0.0)
        return time.monotonic() - self._begun_s - longest_s

    def _waited(self) -> dict[str, float]:
        """Thread -> seconds in which it could have run and got no core; of those that are there."""
        found = {}
        for file in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        return found

    def answer(self) -> Outcome | None:
        """Its answer, when there is one to be had; EOFError when it is dead."""
        found = self.answers.recv()
        if found == READY:
            self._is_ready = True
            return None
        outcome = self._outcome(found)
        self.case, self.done = None, self.done + 1
        return outcome

    def broken(self, result: str) -> Outcome:
        """It died or hangs: what is known of that."""
        if self.case is None:
            raise RuntimeError(f"a worker did not begin ({result}):\n{self._text('said')}")
        text = self._stacks() if result == "hang" else ""
        code = "" if result == "hang" else f"exit code {self._join()}\n"
        return self._outcome({"result": result, "said": f"{code}{text or self._text('said')[-3000:]}"})

    def _stacks(self) -> str:
        """Where the threads of a worker that hangs are, as far as it still tells."""
        assert self._process.pid is not None  # it was started
        os.kill(self._process.pid, signal.SIGUSR1)
        self._process.join(KILL_S)
        return self._text("stacks")

    def end(self) -> None:
        if self.is_idle:
            self.answers.send(None)
        else:
            self._process.kill()
        self._join()
        self.answers.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def _join(self) -> int | None:
        self._process.join(30)
        return self._process.exitcode

    def _outcome(self, found: dict[str, str]) -> Outcome:
        assert self.case is not None
        kind, file, _ = choose(self._folder, self.case)
        seconds = self._seconds()
        if seconds > self._limit_s and found["result"] in GOOD:  # it came back before anybody looked
            found = {"result": "hang", "said": f"{seconds:.1f} s"}
        return Outcome(case=self.case, seconds=seconds, **{"kind": kind, "what": file, "said": "", **found})

    def _text(self, name: str) -> str:
        return (self._place / name).read_text(errors="replace")


def run_cases(
    folder: Path,
    cases: Iterator[int],
    *,
    jobs: int,
    work: Path,
    limit_s: float = LIMIT_S,
    subject: Subject | None = None,
) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    numbers = itertools.count()

    def start() -> Worker:
        return Worker(folder, work / str(next(numbers)), limit_s, subject or Subject())

    workers = [start() for _ in range(jobs)]
    left = iter(cases)
    try:
        while True:
            for worker in [one for one in workers if one.is_idle]:
                if worker.done >= BATCH:
                    worker.end()
                    workers[workers.index(worker)] = start()
                elif (case := next(left, None)) is not None:
                    worker.ask(case)
            if all(one.is_idle for one in workers):
                return
            told = wait([one.answers for one in workers], timeout=0.5)
            for worker in list(workers):
                outcome, is_gone = _heard(worker, worker.answers in told)
                if outcome:
                    yield outcome
                if is_gone:
                    worker.end()
                    workers[workers.index(worker)] = start()
    finally:
        for worker in workers:
            worker.end()


def _heard(worker: Worker, has_told: bool) -> tuple[Outcome | None, bool]:
    """What there is to know of a worker now, and whether it is to be replaced."""
    if has_told:
        try:
            return worker.answer(), False
        except EOFError:
            return worker.broken("crash"), True
    return (worker.broken("hang"), True) if worker.late_s > 0 else (None, False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("FUZZ_MINUTES", "2")))
    parser.add_argument("--seed", type=int, default=0, help="the first case; the same seed gives the same cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cases", type=int, help="so many from the seed on, however long they take")
    parser.add_argument("--also", type=int, nargs="*", default=[], help="further cases")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help="after which a case hangs")
    parser.add_argument("--base", type=Path, help="the honest base, if it was made before")
    parser.add_argument("--case", type=int, help="run one case here, with its traceback")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vlatune-fuzz-") as made:
        folder, work = Path(made) / "honest", Path(made) / "work"
        folder.mkdir()
        work.mkdir()
        make_honest(folder, options.base)
        if options.case is not None:
            print(json.dumps(run_case(folder, options.case, work), indent=2))
            return 0
        return _run(folder, work, options)


def _run(folder: Path, work: Path, options: argparse.Namespace) -> int:
    until_s = time.monotonic() + 60 * options.minutes
    fixed = None if options.cases is None else range(options.seed, options.seed + options.cases)
    cases = itertools.chain(options.also, _until(options.seed, until_s) if fixed is None else fixed)
    results: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    bad, slowest_s, begun_s = 0, 0.0, time.monotonic()
    for one in run_cases(folder, cases, jobs=options.jobs, work=work, limit_s=options.limit_s):
        results[one.result] += 1
        if one.result == "changed":
            print(f"case {one.case}, {one.kind}, {one.what}: other rows, which only a checksum tells", flush=True)
            kinds[one.what.split("/")[0] + " " + one.what.rpartition(", ")[2].partition(":")[0]] += 1
        slowest_s = max(slowest_s, one.seconds)
        if one.is_bad:
            bad += 1
            print(f"case {one.case}, {one.kind}, {one.what}: {one.result}\n{one.said}\n", flush=True)
    print(f"rows that changed without checksums, by file and change: {dict(kinds.most_common(20))}")
    figures = {"cases": sum(results.values()), "bad": bad, "seed": options.seed, **results}
    print(json.dumps(figures | {"slowest_s": round(slowest_s, 2), "seconds": round(time.monotonic() - begun_s)}))
    return 1 if bad else 0


def _until(first: int, until_s: float) -> Iterator[int]:
    case = first
    while time.monotonic() < until_s:
        yield case
        case += 1


if __name__ == "__main__":
    sys.exit(main())
