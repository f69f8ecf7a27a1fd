"""Runs of every policy, each made once: two real steps of its small twin, without Ray."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "checkpoint"))  # a run without Ray is there: small_run.py

from small_run import make_finished, small_config  # noqa: E402

from vlatune import cli  # noqa: E402
from vlatune.config import OptimizerConfig, PolicyConfig  # noqa: E402
from vlatune.dataset.meta.dataset_meta import load_meta  # noqa: E402
from vlatune.policies.registry import get_adapter, get_policy  # noqa: E402
from vlatune.train.driver.tiny_base import fit_datasets  # noqa: E402


@pytest.fixture(scope="session")
def run_of(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Type of a policy -> a run folder with a checkpoint; two of seven episodes are held out."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(f"eval-{name}")
        fit = fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
        get_adapter(name).make_base(folder / "base", replace(fit, horizon=4), small=True, place=folder / "base")
        policy = PolicyConfig(path=str(folder / "base"), type=name, train="full", overrides={"n_action_steps": 3})
        assert "n_action_steps" in get_policy(name).overrides
        config = small_config(
            dataset_v3, folder / "base", folder / "run", policy=policy, optimizer=OptimizerConfig(lr=1e-3)
        )
        config = replace(config, dataset=replace(config.dataset, eval_split=0.3))
        return make_finished(config)

    return make


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Words of `vlatune eval` -> what it tells machines."""

    def figures(*words: object) -> dict[str, Any]:
        capsys.readouterr()
        code = cli.main(["eval", *map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert code == cli.OK, err
        return json.loads(out)

    return figures


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Words of `vlatune eval` -> the one line with which it is refused."""

    def refused(*words: object) -> str:
        capsys.readouterr()
        assert cli.main(["eval", *map(str, words)]) == cli.MISUSED
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    return refused
