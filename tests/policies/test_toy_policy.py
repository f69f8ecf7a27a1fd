"""docs/adding_a_policy.md, followed to the letter: its files, its line that registers them, and the commands on top of it."""

import json
import re
import sys
from pathlib import Path

import pytest
from repository_files import ROOT
from safetensors.numpy import load_file

from vlatune import cli
from vlatune.policies import registry
from vlatune.report.sinks import read_jsonl

pytestmark = pytest.mark.ray
PAGE = ROOT / "docs" / "adding_a_policy.md"
STEPS = 6


def page_files() -> dict[str, str]:
    """Name -> text of every file on the page."""
    return dict(re.findall(r"^```python (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def entry_points() -> str:
    """The page's lines for pyproject.toml, as an installer writes them down."""
    (line,) = re.findall(
        r'^\[project\.entry-points\."vlatune\.policies"\]\n(\w+) = "(\S+)"', PAGE.read_text(), re.MULTILINE
    )
    return f"[vlatune.policies]\n{line[0]} = {line[1]}\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """The package beside vlatune, for this process and for those that a run starts."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in page_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    information = folder / "toy_policy-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-policy\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text(entry_points())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_policy"]:
        del sys.modules[name]
    registry._load_other.cache_clear()


@pytest.fixture(scope="module")
def run_dir(installed, dataset_v3, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    flags = [f"--dataset.root={dataset_v3}", f"--output_dir={folder}", "--dataset.eval_split=0.2", "--batch_size=4"]
    code = cli.main(["train", "--recipe=toy", *flags, f"--steps={STEPS}", "--save_freq=3", "--log_freq=1"])
    assert code == cli.OK
    return folder


def test_the_page_keeps_its_promise_of_length() -> None:
    assert {Path(name).parts[0] for name in page_files()} == {"toy_policy"}
    assert sum(len(text.splitlines()) for text in page_files().values()) < 160


def test_help_and_recipes_come_from_the_registry(installed, capsys) -> None:
    assert cli.main(["train", "--help"]) == cli.OK
    out = capsys.readouterr().out
    assert re.search(r"^ +toy +Toy: full \(every weight\), head \(the last layer\)$", out, re.MULTILINE)
    assert "a toy that learns in seconds" in out


def test_it_trains_from_scratch(run_dir) -> None:
    losses = [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl")]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


def test_it_is_evaluated_without_a_sentence(run_dir, capsys) -> None:
    assert cli.main(["eval", str(run_dir), "--max_samples=8"]) == cli.OK
    figures = json.loads((run_dir / "eval.json").read_text())
    assert figures["blank_images_error"] > 0
    assert "blank_sentence_error" not in figures
    out = capsys.readouterr().out
    assert "pictures blanked" in out
    assert "sentence blanked" not in out


def test_it_is_exported(run_dir, tmp_path) -> None:
    folder = tmp_path / "exported"
    assert cli.main(["export", str(run_dir), str(folder)]) == cli.OK
    trained, base = (load_file(one / "model.safetensors") for one in (folder, run_dir / "base"))
    assert trained.keys() == base.keys()
    assert all((trained[name] != base[name]).any() for name in base)
    steps = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    state_file = next(step["state_file"] for step in steps if step["registry_name"] == "normalizer_processor")
    assert set(load_file(folder / state_file)) == {
        f"{key}.{one}" for key in ("action", "observation.state") for one in ("mean", "std")
    }
    spec = registry.get_adapter("toy").read_spec(folder)
    assert len(spec.cameras) == 2


def test_what_it_cannot_train_is_refused(installed, dataset_v3, capsys) -> None:
    flags = [f"--dataset.root={dataset_v3}", "--policy.train=expert"]
    assert cli.main(["train", "--recipe=toy", *flags]) == cli.MISUSED
    assert "--policy.train=expert: must be one of full, head" in capsys.readouterr().err
