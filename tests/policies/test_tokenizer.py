"""Prompts become the tokens that LeRobot's step makes of them with transformers' AutoTokenizer, whatever the folder says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot.processor import TokenizerProcessorStep

from vlatune.batch import TASK, TOKEN_MASK, TOKENS
from vlatune.policies.tokenizer import Tokenise, read_settings

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


def check(folder: Path, *, bare: bool = False) -> None:
    """Equal to LeRobot's; `bare`: also to tokenizer.json without anything else, which is then no test of the rest."""
    same = True
    for max_length in (LONG, SHORT):
        theirs = TokenizerProcessorStep(tokenizer_name=str(folder), max_length=max_length)._tokenize_text(list(PROMPTS))
        ours = Tokenise(str(folder / "tokenizer.json"), max_length, 0)({TASK: np.array(PROMPTS, dtype=object)})
        assert ours[TOKENS].tolist() == theirs["input_ids"].tolist()
        assert ours[TOKEN_MASK].tolist() == theirs["attention_mask"].bool().tolist()
        same &= ours[TOKENS].tolist() == bare_tokens(folder, max_length)
    assert same is bare


def bare_tokens(folder: Path, max_length: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [(one.ids[:max_length] + [0] * max_length)[:max_length] for one in tokenizer.encode_batch(list(PROMPTS))]


def ends_with_eos(content: dict[str, Any]) -> dict[str, Any]:
    ids = {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    around = content["post_processor"]
    around["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    around["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [ids["<eos>"]], "tokens": ["<eos>"]}
    return content


@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}], ids=str
)
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("bos", [True, False])
def test_add_bos_token_counts_for_nothing_beside_a_tokenizer_json(folder, config, name, bos):
    content = read(folder)
    write(folder, content if bos else content | {"post_processor": None}, tokenizer_class=name, **config)
    check(folder, bare=True)


@pytest.mark.parametrize(
    "config",
    [
        {"truncation_side": "left"},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"999": TOKEN | {"content": "State", "special": False}}},
        {"extra_special_tokens": ["State", "do"]},
        {"extra_special_tokens": {"robot_token": "State"}},
        {"additional_special_tokens": ["State"]},
        {"mask_token": "<mask>", "robot_token": "State"},
    ],
    ids=str,
)
def test_what_the_config_says_beside_it_counts(folder, config):
    write(folder, read(folder), **config)
    check(folder)


def test_a_prompt_that_is_cut_keeps_what_is_put_around_it(folder):
    write(folder, ends_with_eos(read(folder)))
    check(folder)


def test_tokens_of_an_older_folder(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": "<mask>", "pad_token": "<pad>"}))
    check(folder)


def gemma(content: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The same vocabulary with what Gemma's class asks for."""
    vocab = content["model"]["vocab"]
    for token in ("<unk>", "<mask>", "▁"):
        vocab[token] = len(vocab)
    change(content)
    return content


@pytest.mark.parametrize("name", ["GemmaTokenizer", "GemmaTokenizerFast"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"added_tokens_decoder": {}}], ids=str)
@pytest.mark.parametrize("bos", [True, False])
def test_gemmas_class_puts_parts_of_its_own_in_place_of_the_files(folder, name, config, bos):
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
"""How SmolVLM's tokenizer.json cuts words."""


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
def test_gpt2s_class_cuts_words_in_its_own_way(folder, name, bos, config):
    """As the tokenizer of SmolVLM names it, whose tokenizer.json takes digits apart: transformers' class does not."""
    content = read(folder) | {"pre_tokenizer": SMOLLM, "normalizer": {"type": "Lowercase"}}
    write(folder, content if bos else content | {"post_processor": None}, tokenizer_class=name, **config)
    check(folder)


def test_a_class_of_which_nothing_is_known_is_refused_with_what_to_do(folder):
    write(folder, read(folder), tokenizer_class="LlamaTokenizerFast")
    with pytest.raises(
        ValueError, match=r"says tokenizer_class 'LlamaTokenizerFast'.*set PreTrainedTokenizerFast there"
    ):
        read_settings(folder)
    write(folder, read(folder), tokenizer_class="PreTrainedTokenizerFast")
    check(folder, bare=True)
