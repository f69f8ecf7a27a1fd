"""Tokenizers of a stranger's base model on which the library panics, or whose ids the model does not know."""

import base64
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured import measured

GARBAGE = base64.b64encode(struct.pack("<II", 4, 0x03AC036D)).decode()
"""A table of SentencePiece's whose index leads out of it."""


@pytest.fixture
def base(small_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_base, tmp_path / "base"))


def change(base: Path, name: str, do: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((base / "tokenizer" / name).read_text())
    do(content)
    (base / "tokenizer" / name).write_text(json.dumps(content))


def panics(base: Path) -> None:
    change(base, "tokenizer_config.json", lambda content: content.update(tokenizer_class="PreTrainedTokenizerFast"))
    normaliser = {"type": "Precompiled", "precompiled_charsmap": GARBAGE}
    change(base, "tokenizer.json", lambda content: content.update(normalizer=normaliser))


def moved_ids(base: Path) -> None:
    def move(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = {
            token: number if number < 200 else number + 10**6 for token, number in vocab.items()
        }

    change(base, "tokenizer.json", move)


def ids_around_a_prompt(base: Path) -> None:
    def put(content: dict[str, Any]) -> None:
        special = {"<bos>": {"id": "<bos>", "ids": [10**6], "tokens": ["<bos>"]}}
        single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        parts = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
        content["post_processor"] = parts | {"pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}]}

    change(base, "tokenizer.json", put)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (panics, "cannot be used ("),
        (moved_ids, "has the token id 1"),
        (ids_around_a_prompt, "has the token id 1000000"),
    ],
)
def test_a_tokenizer_is_checked_when_the_base_is_read(make, message, base, dataset_v3, tmp_path) -> None:
    make(base)
    for command in ("train", "doctor"):
        flags = (f"--dataset.root={dataset_v3}", f"--policy.path={base}", f"--output_dir={tmp_path / 'out'}")
        ended = measured(command, *flags, "--batch_size=4", "--steps=1")
        assert (ended.code, message in ended.text) == (2 if command == "train" else 1, True), ended.text
        assert "Traceback" not in ended.text
        assert "panicked" not in ended.text


def test_an_added_token_beyond_the_table_is_an_error_only_in_a_prompt(base, dataset_v3, tmp_path) -> None:
    """The token is like PaliGemma's `<image>`, whose id is the number of rows."""
    from vlatune.batch import TASK, TOKENS
    from vlatune.policies.tokenizer import Tokenise
    from vlatune.registry import get_adapter

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    size = get_adapter("pi05").read_spec(base).vocab_size
    more = [
        flags | {"content": f"<{number}>", "id": size + number} for number in range(size)
    ]  # it counts on from the last
    more.append(flags | {"content": "<image>", "id": 2 * size})
    change(base, "tokenizer.json", lambda content: content["added_tokens"].extend(more))
    spec = get_adapter("pi05").read_spec(base)
    tokenise = Tokenise(spec.tokenizer, spec.max_tokens, spec.vocab_size)
    assert tokenise({TASK: ["do it"]})[TOKENS].max() < spec.vocab_size
    with pytest.raises(ValueError, match=r"the prompt 'do <image>' has the token id \d+, the model knows \d+ tokens"):
        tokenise({TASK: ["do <image>"]})
