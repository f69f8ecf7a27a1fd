"""Changed files through everything that reads them: `make fuzz`, and a short fixed part of it in `make test`.

A case is a number: it decides the file and the change. Each runs in a forked child, with a limit of time and of memory:
`inspect`, the preflight of a run, one pass of reading and of the policy's transforms; or `report` and the loading of a
checkpoint. A case fails when the child dies, hangs, takes too much, or an error comes out that vlatune did not mean; and
when rows of a dataset with checksums come out changed. Of rows that change without checksums the number is told.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutate import mutate, replace_file

LIMIT_S, LIMIT_BYTES = 10.0, 1 << 30
GOOD = ("refused", "fine", "changed")


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
    """refused, fine, changed; or what is wrong: bare, crash, hang, memory, silent."""
    said: str = ""
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.result not in GOOD


def make_honest(folder: Path, base: Path | None) -> None:
    """What the cases are copies of, and what comes out of it; in a child, so that this process stays small."""
    _in_child(lambda: _make_honest(folder, base))


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

    for name, version in (("dataset", "v3.0"), ("older", "v2.1")):
        make_dataset(folder / name, SyntheticSpec(**SPEC, version=version))
        shutil.copytree(folder / name, folder / f"{name} with checksums")
        assert cli.main(["inspect", str(folder / f"{name} with checksums"), "--write_checksums=true"]) == 0
    if base is None:
        make_base(folder / "base", folder / "dataset")
    else:
        shutil.copytree(base, folder / "base")
    make_run(folder / "dataset", folder / "base", folder / "run")
    digests = {name: read_rows(folder / name, folder / "base") for name in ("dataset", "older")}
    (folder / "digests.json").write_text(json.dumps(digests))


def read_rows(dataset: Path, base: Path) -> str:
    """One pass as a worker of a run makes it; a digest of all that comes out."""
    import numpy as np

    from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
    from vlatune.dataset.reader import make_unit, read_unit
    from vlatune.pipeline.transforms import apply_all
    from vlatune.run_setup import make_setup

    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset),)),
        policy=PolicyConfig(path=str(base), train="heads"),
        output_dir=str(dataset.parent / "out"),
        batch_size=4,
    )
    setup = make_setup(config, preflight=True)
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


def read_run(run: Path, dataset: Path, base: Path) -> None:
    """Report, settings, and the newest checkpoint as a resume and an export take it."""
    from vlatune.checkpoint.policy_files import read_policy_files
    from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
    from vlatune.policies.pi05.adapter import SCHEMA
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
    files = sorted(path.relative_to(folder / kind).as_posix() for path in (folder / kind).rglob("*") if path.is_file())
    files = [name for name in files if name != "meta/checksums.json" and not name.endswith((".lock", ".pen"))]
    weights = [
        2.0 if name.endswith(".mp4") else 4.0 if name.startswith("meta/") or name.endswith((".json", ".jsonl")) else 1.0
        for name in files
    ]
    return kind, rng.choices(files, weights)[0], rng


def run_case(folder: Path, case: int, place: Path) -> dict[str, str]:
    """In the child: change one file of a copy, and read it."""
    kind, file, rng = choose(folder, case)
    shutil.copytree(folder / kind, place / "x", copy_function=os.link)
    what = f"{file}, {mutate(place / 'x' / file, rng)}"
    if kind == "run" and file.startswith("checkpoints/") and not file.endswith("manifest.json") and rng.random() < 0.7:
        seal(place / "x/checkpoints/00000002")
        what += ", sealed anew"
    try:
        changed = _read(folder, kind, place / "x")
    except (Exception, KeyboardInterrupt) as error:
        return {"kind": kind, "what": what, "result": "refused", "said": _explain(error)}
    result = "fine" if not changed else "silent" if "checksums" in kind else "changed"
    return {"kind": kind, "what": what, "result": result, "said": ""}


def seal(checkpoint: Path) -> None:
    """Right hashes for what was changed: an attacker can compute them, and what lies behind them is reached, too."""
    manifest = checkpoint / "manifest.json"
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path != manifest]
    files = {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in paths}
    sealed = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    content = json.loads(manifest.read_text()) | {"files": sealed}
    replace_file(manifest, json.dumps(content).encode())


def _read(folder: Path, kind: str, changed: Path) -> bool:
    """Whether other rows came out than of the honest one."""
    from vlatune.inspect.inspection import inspect_dataset
    from vlatune.inspect.text import command_text, inspection_text

    if kind == "run":
        read_run(changed, folder / "dataset", folder / "base")
        return False
    if kind == "base":
        read_rows(folder / "dataset", changed)
        return False
    found = inspect_dataset(str(changed), videos=True)
    assert inspection_text(found, width=120) + command_text([found], {}) + json.dumps(asdict(found))
    honest = json.loads((folder / "digests.json").read_text())[kind.partition(" ")[0]]
    return read_rows(changed, folder / "base") != honest


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


def _in_child(call: Callable[[], Any]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("the honest files could not be made; see above")


def _child(folder: Path, case: int, place: Path) -> None:
    with (place / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            found = run_case(folder, case, place)
        except BareError as error:
            import traceback

            found = {
                "result": "bare",
                "said": str(error) + "\n" + "".join(traceback.format_exception(error.__cause__)[-6:]),
            }
        except MemoryError:
            found = {"result": "memory", "said": "MemoryError"}
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun)
        if grown > LIMIT_BYTES:
            found |= {"result": "memory", "said": f"{grown:,} bytes"}
        (place / "found.json").write_text(json.dumps(found))


def run_cases(
    folder: Path, cases: Iterator[int], *, jobs: int, work: Path, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    running: dict[int, tuple[int, Path, float]] = {}
    for case in cases:
        place = work / str(case)
        place.mkdir()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(
                    resource.RLIMIT_AS, (_address_space() + 3 * LIMIT_BYTES,) * 2
                )  # not the machine's end
                _child(folder, case, place)
                code = 0
            finally:
                os._exit(code)
        running[pid] = (case, place, time.monotonic())
        while len(running) >= jobs:
            yield from _reap(folder, running, limit_s)
    while running:
        yield from _reap(folder, running, limit_s)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _reap(folder: Path, running: dict[int, tuple[int, Path, float]], limit_s: float) -> Iterator[Outcome]:
    time.sleep(0.005)
    for pid, (case, place, begun_s) in list(running.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        took_s = time.monotonic() - begun_s
        if not done and took_s < limit_s:
            continue
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        del running[pid]
        yield _outcome(folder, case, place, hung=not done, status=status, took_s=took_s)
        shutil.rmtree(place, ignore_errors=True)


def _outcome(folder: Path, case: int, place: Path, *, hung: bool, status: int, took_s: float) -> Outcome:
    kind, file, _ = choose(folder, case)
    found = {"kind": kind, "what": file, "result": "crash", "said": f"status {status}"}
    if hung:
        found |= {"result": "hang", "said": ""}
    elif (place / "found.json").exists():
        found |= json.loads((place / "found.json").read_text())
    else:
        with contextlib.suppress(OSError):
            found["said"] += (place / "said").read_text()[-1500:]
    return Outcome(case=case, seconds=took_s, **found)


def import_all(folder: Path) -> None:
    """All that a case imports, before the forks, so that no child does it again; a child finds out what that is."""
    _in_child(lambda: _note_modules(folder))
    for name in json.loads((folder / "modules.json").read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _note_modules(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "warm")
    before = set(sys.modules)
    _read(folder, "dataset", folder / "dataset")
    with contextlib.suppress(ValueError):
        read_run(folder / "warm", folder / "dataset", folder / "base")
    (folder / "modules.json").write_text(json.dumps([name for name in sys.modules if name not in before]))


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
        import_all(folder)
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
    bad = 0
    for one in run_cases(folder, cases, jobs=options.jobs, work=work, limit_s=options.limit_s):
        if one.result == "hang":
            one = _again(folder, work, one, options.limit_s)
        results[one.result] += 1
        if one.result == "changed":
            kinds[one.what.split("/")[0] + " " + one.what.rpartition(", ")[2].partition(":")[0]] += 1
        if one.is_bad:
            bad += 1
            print(f"case {one.case}, {one.kind}, {one.what}: {one.result}\n{one.said}\n", flush=True)
    print(f"rows that changed without checksums, by file and change: {dict(kinds.most_common(20))}")
    print(json.dumps({"cases": sum(results.values()), "bad": bad, "seed": options.seed, **results}))
    return 1 if bad else 0


def _again(folder: Path, work: Path, hung: Outcome, limit_s: float) -> Outcome:
    """A fork of a process whose libraries have threads may hang by itself; what hangs for its file does so each time."""
    apart = work / "again"
    apart.mkdir(exist_ok=True)
    (found,) = run_cases(folder, iter([hung.case]), jobs=1, work=apart, limit_s=limit_s)
    return found


def _until(first: int, until_s: float) -> Iterator[int]:
    case = first
    while time.monotonic() < until_s:
        yield case
        case += 1


if __name__ == "__main__":
    sys.exit(main())
