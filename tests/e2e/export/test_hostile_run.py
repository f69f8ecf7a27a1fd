"""`export`, `eval` and resume reject a run whose checkpoint and manifest were edited."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import measured
from safetensors.torch import load_file, save_file
from small_run import SmallRun, small_config

from vlatune import cli
from vlatune.checkpoint.local_store import MANIFEST, make_manifest, parse_manifest
from vlatune.checkpoint.state import OPTIMIZER, TRAINABLE
from vlatune.checkpoint.state_file import STATE

NEWEST = "checkpoints/00000002"


@pytest.fixture(scope="module")
def honest(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints of its first two steps."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    run = SmallRun(small_config(dataset_v3, small_base, folder))
    run.checkpointer.begin()
    for _ in range(2):
        run.step()
        run.save()
    run.checkpointer.finish()
    return folder


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def seal(checkpoint: Path) -> None:
    old = parse_manifest((checkpoint / MANIFEST).read_bytes())
    (checkpoint / MANIFEST).write_bytes(make_manifest(checkpoint, old.optimizer_step, old.score).to_bytes())


def edit_state(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = json.loads((run / NEWEST / STATE).read_text())
    change(state)
    (run / NEWEST / STATE).write_text(json.dumps(state))
    seal(run / NEWEST)


def edit_tensors(run: Path, file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(run / NEWEST / file)
    change(tensors)
    save_file(tensors, run / NEWEST / file)
    seal(run / NEWEST)


def binding(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["binding"].update(values)


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no binding": (lambda state: state.pop("binding"), "binding"),
    "a binding of nothing": (lambda state: state.update(binding={}), "cameras"),
    "a binding that is a list": (lambda state: state.update(binding=[]), "binding"),
    "an unknown field of the binding": (binding(hook="os.system"), "hook"),
    "state_dim x": (binding(state_dim="x"), "state_dim"),
    "state_dim of another policy": (binding(state_dim=60_000), "60000"),
    "action_dim 10^9": (binding(action_dim=10**9), "action_dim is 1000000000"),
    "action_names that are numbers": (binding(action_names=[1, 2]), "action_names"),
    "too few action_names": (binding(action_names=["x"]), "action_names"),
    "no action_names": (lambda state: state["binding"].pop("action_names"), "action_names"),
    "cameras that are no pairs": (binding(cameras=["top"]), "cameras"),
    "a camera of another policy": (binding(missing_cameras=["x"]), "'x'"),
    "parts that are no bindings": (binding(parts=[{"cameras": []}]), "parts"),
    "no fingerprints": (lambda state: state.update(fingerprints={}), "fingerprints"),
    "fingerprints that are lists": (lambda state: state["fingerprints"].update({"base.weights": []}), "base.weights"),
    "another step": (lambda state: state.update(optimizer_step=7), "optimizer_step is 7"),
}


def rejected(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a command that ends with exit code 2 and one line."""
    code = cli.main(list(words))
    error = capsys.readouterr().err.strip()
    assert code == 2, error
    assert len(error.splitlines()) == 1, error
    return error


@pytest.mark.parametrize(("change", "name"), STATES.values(), ids=STATES)
def test_an_edited_state_is_rejected(change, name, run, dataset_v3, tmp_path, capsys) -> None:
    edit_state(run, change)
    for words in (("export", str(run), str(tmp_path / "out")), ("eval", str(run), f"--dataset.root={dataset_v3}")):
        message = rejected(capsys, *words, "--trust_run=true")
        assert STATE in message
        assert name in message
    assert not (tmp_path / "out").exists()


def test_a_state_without_a_base_is_rejected(run, tmp_path, capsys) -> None:
    edit_state(run, lambda state: state["config"]["policy"].update(path=None))
    assert "base" in rejected(capsys, "export", str(run), str(tmp_path / "out"), "--trust_run=true")


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "int32": (lambda of: of.update({name: one.int() for name, one in of.items()}), "is torch.int32, expected floats"),
    "NaN": (lambda of: next(iter(of.values())).view(-1)[0].fill_(float("nan")), "has values that are not finite"),
    "infinite": (
        lambda of: next(iter(of.values())).view(-1)[-1].fill_(float("-inf")),
        "has values that are not finite",
    ),
    "another shape": (lambda of: of.update({min(of): of[min(of)][:1].clone()}), "has shape"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS)
def test_edited_weights_are_rejected(change, message, run, dataset_v3, tmp_path, capsys) -> None:
    edit_tensors(run, TRAINABLE, change)
    assert message in rejected(capsys, "export", str(run), str(tmp_path / "out"), "--trust_run=true")
    assert message in rejected(capsys, "eval", str(run), f"--dataset.root={dataset_v3}", "--trust_run=true")


def test_statistics_that_are_not_finite_are_rejected(run, tmp_path, capsys) -> None:
    file = next((run / NEWEST / "policy").glob("*.safetensors"))
    edit_tensors(run, f"policy/{file.name}", lambda of: next(iter(of.values())).view(-1)[0].fill_(float("nan")))
    assert "finite floats" in rejected(capsys, "export", str(run), str(tmp_path / "out"), "--trust_run=true")


@pytest.mark.parametrize("header", [b"[]", b"{}", b'{"a":[]}', b'{"a":{"data_offsets":["x",1]}}', b"[" * 99])
def test_a_base_with_a_damaged_header_is_rejected(run, small_base, tmp_path, capsys, header) -> None:
    base = Path(shutil.copytree(small_base, tmp_path / "base"))
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    rejected(capsys, "export", str(run), str(tmp_path / "out"), f"--base={base}")


MOMENTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "of another shape": (lambda of: of.update({min(of): torch.zeros(1)}), "the parameter has"),
    "of integers": (lambda of: of.update({min(of): of[min(of)].int()}), "torch.int32"),
    "that are NaN": (lambda of: of[min(of)].fill_(float("nan")), "has values that are not finite"),
    "of another parameter": (lambda of: of.update({"x|step": torch.zeros(())}), "which this run does not train"),
}


@pytest.mark.parametrize(("change", "message"), MOMENTS.values(), ids=MOMENTS)
def test_a_resume_rejects_edited_moments(change, message, run, dataset_v3, small_base) -> None:
    edit_tensors(run, OPTIMIZER, change)
    with pytest.raises(ValueError, match=r"optimizer\.safetensors") as caught:
        SmallRun(small_config(dataset_v3, small_base, run))
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_resume_with_moments_of_another_shape_is_a_usage_error(run, dataset_v3, small_base) -> None:
    edit_tensors(run, OPTIMIZER, lambda of: of.update({min(of): torch.zeros(1)}))
    ended = measured("train", f"--config_path={run / 'config.json'}", f"--output_dir={run}", "--resume=true")
    assert (ended.code, "optimizer.safetensors" in ended.printed, "Traceback" in ended.printed) == (2, True, False), (
        ended.printed
    )


def test_swapped_checkpoints_are_rejected(run, dataset_v3, small_base, tmp_path, capsys) -> None:
    first, second = run / "checkpoints/00000001", run / NEWEST
    first.rename(run / "temporary")
    second.rename(first)
    (run / "temporary").rename(second)
    message = rejected(capsys, "export", str(run), str(tmp_path / "out"), "--trust_run=true", "--checkpoint=2")
    assert "00000002" in message
    with pytest.raises(ValueError, match="all 2 checkpoints are damaged"):
        SmallRun(small_config(dataset_v3, small_base, run))


def test_a_copy_of_an_older_checkpoint_does_not_count_as_newer(run, dataset_v3, small_base) -> None:
    shutil.copytree(run / "checkpoints/00000001", run / "checkpoints/00000003")
    resumed = SmallRun(small_config(dataset_v3, small_base, run))
    assert resumed.done == 2
    assert any("manifest.json is of step 1, expected 3" in line for line in resumed.printed)
