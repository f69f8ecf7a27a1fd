"""Prompts get the tokens of LeRobot's step, which uses transformers' AutoTokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot.processor import TokenizerProcessorStep

from vlatune.batch import TASK, TOKEN_MASK, TOKENS
from vlatune.policies.tokenizer import Tokenise, load_tokenizer
from vlatune.policies.transformers_tokenizer import load

PROMPTS = (
    "Task: do it, State: 1 20 255;\nAction: ",
    "Task: <eos> pick UP  the <bos>thing <mask> ünï, State: 0;\nAction: ",
    "",
)
LONG, SHORT = 48, 12
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.fixture
def folder(small_base, tmp_path) -> Path:
    return Path(shutil.copytree(small_base / "tokenizer", tmp_path / "tokenizer"))


def read(folder: Path, name: str = "tokenizer.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def write(folder: Path, content: dict[str, Any], **config: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(read(folder, "tokenizer_config.json") | config))


def check(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json", 10**6, load)
    for max_length in (LONG, SHORT):
        theirs = TokenizerProcessorStep(tokenizer_name=str(folder), max_length=max_length)._tokenize_text(list(PROMPTS))
        ours = Tokenise(tokenizer, max_length, 10**6)({TASK: np.array(PROMPTS, dtype=object)})
        assert ours[TOKENS].tolist() == theirs["input_ids"].tolist()
        assert ours[TOKEN_MASK].tolist() == theirs["attention_mask"].bool().tolist()


def ends_with_eos(content: dict[str, Any]) -> dict[str, Any]:
    ids = {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    around = content["post_processor"]
    around["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    around["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [ids["<eos>"]], "tokens": ["<eos>"]}
    return content


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"truncation_side": "left"},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"999": TOKEN | {"content": "State", "special": False}}},
        {"extra_special_tokens": ["State", "do"]},
        {"extra_special_tokens": {"robot_token": "State"}},
        {"additional_special_tokens": ["State"]},
        {"mask_token": "<mask>", "robot_token": "State"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": None},
        {"chat_template": "{{ x }}", "vocab_file": "/none", "name_or_path": "/none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("bos", [True, False])
def test_settings_of_tokenizer_config_json(folder, config, bos):
    content = read(folder)
    write(folder, content if bos else content | {"post_processor": None}, **config)
    check(folder)


def test_truncation_keeps_special_tokens_around_the_prompt(folder):
    write(folder, ends_with_eos(read(folder)))
    check(folder)


def test_special_tokens_of_an_older_folder(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": "<mask>", "pad_token": "<pad>"}))
    check(folder)


def gemma(content: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the same vocabulary with the tokens that Gemma's class requires."""
    vocab = content["model"]["vocab"]
    for token in ("<unk>", "<mask>", "▁"):
        vocab[token] = len(vocab)
    change(content)
    return content


@pytest.mark.parametrize("name", ["GemmaTokenizer", "GemmaTokenizerFast"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"added_tokens_decoder": {}}], ids=str)
@pytest.mark.parametrize("bos", [True, False])
def test_gemmas_class(folder, name, config, bos):
    content = gemma(read(folder), lambda one: one.update({} if bos else {"post_processor": None}))
    if "added_tokens_decoder" in config:
        config = {
            "added_tokens_decoder": {
                str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
                for entry in content["added_tokens"]
                if entry["content"] != "<eos>"
            }
        }
    write(folder, content, tokenizer_class=name, **config)
    check(folder)


DIGITS = {"type": "Digits", "individual_digits": True}
SMOLLM = {
    "type": "Sequence",
    "pretokenizers": [
        DIGITS,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
"""Pre-tokenizer of SmolVLM's tokenizer.json."""


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPT2TokenizerFast"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"added_tokens_decoder": {"0": TOKEN | {"content": "<pad>", "special": True}}, "truncation_side": "left"},
        {"add_prefix_space": True, "unk_token": "<eos>", "bos_token": "<bos>", "eos_token": "<eos>"},
        {"fake_image_token": "<fake_token_around_image>", "extra_special_tokens": ["State"]},
    ],
    ids=str,
)
def test_gpt2s_class(folder, name, bos, config):
    """SmolVLM names it. Its tokenizer.json splits digits; transformers' class does not."""
    content = read(folder) | {"pre_tokenizer": SMOLLM, "normalizer": {"type": "Lowercase"}}
    write(folder, content if bos else content | {"post_processor": None}, tokenizer_class=name, **config)
    check(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, "LlamaTokenizerFast.*set PreTrainedTokenizerFast"),
        ({"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}, "remove auto_map"),
        ({"pad_token": None}, "no pad_token"),
        ({"extra_special_tokens": ["x" * 10**6]}, "longest added token"),
        ({"extra_special_tokens": [f"<{number}>" for number in range(10**5)]}, "added tokens"),
    ],
    ids=["class", "code", "no pad token", "long token", "many tokens"],
)
def test_an_unsupported_config_is_an_error(folder, config, message):
    write(folder, read(folder), **config)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(folder / "tokenizer.json", 10**6, load)
    assert len(str(caught.value)) < 500


def test_the_child_process_without_torch_loads_the_same(folder):
    write(folder, gemma(read(folder), lambda one: None), tokenizer_class="GemmaTokenizer")
    file = folder / "tokenizer.json"
    assert load_tokenizer(file, 10**6) == load_tokenizer(file, 10**6, load)


def test_the_pad_token_is_the_configs(folder):
    ids = {entry["content"]: entry["id"] for entry in read(folder)["added_tokens"]}
    for form in ("<eos>", TOKEN | {"content": "<eos>", "special": True, "__type": "AddedToken"}):
        write(folder, read(folder), pad_token=form)
        assert load_tokenizer(folder / "tokenizer.json", 10**6, load).pad_id == ids["<eos>"] != 0


def test_a_damaged_file_is_an_error(folder):
    (folder / "tokenizer.json").write_text('{"added_tokens": [')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not readable JSON"):
        load_tokenizer(folder / "tokenizer.json", 10**6, load)
