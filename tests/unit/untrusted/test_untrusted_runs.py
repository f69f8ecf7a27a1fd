"""Hostile and damaged run folders and checkpoints, given to `report`, `export`, `eval` and `train --resume`."""

import io
import json
import shutil

import numpy as np
import pytest
from run_copies import copy_run
from unit.storage.pickled_columns import Payload
from unit.untrusted.conftest import CANARY, contents
from unit.untrusted.damage import (
    CHECKPOINT,
    ESCAPE,
    Damage,
    edit,
    fifo,
    link_out,
    processor_step,
    remove,
    replace,
    text,
    truncate,
    update,
    with_new_hashes,
)

from vlatune import cli
from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import prune

MANIFEST, STATE, TENSORS = (
    f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/state.json",
    f"{CHECKPOINT}/trainable.safetensors",
)
POLICY = f"{CHECKPOINT}/policy"
HUGE = "1" + "0" * 400

IN_REPORT = {
    "summary.json is a FIFO": (fifo("summary.json"), "is a FIFO", 2),
    "eval.json is a link out": (link_out("eval.json"), "outside of", 2),
    "metrics.jsonl is a FIFO": (fifo("metrics.jsonl"), "is a FIFO", 2),
    "samples are a FIFO": (fifo("eval_samples.npz"), "is a FIFO", 1),
    "samples are not an archive": (text("eval_samples.npz", "x"), "eval_samples.npz", 1),
    "loss is text": (text("metrics.jsonl", '{"optimizer_step": 1, "loss": "x"}\n'), "'loss'", 2),
    "loss is an escape": (text("metrics.jsonl", json.dumps({"optimizer_step": 1, "loss": ESCAPE})), "?]0;owned?", 2),
    "no step": (text("metrics.jsonl", '{"loss": 1}\n'), "optimizer_step", 1),
    "metrics nested beyond the parser": (text("metrics.jsonl", "[" * 100_000 + "\n"), "line 1", 1),
    "eval.json is a list": (text("eval.json", "[]"), "eval.json", 2),
    "validation of text": (text("validation.jsonl", '{"optimizer_step": 1, "val_loss": "x"}\n'), "validation.jsonl", 2),
    "summary is a list": (text("summary.json", "[]"), "", 2),
    "summary of 10^400": (text("summary.json", f'{{"optimizer_steps": {HUGE}}}'), "summary.json", 2),
    "settings of another type": (text("config.json", '{"ray": [1]}'), "'ray'", 2),
}
IN_EXPORT = {
    "config.json is a link out": (link_out("config.json"), "outside of"),
    "config.json is missing": (remove("config.json"), "config.json"),
    "no checkpoints": (remove("checkpoints"), "no checkpoint"),
    "checkpoints is a link out": (link_out("checkpoints"), "is a link"),
    "tensors are a link out": (link_out(TENSORS), "outside of"),
    "tensors are a FIFO": (fifo(TENSORS), "is a FIFO"),
    "half of the tensors": (truncate(TENSORS, 0.5), "trainable.safetensors"),
    "tensors are a pickle": (
        with_new_hashes(replace(TENSORS, lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n"))),
        "trainable.safetensors",
    ),
    "the manifest is a FIFO": (fifo(MANIFEST), "is a FIFO"),
    "a manifest of no files": (update(MANIFEST, files={}), "names no files"),
    "a manifest of infinite step": (update(MANIFEST, optimizer_step=1e999), "damaged"),
    "a manifest with files outside": (
        edit(MANIFEST, lambda one: one["files"].update({"../../../outside/secret.json": {"bytes": 1, "sha256": "0"}})),
        "outside of",
    ),
    "a file that is not in the manifest": (text(f"{CHECKPOINT}/ema.safetensors", "x"), "ema.safetensors"),
    "a policy file is a link out": (with_new_hashes(link_out(f"{POLICY}/policy_preprocessor.json")), "outside of"),
    "a step that names a class": (
        with_new_hashes(processor_step(f"{POLICY}/policy_preprocessor.json", {"class": "subprocess.Popen"})),
        "subprocess.Popen",
    ),
    "chunk_size is an object": (with_new_hashes(update(f"{POLICY}/config.json", chunk_size={"a": 1})), "chunk_size"),
}
IN_RESUME = {
    "summary.json is a FIFO": (fifo("summary.json"), "is a FIFO"),
    "half a config.json": (truncate("config.json", 0.5), "config.json"),
    ".lock is a link out": (link_out(".lock"), "outside of"),
    "logs is a link out": (link_out("logs"), "outside of"),
    "logs/traceback.txt is a link out": (link_out("logs/traceback.txt"), "outside of"),
    "checkpoints is a link out": (link_out("checkpoints"), "is a link"),
    "tensors are a link out": (link_out(TENSORS), "outside of"),
    "the manifest is a FIFO": (fifo(MANIFEST), "is a FIFO"),
    "a manifest of no files": (update(MANIFEST, files={}), "names no files"),
}


def binding(**fields: object) -> Damage:
    return edit(STATE, lambda one: one["binding"].update(fields))


IN_STATE = {
    "a link out": (link_out(STATE), "outside of"),
    "missing": (remove(STATE), "state.json"),
    "another version": (update(STATE, version=99), "version"),
    "step -1": (update(STATE, optimizer_step=-1), "optimizer_step"),
    "10^30 lanes": (update(STATE, lanes=10**30), "lanes"),
    "a binding of text": (update(STATE, binding="x"), "binding"),
    "60,000 state dims": (binding(state_dim=60_000), "60000"),
    "60,000 state dims of a part": (
        edit(STATE, lambda one: one["binding"].update(parts=[one["binding"] | {"state_dim": 60_000}])),
        "60000",
    ),
}


@pytest.mark.parametrize(("damage", "mention", "code"), IN_REPORT.values(), ids=IN_REPORT)
def test_report_of_a_hostile_run(damage, mention, code, sandbox, vlatune) -> None:
    damage(sandbox.run)
    vlatune("report", sandbox.run, code=code, mentions=mention)


@pytest.mark.parametrize(
    "name", ["summary.json is a FIFO", "metrics.jsonl is a FIFO", "loss is text", "eval.json is a list"]
)
def test_report_that_compares_a_hostile_run(name, sandbox, vlatune, originals) -> None:
    damage, mention, code = IN_REPORT[name]
    damage(sandbox.run)
    another = copy_run(originals["run"], sandbox.folder / "another")
    vlatune("report", sandbox.run, another, f"--output={sandbox.folder / 'c.html'}", code=code, mentions=mention)


@pytest.mark.parametrize(("damage", "mention"), IN_EXPORT.values(), ids=IN_EXPORT)
def test_export_of_a_hostile_run(damage, mention, sandbox, vlatune) -> None:
    damage(sandbox.run)
    vlatune("export", sandbox.run, sandbox.out, code=2, mentions=mention)


@pytest.mark.parametrize("name", ["tensors are a link out", "checkpoints is a link out", "a manifest of no files"])
def test_eval_of_a_hostile_run(name, sandbox, vlatune) -> None:
    damage, mention = IN_EXPORT[name]
    damage(sandbox.run)
    vlatune("eval", sandbox.run, code=2, mentions=mention)


@pytest.mark.parametrize(("damage", "mention"), IN_RESUME.values(), ids=IN_RESUME)
def test_resume_of_a_hostile_run(damage, mention, sandbox, vlatune) -> None:
    damage(sandbox.run)
    vlatune("train", *sandbox.resume_flags(), code=2, mentions=mention)


@pytest.mark.parametrize(("damage", "mention"), IN_STATE.values(), ids=IN_STATE)
def test_export_with_a_hostile_state(damage, mention, sandbox, vlatune) -> None:
    with_new_hashes(damage)(sandbox.run)
    vlatune("export", sandbox.run, sandbox.out, code=2, mentions=mention)


@pytest.mark.parametrize("name", ["missing", "a binding of text", "60,000 state dims", "60,000 state dims of a part"])
def test_every_reader_rejects_a_hostile_state(name, sandbox, vlatune) -> None:
    damage, mention = IN_STATE[name]
    with_new_hashes(damage)(sandbox.run)
    other_data = ["eval", sandbox.run, f"--dataset.root={sandbox.dataset}"]
    for words in (["train", *sandbox.resume_flags()], ["eval", sandbox.run], other_data):
        vlatune(*words, code=2, mentions=mention)


def test_resume_with_another_batch_size(sandbox, vlatune) -> None:
    vlatune("train", *sandbox.resume_flags(), "--batch_size=2", code=2, mentions="batch_size")


def test_pickled_samples_are_not_loaded(sandbox, vlatune) -> None:
    archive = io.BytesIO()
    np.savez(archive, json=np.array([Payload(sandbox.marker)], dtype=object))
    (sandbox.run / "eval_samples.npz").write_bytes(archive.getvalue())
    vlatune("report", sandbox.run, code=1, mentions="eval_samples.npz")


EXTERNAL = {
    "checkpoints": (update("config.json", storage_path="s3://attacker/x"), "--storage_path=s3://attacker/x"),
    "dataset": (edit("config.json", lambda one: one["dataset"].update(root=["/etc"])), "--dataset.root=/etc"),
    "hub dataset": (
        edit("config.json", lambda one: one["dataset"].update(root=[], repo_id="attacker/x")),
        "--dataset.repo_id=attacker/x",
    ),
    "server": (
        edit("config.json", lambda one: one["dataset"].update(storage_options='{"endpoint_url":"http://attacker"}')),
        "--dataset.storage_options=",
    ),
    "base": (edit("config.json", lambda one: one["policy"].update(path="attacker/x")), "--policy.path=attacker/x"),
    "base of the checkpoint": (
        with_new_hashes(edit(STATE, lambda one: one["config"]["policy"].update(path="attacker/x"))),
        "--policy.path=attacker/x",
    ),
}


@pytest.mark.parametrize(("damage", "mention"), EXTERNAL.values(), ids=EXTERNAL)
def test_external_paths_of_a_strangers_run_need_trust(damage, mention, sandbox, vlatune) -> None:
    damage(sandbox.run)
    is_exported = "storage_path" in mention or damage is EXTERNAL["base of the checkpoint"][0]
    command = ["export", sandbox.run, sandbox.out] if is_exported else ["eval", sandbox.run]
    assert "--trust_run=true" in vlatune(*command, code=2, mentions=mention)


def test_trust_does_not_accept_secrets_in_an_address(sandbox, vlatune) -> None:
    update("config.json", storage_path=f"s3://AKIA:{CANARY}@bucket/x")(sandbox.run)
    vlatune("export", sandbox.run, sandbox.out, "--trust_run=true", code=2, mentions="--storage_path")


def test_outputs_never_replace_foreign_files_or_follow_links(sandbox, vlatune) -> None:
    (sandbox.outside / "config.json").write_text('{"job_name": "demo"}')
    (sandbox.outside / "notes.txt").write_text("x")
    (sandbox.folder / "link").symlink_to(sandbox.outside)
    flags = [word for word in sandbox.train_flags() if not word.startswith("--output_dir")]
    for name in ("base-eval", "out-doctor"):  # defaults of `eval` and `doctor`, next to the input
        (sandbox.folder / name).symlink_to(sandbox.outside)
    evaluated = ["eval", sandbox.base, f"--dataset.root={sandbox.dataset}", "--max_samples=2"]
    for words in (
        ["train", *flags, f"--output_dir={sandbox.folder / 'link'}"],
        ["doctor", *sandbox.train_flags()],
        evaluated,
        [*evaluated, f"--output_dir={sandbox.folder / 'link'}"],
    ):
        vlatune(*words, code=2, mentions="is a link")
    for words in (
        ["demo", f"--output_dir={sandbox.outside}"],
        ["export", sandbox.run, sandbox.outside],
        ["export", sandbox.run, sandbox.folder / "link"],
        ["make-dataset", sandbox.outside],
        ["make-dataset", sandbox.folder / "link"],
        ["train", *flags, f"--output_dir={sandbox.outside}"],
    ):
        vlatune(*words, code=2, mentions="")


def test_the_demo_does_not_replace_another_run(sandbox, vlatune) -> None:
    before = contents(sandbox.run)
    vlatune("demo", f"--output_dir={sandbox.run}", code=2, mentions="config.json")
    assert contents(sandbox.run) == before


def test_pruning_removes_only_names_of_checkpoints(sandbox) -> None:
    folder = sandbox.run / "checkpoints"
    (folder / "2024").mkdir()
    (folder / "00000001").symlink_to(sandbox.outside / "00000001")
    store = LocalStore(folder)
    assert store.steps() == [2]
    prune(store, keep_last=1)
    assert (folder / "2024").is_dir()
    assert (sandbox.outside / "00000001/precious").read_text() == CANARY


def test_a_traceback_is_not_written_through_a_link(sandbox, capsys, monkeypatch) -> None:
    link_out("logs/traceback.txt")(sandbox.run)
    before = contents(sandbox.outside)
    monkeypatch.setattr("vlatune.report.html.make_page", lambda *_, **__: json.loads("{"))  # an error of a library
    assert cli.main(["report", str(sandbox.run)]) == 2
    assert "JSONDecodeError" in capsys.readouterr().err
    assert contents(sandbox.outside) == before
    assert not (sandbox.run / "logs/traceback.txt").is_symlink()


def test_secrets_of_the_environment_are_redacted(sandbox, capsys, monkeypatch) -> None:
    """A library quotes a secret, in an error with a file name and in another one."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setattr("vlatune.report.html.make_page", lambda *_, **__: shutil.copy(f"/no/{CANARY}", "/no/where"))
    assert cli.main(["report", str(sandbox.run)]) == 1
    assert "/no/***: No such file" in capsys.readouterr().err
    monkeypatch.setattr("vlatune.report.html.make_page", lambda *_, **__: shutil.get_archive_formats()[CANARY])
    assert cli.main(["report", str(sandbox.run)]) == 1
    assert CANARY not in capsys.readouterr().err
    kept = (sandbox.run / "logs/traceback.txt").read_text()
    assert (CANARY in kept, "TypeError" in kept) == (False, True)
