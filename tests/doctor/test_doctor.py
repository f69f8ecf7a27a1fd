"""`vlatune doctor`: each of twelve mistakes is named with a remedy that works as it is copied, and a clean twin is passed."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds

from vlatune import cli
from vlatune.batch import TOKEN_MASK, Columns
from vlatune.config import RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.doctor import batch_checks, device_memory, examine
from vlatune.doctor.findings import Case, Finding, amended, refused
from vlatune.flags import parse_flags
from vlatune.run_setup import Setup

pytestmark = pytest.mark.early
EPISODES, FRAMES = 12, 20


@dataclass(frozen=True)
class Mistake:
    name: str
    seed: Callable[[Path, Path], None]
    check: str
    status: str
    says: str
    """A regular expression for the finding's text."""
    remedy: str
    """The same for the flags or the command."""
    flags: tuple[str, ...] = ()
    """What the user gave wrong."""
    second: bool = False
    """Whether there are two datasets, the second of which has the mistake."""


MISTAKES = [
    Mistake(
        "camera misnamed",
        seeds.misname_camera,
        "cameras",
        "fail",
        r"'observation.images.wrst' may be 'observation.images.wrist'",
        r"""--rename_map={"observation.images.wrst": "observation.images.wrist"}""",
    ),
    Mistake(
        "images 0..255",
        seeds.pictures_to_255,
        "pictures",
        "warn",
        r"0\.\.255, expected 0\.\.1",
        r"python3 -c .*meta/stats.json",
    ),
    Mistake(
        "horizon missing", seeds.forget_horizon, "horizon", "fail", r"does not say how many actions", r'"chunk_size", 8'
    ),
    Mistake(
        "no quantiles",
        seeds.drop_quantiles,
        "statistics",
        "warn",
        r"observation.state: .* no q01 and q99",
        r"--dataset.stats=computed",
    ),
    Mistake(
        "q01 == q99",
        seeds.flatten_quantiles,
        "statistics",
        "fail",
        r"dim 0 'velocity_x'.*the rows do vary",
        r"--dataset.stats=computed",
    ),
    Mistake(
        "wrong fps",
        seeds.wrong_fps,
        "fps",
        "fail",
        r"says 30 fps, the rows lie 0.1 s apart, which is 10 fps",
        r'"fps", 10',
    ),
    Mistake(
        "a missing key",
        seeds.lose_a_key,
        "base",
        "fail",
        r"1 missing \['model.action_out_proj.weight'\]",
        r"--policy.path=null",
    ),
    Mistake(
        "one NaN",
        seeds.one_nan,
        "episodes",
        "fail",
        r"1 of 12 episodes cannot be used: .*has nan in dim 1",
        r"--dataset.on_bad_episode=skip",
    ),
    Mistake(
        "cameras swapped",
        seeds.swap_cameras,
        "roots",
        "warn",
        r"'observation.images.wrist' of '.*second' looks like 'observation.images.top'",
        r"--dataset.rename_map=\{\} --dataset.rename_map=",
        second=True,
    ),
    Mistake(
        "tokens cut off",
        seeds.short_prompts,
        "prompts",
        "fail",
        r"the longest has \d+ tokens, the policy reads 8",
        r'"max_length", \d+',
    ),
    Mistake(
        "no room for checkpoints",
        seeds.nothing,
        "storage",
        "fail",
        r"1,000,000,000 checkpoints of .* and one in the making",
        r"--keep_checkpoints=\d+",
        flags=("--keep_checkpoints=1000000000",),
    ),
]
"""The twelfth, dims beyond the model, needs another policy: below."""


@pytest.fixture(scope="module", autouse=True)
def _ways_measured_once() -> Iterator[None]:
    """Of one model and one shape of batch, the first command measures what fits a GPU, and those after it take what it found: the
    files that a mistake is made in change nothing of it, and measuring is most of a command's time.
    """
    measure, found = device_memory.fitting_ways, {}

    def fitting_ways(config: RunConfig, setup: Setup, columns: Columns) -> list[device_memory.Fitting]:
        files = [file.read_bytes() for file in sorted(Path(setup.policy.folder).glob("*.json"))]
        shapes = [(name, values.shape, values.dtype) for name, values in sorted(columns.items())]
        asked = repr((config.optimizer, config.prefetch_batches, replace(config.policy, path=None), files, shapes))
        if asked not in found:
            found[asked] = measure(config, setup, columns)
        return found[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "fitting_ways", fitting_ways)
        yield


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """Two datasets of one world, and a base for them."""
    from vlatune.policies.pi05.small import make_small_pi05

    folder = tmp_path_factory.mktemp("clean twin")
    for name, seed in (("first", 0), ("second", 1)):
        spec = SyntheticSpec(
            episodes=EPISODES, frames=FRAMES, fps=10, height=64, width=64, cameras=2, seed=seed, episodes_per_file=4
        )
        make_dataset(folder / name, spec)
    meta = load_meta(str(folder / "first"))
    tasks = sorted({*meta.tasks, *load_meta(str(folder / "second")).tasks})
    make_small_pi05(
        folder / "base", cameras=meta.cameras, state_dim=3, action_dim=3, horizon=8, image_size=48, tasks=tasks
    )
    return folder


@pytest.fixture
def place(clean, tmp_path) -> Path:
    """A copy that a mistake may be made in; the base names its tokenizer by its own path's last part."""
    return Path(shutil.copytree(clean, tmp_path / "a place", symlinks=True))


def command(place: Path, *more: str, second: bool = False) -> list[str]:
    roots = [f"--dataset.root={place / name}" for name in (("first", "second") if second else ("first",))]
    words = ["--recipe=tiny", *roots, f"--policy.path={place / 'base'}", "--batch_size=4", "--steps=20"]
    return [*words, f"--output_dir={place / 'run'}", "--dataset.run_length=2", *more]


def ask(capsys, words: list[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["doctor", *words, "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1])


def told(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["check"], one["status"]) for one in answer["findings"] if one["status"] in ("warn", "fail")]


@pytest.mark.parametrize("second", [False, True], ids=["one dataset", "two datasets"])
def test_the_clean_twin_passes(second, place, capsys):
    code, answer = ask(capsys, command(place, second=second))
    assert told(answer) == []
    assert code == cli.OK
    assert answer["status"] == "pass"
    assert [one["check"] for one in answer["findings"] if one["status"] == "skipped"] == []
    assert {one["check"] for one in answer["findings"]} == {check.name for check in examine.CHECKS}
    assert not (place / "run").exists(), "a folder there would be taken for a run"
    assert Path(answer["page"]) == place / "run-doctor" / "doctor.html"


def test_datasets_of_two_robots_are_checked_as_training_takes_them(place, capsys):
    """The second has one camera of the two."""
    shutil.rmtree(place / "second")
    one = SyntheticSpec(episodes=EPISODES, frames=FRAMES, fps=10, height=64, width=64, cameras=1, episodes_per_file=4)
    make_dataset(place / "second", one)
    _, answer = ask(capsys, command(place, second=True))
    cameras = next(one for one in answer["findings"] if one["check"] == "cameras")
    assert (cameras["status"], cameras["figures"]) == ("pass", {"missing": []})


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name)
def test_a_mistake_is_named_and_its_remedy_works(mistake, place, capsys):
    mistake.seed(place / ("second" if mistake.second else "first"), place / "base")
    words = command(place, *mistake.flags, second=mistake.second)
    code, answer = ask(capsys, words)
    assert {check for check, _ in told(answer)} == {mistake.check}, told(answer)
    found = next(one for one in answer["findings"] if one["status"] in ("warn", "fail"))
    assert found["status"] == mistake.status
    assert code == (cli.FAILED if mistake.status == "fail" else cli.OK)
    assert re.search(mistake.says, found["text"]), found["text"]
    remedy = " ".join([found["command"], *shlex.split(found["flags"])])
    assert re.search(mistake.remedy, remedy), remedy
    after = copied(found, words)
    code, answer = ask(capsys, after)
    assert (code, told(answer)) == (cli.OK, [])


def copied(found: dict[str, Any], words: list[str]) -> list[str]:
    """The remedy applied as a person would: its command run in a shell, its flags put behind the others."""
    if found["command"]:
        subprocess.run(found["command"], shell=True, check=True, timeout=60)
    return [*words, *shlex.split(found["flags"])]


def test_all_that_is_wrong_is_named_at_once(place, capsys):
    for seed in (seeds.misname_camera, seeds.flatten_quantiles, seeds.wrong_fps, seeds.one_nan):
        seed(place / "first", place / "base")
    code, answer = ask(capsys, command(place, "--keep_checkpoints=1000000000"))
    assert code == cli.FAILED
    assert dict(told(answer)) == dict.fromkeys(("fps", "cameras", "episodes", "statistics", "storage"), "fail")
    (of_fps,) = [one for one in answer["findings"] if one["check"] == "fps"]
    subprocess.run(of_fps["command"], shell=True, check=True, timeout=60)
    words = shlex.split(answer["command"])
    assert words[:2] == ["vlatune", "train"]
    code, answer = ask(capsys, words[2:])
    assert (code, told(answer)) == (cli.OK, []), [one for one in answer["findings"] if one["status"] == "fail"]


def test_what_depends_on_a_failed_check_says_so(place, capsys):
    seeds.lose_a_key(place / "first", place / "base")
    _, answer = ask(capsys, command(place))
    skipped = {one["check"]: one["text"] for one in answer["findings"] if one["status"] == "skipped"}
    assert skipped["first batch"] == "not checked because 'base' failed"
    assert "files" not in skipped
    assert "storage" not in skipped


def test_dims_beyond_the_model(place, capsys, toy_policy):
    seeds.widen_action(place / "first", place / "base")
    words = command(place)
    code, answer = ask(capsys, words)
    assert (code, told(answer)) == (cli.FAILED, [("dims", "fail")])
    (found,) = [one for one in answer["findings"] if one["status"] == "fail"]
    assert "'action' has 40 dims, the policy takes 32 at most" in found["text"]
    small = (
        "--policy.down_dims=[16,32]",
        "--policy.n_groups=4",
    )  # of Diffusion Policy, which is offered: 1 GB otherwise
    code, answer = ask(capsys, [*copied(found, words), *small])
    assert code == cli.OK, answer["findings"]  # its chunks may be long for these episodes, which is told


@pytest.fixture
def toy_policy(tmp_path, monkeypatch):
    """The policy of docs/adding_a_policy.md, installed beside vlatune: doctor knows nothing of it but its adapter."""
    page = (Path(__file__).parents[2] / "docs" / "adding_a_policy.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```python (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    information = tmp_path / "site/toy_policy-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-policy\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text("[vlatune.policies]\ntoy = toy_policy:POLICY\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_policy"]:
        del sys.modules[name]


def test_what_people_see_and_the_page(place, capsys):
    """Lines for people, exit code 1, and a page that shows what a stranger wrote as text."""
    hostile = "<script>alert('x')</script> \x1b[31mred"
    info = place / "first/meta/info.json"
    seeds.edit(info, lambda found: found["features"]["action"].update(names=[hostile, "b", "c"]))
    code = cli.main(["doctor", *command(place, "--keep_checkpoints=1000000000")])
    out, err = capsys.readouterr()
    assert code == cli.FAILED, out + err
    assert re.search(r"^fail storage +1,000,000,000 checkpoints", out, re.MULTILINE)
    assert re.search(r"^ +--keep_checkpoints=\d+$", out, re.MULTILINE)
    assert "\x1b" not in out
    page = (place / "run-doctor/doctor.html").read_text()
    assert page.count("<script") == 1  # its own
    assert html.escape("<script>alert('x')</script>") in page
    assert page.count("data:image/png;base64,") == 2 * 4, "two cameras of the four samples of a batch"
    assert re.search(r"Task: [a-z ]+, State: [\d ]+;", page)
    assert re.search(r"\d+ tokens; episode \d+, frame \d+", page)
    assert page.count("Actions as recorded") == page.count("Actions normalised") == 4
    assert not (place / "run").exists()


def test_a_check_that_breaks_does_not_end_the_others(tmp_path):
    def broken(case: Case):
        yield Finding("warn", "seen before")
        raise KeyError("x")

    lost: dict[str, str] = {}
    found = examine.run_check(examine.Check("one", broken), Case(RunConfig(), tmp_path), lost)
    assert [one.status for one in found] == ["warn", "fail"]
    assert lost == {"one": "'one' failed"}


def test_an_error_is_told_as_what_was_found_and_what_to_do():
    found = refused(ValueError("dataset 'x': it is empty; fetch it anew; or another"))
    assert (found.text, found.remedy) == ("dataset 'x': it is empty", "fetch it anew; or another")


def test_flags_of_a_remedy_take_the_place_of_those_given():
    config = parse_flags(
        ["--recipe=tiny", "--dataset.root=a", "--dataset.root=b", '--rename_map={"x": "y"}'], RunConfig
    )
    other = amended(config, ['--rename_map={"x": "z"}', "--keep_checkpoints=2", "--policy.path=null"])
    assert other.rename_map == {"x": "z"}
    assert (other.dataset.root, other.keep_checkpoints, other.policy.path) == (("a", "b"), 2, None)
    assert other.batch_size == config.batch_size, "what the recipe says stays"


@pytest.fixture
def read_case(place, tmp_path) -> Case:
    """As far as the first batch, without torch."""
    case, lost = Case(parse_flags(command(place), RunConfig), tmp_path), {}
    for check in examine.CHECKS:
        examine.run_check(check, case, lost)
        if check.name == "first batch":
            break
    assert lost == {}
    return case


@pytest.mark.parametrize(
    ("seen", "status", "says"),
    [
        ((-1.0, 1.0), "pass", "64x64 as 48x48; pictures reach the model's first layer from -1 to 1"),
        ((0.0, 255.0), "fail", "0 to 255 where about -1 to 1 is expected"),
        ((-2.13, -2.11), "fail", "all of them look alike"),
    ],
)
def test_pictures_as_the_model_gets_them(seen, status, says, read_case):
    read_case.seen_range = seen
    (found,) = batch_checks.check_pictures(read_case)
    assert found.status == status
    assert says in found.text


def test_statistics_in_255_fail_a_policy_that_uses_them(place, read_case):
    seeds.pictures_to_255(place / "first", place / "base")
    read_case.metas = (replace(read_case.metas[0], stats=load_meta(str(place / "first")).stats),)
    read_case.policy = replace(read_case.policy, normalisation={"VISUAL": "MEAN_STD"})
    found = list(batch_checks.check_pictures(read_case))
    assert [one.status for one in found] == ["fail", "pass"]


def test_a_first_batch_is_what_the_run_begins_with(read_case):
    """The samples of the first optimizer step, in their order, as the plan has them."""
    from vlatune.dataset.order.sample_order import all_batches, epoch_order

    order = read_case.setup.order
    wanted = all_batches(order, epoch_order(order, 0))[0]
    starts = np.cumsum(order.lengths) - order.lengths
    episodes = np.searchsorted(starts, wanted, side="right") - 1
    rows = read_case.batch.rows
    np.testing.assert_array_equal(rows["frame_index"], wanted - starts[episodes])
    np.testing.assert_array_equal(rows["episode_index"], read_case.setup.training.position[episodes])
    assert [prompt.tokens for prompt in read_case.batch.prompts] == read_case.batch.seen[TOKEN_MASK].sum(
        axis=1
    ).tolist()
