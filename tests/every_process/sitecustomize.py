"""Python runs this when it starts, in every process of the tests: `conftest.py` puts this folder into PYTHONPATH.

Some thirty of them import LeRobot, 7.5 s of CPU each, of which two are spared here. diffusers and transformers each ask for
the table of all installed packages: it is made once a session, in a file. And Python looks for garbage many times among objects
that all stay: it does so less often, as `gc.set_threshold` lets any program choose.
"""

import gc
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path

gc.set_threshold(10_000, 10, 100)
make_table = importlib.metadata.packages_distributions


def packages_distributions() -> Mapping[str, list[str]]:
    """Import name -> packages that bring it."""
    table = Path(os.environ["VLATUNE_TESTS_PACKAGES"])
    if not table.exists():
        aside = table.with_name(f"{table.name}.{os.getpid()}")
        aside.write_text(json.dumps(make_table()))
        aside.replace(table)
    return json.loads(table.read_text())


if "VLATUNE_TESTS_PACKAGES" in os.environ:
    importlib.metadata.packages_distributions = packages_distributions
