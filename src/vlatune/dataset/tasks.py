"""The sentences of a dataset, in the order of task_index."""

from collections.abc import Mapping
from typing import Any

from vlatune.dataset.meta_info import shortened
from vlatune.dataset.storage import Root


def sentences_in_order(root: Root, name: str, by_index: Mapping[Any, Any]) -> tuple[str, ...]:
    """The sentences of task_index 0, 1, 2, ...; refused where one is missing or is no text. `name` is their file."""
    where = f"dataset '{root.url}': {name}"
    for number in range(len(by_index)):
        if number not in by_index:
            found = ", ".join(shortened(one) for one in list(by_index)[:10])
            raise ValueError(f"{where}: task_index must count 0, 1, 2, ...; found {found}; fetch meta/ anew")
        if not isinstance(by_index[number], str):
            raise ValueError(
                f"{where}: the sentence of task_index {number} is {shortened(by_index[number])}, expected text; "
                f"fetch meta/ anew"
            )
    return tuple(by_index[number] for number in range(len(by_index)))
