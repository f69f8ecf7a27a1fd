"""The sentences of a dataset, in the order of task_index."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vlatune.dataset.meta.meta_info import shortened
from vlatune.dataset.storage.root import Root
from vlatune.limits import check_limit


def sentences_in_order(root: Root, name: str, pairs: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
    """The sentences of task_index 0, 1, 2, ... out of (task_index, sentence); `name` is their file.

    Refused where one is missing, is there twice, or is no text.
    """
    where = f"dataset '{root.url}': {name}"
    by_index = {index: sentence for index, sentence in pairs if type(index) is int}
    if any(type(index) is not int for index, _ in pairs):
        found = ", ".join(shortened(index) for index, _ in pairs[:10])
        raise ValueError(f"{where}: task_index must count 0, 1, 2, ...; found {found}; fetch meta/ anew")
    if len(by_index) < len(pairs):
        [(twice, _)] = Counter(index for index, _ in pairs).most_common(1)
        raise ValueError(
            f"{where}: task_index {twice} is there twice, so that one sentence would stand for the other; fetch meta/ anew"
        )
    for number in range(len(by_index)):
        if number not in by_index:
            found = ", ".join(shortened(one) for one in list(by_index)[:10])
            raise ValueError(f"{where}: task_index must count 0, 1, 2, ...; found {found}; fetch meta/ anew")
        if not isinstance(by_index[number], str):
            raise ValueError(
                f"{where}: the sentence of task_index {number} is {shortened(by_index[number])}, expected text; "
                f"fetch meta/ anew"
            )
        check_limit(
            "text_chars", len(by_index[number]), f"{where}: the sentence of task_index {number} has characters:"
        )
    return tuple(by_index[number] for number in range(len(by_index)))
