"""Hostile and damaged policy folders: `train` and `eval` reject them, and no code from them runs."""

import json
from pathlib import Path

import pytest
from unit.untrusted.damage import (
    ESCAPE,
    fifo,
    link_out,
    link_to,
    normalizers,
    processor_step,
    remove,
    replace,
    text,
    truncate,
    update,
)

from vlatune.data.meta.dataset_meta import load_meta
from vlatune.export.export import copy_tokenizer
from vlatune.export.policy_files import make_policy_files, read_policy_files
from vlatune.policies.base import Binding
from vlatune.policies.pi05.adapter import Pi05Adapter
from vlatune.policies.processors import PROCESSORS
from vlatune.registry import get_adapter, policy_types
from vlatune.train.driver.tiny_base import fit_datasets

CONFIG, WEIGHTS, SIZE = "config.json", "model.safetensors", "vlatune_size.json"
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"
POPEN = {"class": "subprocess.Popen", "config": {"args": ["mkdir", "code-ran"]}}

REJECTED = {
    "config.json is a link out": (link_out(CONFIG), "outside of"),
    "config.json is a FIFO": (fifo(CONFIG), "is a FIFO"),
    "config.json is an endless device": (link_to(CONFIG, "/dev/zero"), "outside of"),
    "half a config.json": (truncate(CONFIG, 0.5), CONFIG),
    "config.json is nested beyond the parser": (text(CONFIG, "[" * 100_000), CONFIG),
    "an unknown type": (update(CONFIG, type="os.system"), "'os.system'"),
    "another type": (update(CONFIG, type="smolvla"), "'smolvla'"),
    "escapes in the type": (update(CONFIG, type=ESCAPE), "?]0;owned?"),
    "chunk_size is an object": (update(CONFIG, chunk_size={}), "chunk_size"),
    "chunk_size of 10^9": (update(CONFIG, chunk_size=10**9), "chunk_size"),
    "a number of 10^400": (update(CONFIG, time_sampling_scale=10**400), "time_sampling_scale"),
    "a distribution of times with beta 0": (update(CONFIG, time_sampling_beta_beta=0.0), "time_sampling_beta_beta"),
    "image_resolution of 10^9": (update(CONFIG, image_resolution=[10**9, 8]), "image_resolution"),
    "weights are a link out": (link_out(WEIGHTS), "outside of"),
    "weights are a FIFO": (fifo(WEIGHTS), "is a FIFO"),
    "half of the weights": (truncate(WEIGHTS, 0.5), WEIGHTS),
    "weights are a pickle": (replace(WEIGHTS, lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n")), WEIGHTS),
    "header of 2^62 bytes": (replace(WEIGHTS, lambda path: path.write_bytes(b"\0\0\0\0\0\0\0\x40{}")), WEIGHTS),
    "the index of weights is a FIFO": (fifo("model.safetensors.index.json"), "is a FIFO"),
    "the preprocessor is a FIFO": (fifo(PRE), "is a FIFO"),
    "the preprocessor is missing": (remove(PRE), PRE),
    "a preprocessor step names a class": (processor_step(PRE, POPEN), "subprocess.Popen"),
    "a postprocessor step names a class": (processor_step(POST, POPEN), "subprocess.Popen"),
    "a class next to a known step": (
        processor_step(PRE, {"registry_name": "to_batch_processor", **POPEN}),
        "subprocess.Popen",
    ),
    "an unknown step": (processor_step(PRE, {"registry_name": "evil"}), "'evil'"),
    "a step with trust_remote_code": (
        processor_step(PRE, {"registry_name": "tokenizer_processor", "config": {"trust_remote_code": True}}),
        "trust_remote_code",
    ),
    "tensors of a step outside": (
        processor_step(PRE, {"registry_name": "normalizer_processor", "state_file": "../../x.safetensors"}),
        PRE,
    ),
    "the tokenizer is a link out": (link_out(TOKENIZER), "outside of"),
    "the tokenizer's folder is a link out": (link_out("tokenizer"), "outside of"),
    "the tokenizer's config is a FIFO": (fifo(TOKENIZER_CONFIG), "is a FIFO"),
    "half a tokenizer": (truncate(TOKENIZER, 0.5), "tokenizer.json"),
    "a tokenizer class": (update(TOKENIZER_CONFIG, tokenizer_class="Evil"), "'Evil'"),
    "a tokenizer with code": (update(TOKENIZER_CONFIG, auto_map={"AutoTokenizer": ["evil.Evil", None]}), "auto_map"),
    "tokens without ids": (update(TOKENIZER, added_tokens=[{"content": "x"}]), "tokenizer.json"),
    "forty normalizers that double": (normalizers(40, "aa"), "VLATUNE_LIMIT_SCALE="),
    "a normalizer that writes 1 MB": (normalizers(1, "a" * (1 << 20)), "VLATUNE_LIMIT_SCALE="),
    "a hundred normalizers": (normalizers(100, "a"), "VLATUNE_LIMIT_SCALE=2"),
    "the size is a link out": (link_out(SIZE), "outside of"),
    "a depth of -1": (update(SIZE, depth=-1), "depth"),
    "a depth of 10^6": (update(SIZE, depth=10**6), "VLATUNE_LIMIT_SCALE="),
    "a vocabulary of 10^12": (update(SIZE, vocab_size=10**12), "VLATUNE_LIMIT_SCALE="),
}
IN_EVAL = ["config.json is a FIFO", "an unknown type", "a preprocessor step names a class", "weights are a pickle"]


@pytest.mark.parametrize(("damage", "mention"), REJECTED.values(), ids=REJECTED)
def test_train_rejects_a_hostile_policy(damage, mention, sandbox, vlatune) -> None:
    damage(sandbox.base)
    vlatune("train", *sandbox.train_flags(), code=2, mentions=mention)


@pytest.mark.parametrize("name", IN_EVAL)
def test_eval_rejects_a_hostile_policy(name, sandbox, vlatune) -> None:
    damage, mention = REJECTED[name]
    damage(sandbox.base)
    flags = [f"--dataset.root={sandbox.dataset}", f"--output_dir={sandbox.out}"]
    vlatune("eval", sandbox.base, *flags, code=2, mentions=mention)


@pytest.mark.parametrize("name", ["config.json is a FIFO", "a preprocessor step names a class", "a depth of 10^6"])
def test_doctor_reports_a_hostile_policy(name, sandbox, vlatune) -> None:
    damage, mention = REJECTED[name]
    damage(sandbox.base)
    html = sandbox.folder / "doctor.html"
    vlatune("doctor", *sandbox.train_flags(), f"--html={html}", code=1, mentions=mention)


@pytest.mark.parametrize("kind", policy_types())
def test_every_policy_rejects_a_step_that_names_a_class(kind: str, dataset_v3: Path, tmp_path: Path) -> None:
    fit = fit_datasets((load_meta(str(dataset_v3)),), seed=0, max_dims=32)
    adapter, folder = get_adapter(kind), tmp_path / "base"
    adapter.make_base(folder, fit, small=True, place=folder)
    adapter.read_spec(folder)
    for name in PROCESSORS:
        original = (folder / name).read_text()
        processor_step(name, POPEN)(folder)
        with pytest.raises(ValueError, match=r"subprocess\.Popen"):
            adapter.read_spec(folder)
        (folder / name).write_text(original)


def test_unknown_config_fields_are_not_passed_on(sandbox) -> None:
    checkpoint = sandbox.run / "checkpoints/00000002"
    for hook in (None, "os.system"):
        update(CONFIG, hook=hook)(sandbox.base)
        update("policy/config.json", hook=hook)(checkpoint)
        if hook is None:
            spec = Pi05Adapter().read_spec(sandbox.base)
            made = make_policy_files(spec, Binding((("a", "a"),), (), 7, 7, ()), {}, dtype=None)
            assert "hook" not in json.loads(made[CONFIG])
            assert "hook" not in json.loads(read_policy_files(checkpoint, Pi05Adapter.schema)[CONFIG])
        else:
            with pytest.raises(ValueError, match=r"'hook'.*'os\.system'"):
                Pi05Adapter().read_spec(sandbox.base)
            with pytest.raises(ValueError, match=r"'hook'.*'os\.system'"):
                read_policy_files(checkpoint, Pi05Adapter.schema)


def test_an_export_copies_only_json_files_of_the_tokenizer(sandbox) -> None:
    (sandbox.base / "tokenizer/tokenizer_evil.py").write_text("import os")
    copy_tokenizer(sandbox.base / TOKENIZER, sandbox.folder / "copied")
    assert {path.suffix for path in (sandbox.folder / "copied").iterdir()} == {".json"}
