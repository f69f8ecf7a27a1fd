"""A policy's tokenizer: found and loaded on the driver, applied by read tasks.

A child process of the driver loads it with transformers, as LeRobot does. Its state (`PromptTokenizer`)
is sent with the transforms, so that read tasks need neither transformers, torch nor the files. No code from a
repository runs: only JSON files of bounded size are read, and only classes of transformers that are
defined by a tokenizer.json are used.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import TASK, TOKEN_MASK, TOKENS, Columns
from vlatune.policies.base_folder import TOKENIZER, read_object
from vlatune.policies.processors import PREPROCESSOR, is_hub_name
from vlatune.policies.transformers_tokenizer import load_in_child
from vlatune.storage.files import real_path
from vlatune.storage.hub import fetch
from vlatune.storage.limits import check_limit

MAX_LENGTH = "tokenizer_max_length"
"""Field of config.json; the preprocessor step calls it `max_length`."""
CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
DEFAULT_CLASS = "PreTrainedTokenizerFast"
CLASSES = (
    DEFAULT_CLASS,
    "TokenizersBackend",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
)
"""Supported values of `tokenizer_class`."""
TOKEN = "_token"
"""Part of the names of fields that add tokens: pad_token, extra_special_tokens, added_tokens_decoder."""
SETTINGS = ("tokenizer_class", "truncation_side", "split_special_tokens", "add_prefix_space")
"""Other fields of tokenizer_config.json that are used."""


@dataclass(frozen=True)
class PromptTokenizer:
    """A loaded tokenizer; encodes like transformers' with the same files."""

    file: str
    """The tokenizer.json, for messages."""
    state: str = field(repr=False)
    """JSON of the `tokenizers` library."""
    pad_id: int
    truncation_side: str = "right"
    split_special_tokens: bool = False

    def encode(self, prompts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return token ids, truncated to `max_length`, without padding."""
        try:
            tokenizer = _parse(self.state, max_length, self.truncation_side, self.split_special_tokens)
            return [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # a panic is no Exception
                raise _unusable(self.file, error) from error
            raise


@lru_cache(maxsize=4)
def _parse(state: str, max_length: int, truncation_side: str, split_special_tokens: bool) -> Any:
    """Return a tokenizer that is never changed again: changing one fails while another thread encodes."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(state)
    tokenizer.encode_special_tokens = split_special_tokens
    tokenizer.enable_truncation(max_length, direction=truncation_side)
    return tokenizer


@dataclass(frozen=True)
class Tokenise:
    """Convert `task` to token ids and mask, padded on the right or truncated to `max_length`."""

    tokenizer: PromptTokenizer
    max_length: int
    vocab_size: int

    def __call__(self, columns: Columns) -> Columns:
        prompts = [str(prompt) for prompt in columns[TASK]]
        encoded = self.tokenizer.encode(prompts, self.max_length)
        tokens_NL = np.full((len(encoded), self.max_length), self.tokenizer.pad_id, dtype=np.int64)
        mask_NL = np.zeros((len(encoded), self.max_length), dtype=bool)
        for row, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            if max(ids, default=0) >= self.vocab_size:
                raise ValueError(
                    f"tokenizer '{self.tokenizer.file}': the prompt {prompt[:80]!r} has the token id {max(ids)}, the model knows "
                    f"{self.vocab_size} tokens; download the tokenizer again, or change the task's text"
                )
            tokens_NL[row, : len(ids)] = ids
            mask_NL[row, : len(ids)] = True
        rest = {name: values for name, values in columns.items() if name != TASK}
        return rest | {TOKENS: tokens_NL, TOKEN_MASK: mask_NL}


def end_with_newline(task: str) -> str:
    """Append a newline, as LeRobot does for models trained on such prompts."""
    return task if task.endswith("\n") else f"{task}\n"


@dataclass(frozen=True)
class NewlinePrompt:
    """Append a newline to `task`."""

    def __call__(self, columns: Columns) -> Columns:
        prompts = np.empty(len(columns[TASK]), dtype=object)
        prompts[:] = [end_with_newline(str(task)) for task in columns[TASK]]
        return columns | {TASK: prompts}


def tokenizer_settings(
    folder: Path, steps: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of the preprocessor's tokenizer step, with the run's length."""
    found = [step["config"] for step in steps if step["registry_name"] == "tokenizer_processor"]
    if not found or not found[0].get("tokenizer_name"):
        raise ValueError(f"policy '{folder}': {PREPROCESSOR} names no tokenizer")
    if (side := found[0].get("padding_side", "right")) != "right":
        raise ValueError(f"policy '{folder}': {PREPROCESSOR} pads prompts on the {side}, expected right")
    length = overrides.get(MAX_LENGTH)
    return found[0] if length is None else {**found[0], "max_length": int(length)}


def find_tokenizer(folder: Path, name: str) -> Path:
    """Return the tokenizer.json inside the policy's folder, or from a hub repository.

    Absolute paths are reduced to their last part, because an export that stores one may have been
    moved. LeRobot 0.7 stores a path relative to the policy's folder.
    """
    inside = name if not Path(name).is_absolute() and ".." not in Path(name).parts else Path(name).name
    for own in (inside, Path(name).name, "tokenizer"):
        if (folder / own / TOKENIZER).exists():
            real_path(folder, f"{own}/{TOKENIZER}")  # rejects links that leave the folder
            return folder / own / TOKENIZER
    if not is_hub_name(name):
        raise ValueError(
            f"policy '{folder}': {PREPROCESSOR} names the tokenizer '{name}', which is not there; put its folder into the "
            f"policy's own, as '{folder / 'tokenizer'}'"
        )
    _, file = (fetch(name, lambda hub, file=file: hub.hf_hub_download(name, file)) for file in (CONFIG, TOKENIZER))
    return file


def load_tokenizer(
    file: Path, vocab_size: int, load: Callable[[str], dict[str, Any]] = load_in_child
) -> PromptTokenizer:
    """Load a tokenizer.json with transformers, and check it.

    Raises if the library cannot use it, or ids exceed the model's embedding table. Added tokens may
    exceed it (`<image>` may); prompts are checked when tokenised.
    """
    present = {name: name == TOKENIZER or (file.parent / name).exists() for name in (TOKENIZER, CONFIG, SPECIAL_TOKENS)}
    files = {name: read_object(file.parent, name) if is_there else {} for name, is_there in present.items()}
    config, where = files[CONFIG], f"tokenizer '{file.parent}'"
    name = config.get("tokenizer_class") or DEFAULT_CLASS
    if name not in CLASSES:
        raise ValueError(
            f"{where}: {CONFIG} has the unsupported tokenizer_class '{name}', expected one of {', '.join(CLASSES)}; if tokenizer.json "
            f"defines the tokenizer completely, set {DEFAULT_CLASS} there"
        )
    if "auto_map" in config:
        raise ValueError(
            f"{where}: {CONFIG} names code (auto_map), which is not run; if tokenizer.json defines the tokenizer completely, "
            f"remove auto_map there"
        )
    files[CONFIG] = config = {key: value for key, value in config.items() if TOKEN in key or key in SETTINGS}
    _check_growth(files[TOKENIZER], f"{where}: {TOKENIZER}")
    for settings in (config, files[SPECIAL_TOKENS]):
        _check_added([text for key, value in settings.items() if TOKEN in key for text in _texts(value)], where)
    loaded = load(json.dumps([name, {name: content for name, content in files.items() if content}]))
    if "error" in loaded:
        raise _unusable(file, loaded["error"])
    if loaded["pad_id"] is None:
        raise ValueError(f"{where}: {CONFIG} has no pad_token; expected the token that pads prompts")
    if loaded["highest_id"] >= vocab_size:
        raise ValueError(
            f"tokenizer '{file}' has the token id {loaded['highest_id']}, the model knows {vocab_size} tokens; download it again"
        )
    splits = bool(config.get("split_special_tokens"))
    return PromptTokenizer(str(file), loaded["state"], loaded["pad_id"], loaded["truncation_side"], splits)


def _unusable(file: Path | str, reason: object) -> ValueError:
    return ValueError(f"tokenizer '{file}' cannot be used ({str(reason)[:200]}); download it again")


def _check_growth(content: Mapping[str, Any], where: str) -> None:
    """Raise if a tokenizer.json could expand a prompt without bound, which aborts the process."""
    _check_added([text for one in _list(content.get("added_tokens")) for text in _texts(one)], where)
    normalisers = _steps(content.get("normalizer"), "normalizers")
    others = _steps(content.get("pre_tokenizer"), "pretokenizers") + _steps(content.get("post_processor"), "processors")
    pieces = [piece for step in others for name in ("single", "pair") for piece in _list(step.get(name))]
    check_limit("tokenizer_steps", len(normalisers) + len(others) + len(pieces), f"{where} has steps:")
    growth = math.ceil(min(math.prod(map(_growth, normalisers)), 1e18))
    check_limit("tokenizer_growth", growth, f"{where}: its normalisers make a prompt longer, times:")


def _texts(value: Any) -> list[str]:
    """Return all texts in a JSON value."""
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _check_added(texts: Sequence[str], where: str) -> None:
    """Raise on added tokens that would make the library take minutes per prompt."""
    check_limit("added_tokens", len(texts), f"{where} has added tokens:")
    check_limit("token_chars", max(map(len, texts), default=0), f"{where}: its longest added token has characters:")


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """Flatten a part of a tokenizer.json into its nested steps."""
    if not isinstance(part, dict):
        return []
    inner = [step for one in _list(part.get(name)) for step in _steps(one, name)]
    return [part, *inner]


def _growth(step: Mapping[str, Any]) -> float:
    """Return an upper bound on how many times longer a normaliser can make a text."""
    match step.get("type"):
        case "Replace":
            pattern, content = step.get("pattern"), len(str(step.get("content")).encode())
            replaced = str(pattern.get("String") or "").encode() if isinstance(pattern, dict) else b""
            # A regex may match the empty string anywhere.
            return max(1.0, content / len(replaced)) if replaced else content + 1.0
        case "Prepend":
            return max(1.0, len(str(step.get("prepend"))))
        case "Precompiled":
            return _longest_replacement(step.get("precompiled_charsmap"))
        case "NFKC" | "NFKD":
            return 12.0
        case "BertNormalizer" | "Lowercase" | "NFD":
            return 3.0
    return 1.0


def _longest_replacement(charsmap: Any) -> float:
    """Return the longest replacement in SentencePiece's table: index size, index, texts."""
    try:
        table = base64.b64decode(charsmap or "")
    except (TypeError, ValueError):
        return 1.0  # the library rejects it
    return max(1.0, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
