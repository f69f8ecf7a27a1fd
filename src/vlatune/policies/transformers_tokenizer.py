"""Load a tokenizer with transformers, in a child process that has no torch.

transformers imports torch wherever it finds it, which would cost the driver seconds and half a gigabyte. Without
torch its tokenizers work all the same. A library that panics or aborts ends the child only.

    python -P -m vlatune.policies.transformers_tokenizer  < request.json  > result.json
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

TRIAL = "Task: pick up the cup, State: 0 1 2 3 4 5 6 7 8 9;\nAction: \u00fcn\u00ef \uff21"
TIMEOUT_S = 300


@lru_cache(maxsize=4)
def load_in_child(request: str) -> dict[str, Any]:
    """Return the result of `load` in a child process, or `error`."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(command, input=request.encode(), capture_output=True, check=True, timeout=TIMEOUT_S)
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return {"error": f"{type(error).__name__} while transformers loaded it"}


def load(request: str) -> dict[str, Any]:
    """Load a tokenizer and encode a trial prompt.

    `request` is JSON: a class of transformers, and the contents of the tokenizer's files by name. The result has
    `state` (JSON of the `tokenizers` library), `pad_id`, `truncation_side`, and `highest_id` of the vocabulary, the
    trial prompt and the padding.
    """
    import transformers

    class_name, files = json.loads(request)
    with tempfile.TemporaryDirectory() as folder:  # transformers finds no other files there
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content))
        loaded = getattr(transformers, class_name).from_pretrained(folder, local_files_only=True)
    backend = loaded.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    ids = [loaded.pad_token_id or 0, *backend.encode(TRIAL).ids]
    return {
        "state": backend.to_str(),
        "pad_id": loaded.pad_token_id,
        "truncation_side": loaded.truncation_side,
        "highest_id": max(*ids, *backend.get_vocab(with_added_tokens=False).values()),
    }


def main() -> None:
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # as if it were not installed
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # the library prints warnings to stdout
        try:
            result = load(sys.stdin.read())
        except BaseException as error:  # the library's panics are no Exception
            result = {"error": str(error)}
        json.dump(result, output)


if __name__ == "__main__":
    main()
