"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

import vlatune

SOURCE = Path(vlatune.__file__).parent
MODULES = sorted(file for file in SOURCE.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_examples(file):
    name = ".".join(("vlatune", *file.relative_to(SOURCE).with_suffix("").parts))
    result = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert result.attempted > 0
    assert result.failed == 0
