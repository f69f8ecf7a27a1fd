"""PI0.5, PI0 and SmolVLA at small sizes, each made once."""

from collections.abc import Callable
from functools import cache

import pytest
from parity.policies.flow_parity import Case, make_case


@pytest.fixture(scope="session")
def cases(dataset_v3, tmp_path_factory) -> Callable[[str], Case]:
    return cache(lambda kind: make_case(kind, tmp_path_factory.mktemp(kind) / "base", dataset_v3))
