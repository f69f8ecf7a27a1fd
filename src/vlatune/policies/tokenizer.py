"""A tokenizer as transformers' `AutoTokenizer` makes it of a folder, by the `tokenizers` library alone.

Readers import neither transformers nor torch, and no code that a repository could bring is run. tokenizer.json holds the
tokenizer; tokenizer_config.json may add tokens, say on which side long prompts are cut and whether special tokens in a
text are taken apart, and names a class. Gemma's class puts parts of its own in place of the file's, and so does GPT-2's, which
SmolVLM's tokenizer names; one that is not known here might do the same and is refused. `add_bos_token` there counts for nothing beside a tokenizer.json. For every policy
with a prompt: where its tokenizer is, and the transform that uses it.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import TASK, TOKEN_MASK, TOKENS, Columns
from vlatune.files import MAX_TOKENIZER_BYTES, parse_json, read_file, real_path
from vlatune.limits import check_limit
from vlatune.policies.base_folder import TOKENIZER, fetch_file, read_object
from vlatune.policies.processors import PREPROCESSOR, is_hub_name

CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
PLAIN = (None, "TokenizersBackend", "PreTrainedTokenizerFast")
GEMMA = ("GemmaTokenizer", "GemmaTokenizerFast")
GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
KNOWN = (*PLAIN, *GEMMA, *GPT2)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

GEMMA_PARTS = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
}
GEMMA_MODEL = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": True,
    "ignore_merges": False,
}
GEMMA_TOKENS = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
GPT2_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
GPT2_TOKENS = {f"{name}_token": "<|endoftext|>" for name in ("unk", "bos", "eos")}


@dataclass(frozen=True)
class Tokenise:
    """`task` -> token ids and mask, padded on the right to `max_length`, longer prompts cut."""

    tokenizer_file: str
    max_length: int
    pad_id: int

    def __call__(self, columns: Columns) -> Columns:
        tokenizer = load_tokenizer(self.tokenizer_file, self.max_length)
        encoded = tokenizer.encode_batch([str(prompt) for prompt in columns[TASK]])
        tokens_NL = np.full((len(encoded), self.max_length), self.pad_id, dtype=np.int64)
        mask_NL = np.zeros((len(encoded), self.max_length), dtype=bool)
        for row, encoding in enumerate(encoded):
            tokens_NL[row, : len(encoding.ids)] = encoding.ids
            mask_NL[row, : len(encoding.ids)] = True
        rest = {name: values for name, values in columns.items() if name != TASK}
        return rest | {TOKENS: tokens_NL, TOKEN_MASK: mask_NL}


def end_with_newline(task: str) -> str:
    """As LeRobot writes prompts for models that were taught that a prompt ends so."""
    return task if task.endswith("\n") else f"{task}\n"


@dataclass(frozen=True)
class NewlinePrompt:
    """`task` with a newline at its end."""

    def __call__(self, columns: Columns) -> Columns:
        prompts = np.empty(len(columns[TASK]), dtype=object)
        prompts[:] = [end_with_newline(str(task)) for task in columns[TASK]]
        return columns | {TASK: prompts}


def tokenizer_settings(folder: Path, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the preprocessor's step that tokenises; they name the tokenizer."""
    found = [step["config"] for step in steps if step["registry_name"] == "tokenizer_processor"]
    if not found or not found[0].get("tokenizer_name"):
        raise ValueError(f"policy '{folder}': {PREPROCESSOR} names no tokenizer")
    if (side := found[0].get("padding_side", "right")) != "right":
        raise ValueError(f"policy '{folder}': {PREPROCESSOR} pads prompts on the {side}, expected right")
    return found[0]


def find_tokenizer(folder: Path, name: str) -> Path:
    """The tokenizer.json of that name: a folder in the policy's own, or a hub repository.

    A full path counts by its last part: an export names its own tokenizer so, and may have been moved.
    """
    for own in (Path(name).name, "tokenizer"):
        if (folder / own / TOKENIZER).exists():
            real_path(folder, f"{own}/{TOKENIZER}")  # not by a link that leads out
            return folder / own / TOKENIZER
    if not is_hub_name(name):
        raise ValueError(
            f"policy '{folder}': {PREPROCESSOR} names the tokenizer '{name}', which is not there; put its folder into the "
            f"policy's own, as '{folder / 'tokenizer'}'"
        )
    if (Path(name) / TOKENIZER).exists():  # LeRobot looks from the current folder, too
        return Path(name) / TOKENIZER
    fetch_file(name, CONFIG)
    return fetch_file(name, TOKENIZER)


def find_pad_id(tokenizer_file: Path) -> int:
    """The id of the padding token; 0 in every Gemma tokenizer, but the file knows."""
    token = _text(read_settings(tokenizer_file.parent).get("pad_token"))
    content = read_object(tokenizer_file.parent, tokenizer_file.name)
    check_tokenizer(content, f"tokenizer '{tokenizer_file.parent}': {TOKENIZER}")
    found = [entry["id"] for entry in content.get("added_tokens") or [] if entry["content"] == token]
    if not found:
        raise ValueError(f"tokenizer '{tokenizer_file.parent}': its pad token {token!r} is not in tokenizer.json")
    return int(found[0])


def load_tokenizer(file: str, max_length: int) -> Any:
    """Cuts at `max_length` tokens, and does not pad. Kept for the next block; files that were replaced are read anew."""
    folder = Path(file).parent
    if not Path(file).exists():
        raise ValueError(f"tokenizer file '{file}' is missing; it belongs to the policy's folder")
    found = [(folder / name).stat() for name in (Path(file).name, CONFIG, SPECIAL_TOKENS) if (folder / name).exists()]
    return _load_tokenizer(file, max_length, tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found))


@lru_cache(maxsize=4)
def _load_tokenizer(file: str, max_length: int, _versions: tuple[tuple[int, ...], ...]) -> Any:
    import tokenizers

    settings = read_settings(Path(file).parent)
    data = read_file(Path(file).parent, Path(file).name, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        if (remake := {GEMMA: as_gemma, GPT2: as_gpt2}.get(_family(settings))) is not None:
            data = json.dumps(remake(json.loads(data), settings)).encode()
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        _add_tokens(tokenizer, settings)
        tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length, direction=settings.get("truncation_side", "right"))
    except Exception as error:  # the library's own have no kind of their own
        raise ValueError(
            f"tokenizer '{file}' cannot be used ({error}); take it from the policy's source anew"
        ) from error
    return tokenizer


def check_tokenizer(content: Mapping[str, Any], where: str) -> None:
    """Refuse, before the library sees it, a tokenizer.json that would let a prompt grow without end, which aborts the process."""
    tokens = content.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
        raise ValueError(f"{where}: added_tokens is not a list of tokens with content and id; take the file anew")
    normalisers = _steps(content.get("normalizer"), "normalizers")
    others = _steps(content.get("pre_tokenizer"), "pretokenizers") + _steps(content.get("post_processor"), "processors")
    pieces = [piece for step in others for name in ("single", "pair") for piece in _list(step.get(name))]
    check_limit("tokenizer_steps", len(normalisers) + len(others) + len(pieces), f"{where} has steps:")
    growth = math.ceil(min(math.prod(map(_growth, normalisers)), 1e18))
    check_limit("tokenizer_growth", growth, f"{where}: its normalisers make a prompt longer, times:")


def _is_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A part of a tokenizer.json as the steps that it is made of, however they are nested."""
    if not isinstance(part, dict):
        return []
    inner = [step for one in _list(part.get(name)) for step in _steps(one, name)]
    return [part, *inner]


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer a normaliser may make a text."""
    match step.get("type"):
        case "Replace":
            pattern, content = step.get("pattern"), len(str(step.get("content")).encode())
            replaced = str(pattern.get("String") or "").encode() if isinstance(pattern, dict) else b""
            return (
                max(1.0, content / len(replaced)) if replaced else content + 1.0
            )  # a regex may match nothing, anywhere
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
    """SentencePiece's table: the length of an index, the index, then the texts that are put in, each with a zero after it."""
    try:
        table = base64.b64decode(charsmap or "")
    except (TypeError, ValueError):
        return 1.0  # the library refuses it
    return max(1.0, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what an older folder keeps in special_tokens_map.json."""
    settings = _read_object(folder, CONFIG)
    name = settings.get("tokenizer_class")
    if name not in KNOWN:
        raise ValueError(
            f"tokenizer '{folder}': {CONFIG} says tokenizer_class '{name}', of which it is not known what it makes of tokenizer.json; "
            f"expected one of {', '.join(filter(None, KNOWN))}; where tokenizer.json is all of it, set PreTrainedTokenizerFast there"
        )
    if "auto_map" in settings:
        raise ValueError(
            f"tokenizer '{folder}': {CONFIG} names code of its own (auto_map), which is neither run nor passed on; where tokenizer.json "
            f"is all of it, remove auto_map there"
        )
    if "added_tokens_decoder" not in settings:
        settings |= _read_object(folder, SPECIAL_TOKENS)
    return {GEMMA: GEMMA_TOKENS, GPT2: GPT2_TOKENS}.get(_family(settings), {}) | settings


def _family(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the class, if it puts parts of its own in place of the file's."""
    return next((family for family in (GEMMA, GPT2) if settings.get("tokenizer_class") in family), ())


def as_gemma(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma's class takes of a tokenizer.json: vocabulary, merges, and what is put around a prompt."""
    model = dict(content["model"]) | GEMMA_MODEL | {"unk_token": _text(settings["unk_token"])}
    listed = [] if "added_tokens_decoder" in settings else content["added_tokens"]
    return dict(content) | GEMMA_PARTS | {"model": model, "added_tokens": listed}


def as_gpt2(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What GPT-2's class takes of a tokenizer.json: the same; words are cut in its own way, and nothing is normalised."""
    words = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space")), "trim_offsets": True}
    listed = [] if "added_tokens_decoder" in settings else content["added_tokens"]
    parts = {"normalizer": None, "pre_tokenizer": words | {"use_regex": True}, "added_tokens": listed}
    return dict(content) | parts | {"model": dict(content["model"]) | GPT2_MODEL}


def _add_tokens(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Those that are only named beside tokenizer.json, in transformers' order, which decides the ids of new ones."""
    from tokenizers import AddedToken

    decoder = settings.get("added_tokens_decoder") or {}
    listed = [AddedToken(**_flags(decoder[key])) for key in sorted(decoder, key=int)]
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    there |= {token.content for token in listed}
    named = [text for text in _special_tokens(settings) if text not in there]
    tokenizer.add_tokens([*listed, *(AddedToken(text, special=True) for text in dict.fromkeys(named))])


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    """The named ones, a model's own, and those without a name."""
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or []
    own = {name: value for name, value in settings.items() if name.endswith("_token") and isinstance(value, str)}
    own |= extra if isinstance(extra, dict) else {}
    named = [settings.get(name) for name in NAMED] + [value for name, value in own.items() if name not in NAMED]
    unnamed = [] if isinstance(extra, dict) else extra
    yield from (text for value in (*named, *unnamed) if (text := _text(value)) is not None)


def _text(token: Any) -> str | None:
    """A token is written as itself, or with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _flags(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in FLAGS if name in token}


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        return {}
    value = parse_json(read_file(folder, name, max_bytes=MAX_TOKENIZER_BYTES), f"tokenizer '{folder}': {name}")
    if not isinstance(value, dict):
        raise ValueError(f"tokenizer '{folder}': {name} holds a {type(value).__name__}, expected an object")
    return value
