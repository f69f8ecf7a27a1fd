"""Runs of every policy, each made once: two training steps of its tiny model, without Ray."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_run import make_finished, small_config

from vlatune import cli
from vlatune.config.settings import OptimizerConfig, PolicyConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.registry import get_adapter, get_policy_info
from vlatune.train.driver.tiny_base import fit_datasets


@pytest.fixture(scope="session")
def run_of(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a policy type to a run folder; two of seven episodes are held out."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(f"eval-{name}")
        fit = fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
        get_adapter(name).make_base(folder / "base", replace(fit, horizon=4), small=True, place=folder / "base")
        policy = PolicyConfig(path=str(folder / "base"), type=name, train="full", overrides={"n_action_steps": 3})
        assert "n_action_steps" in get_policy_info(name).option_defaults
        config = small_config(
            dataset_v3, folder / "base", folder / "run", policy=policy, optimizer=OptimizerConfig(lr=1e-3)
        )
        config = replace(config, dataset=replace(config.dataset, eval_split=0.3))
        return make_finished(config)

    return make


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function from arguments of `vlatune eval` to its JSON output."""

    def figures(*words: object) -> dict[str, Any]:
        capsys.readouterr()
        code = cli.main(["eval", *map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert code == cli.OK, err
        return json.loads(out)

    return figures


@pytest.fixture
def rejected(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function from invalid arguments of `vlatune eval` to its error, one line."""

    def rejected(*words: object) -> str:
        capsys.readouterr()
        assert cli.main(["eval", *map(str, words)]) == cli.MISUSED
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    return rejected
