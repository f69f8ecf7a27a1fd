"""A policy's inputs are matched with a dataset's features, or the error names the remedy."""

from dataclasses import replace

import numpy as np
import pytest

from vlatune.data.meta.dataset_meta import DatasetMeta, Feature, load_meta
from vlatune.policies.base import PolicySpec
from vlatune.policies.binding import bind
from vlatune.policies.normalisation import make_normalisers, stats_needed
from vlatune.registry import get_adapter

TOP, WRIST, BASE = "observation.images.top", "observation.images.wrist", "observation.images.base_0_rgb"


@pytest.fixture(scope="module")
def spec(small_base) -> PolicySpec:
    return get_adapter("pi05").read_spec(small_base)


@pytest.fixture(scope="module")
def meta(dataset_v3) -> DatasetMeta:
    return load_meta(str(dataset_v3))


def with_features(meta: DatasetMeta, changes: dict[str, Feature | None]) -> DatasetMeta:
    """Replace features, or remove those that are None."""
    changed = {**meta.features, **changes}
    return replace(meta, features={name: feature for name, feature in changed.items() if feature is not None})


def vector(width: int, names: tuple[str, ...] | None = None) -> Feature:
    return Feature("float32", (width,), names, {})


def test_cameras_are_matched_by_name(spec, meta):
    binding = bind(spec, meta, {})
    assert binding.cameras == ((TOP, TOP), (WRIST, WRIST))
    assert (binding.missing_cameras, binding.action_names) == ((), meta.features["action"].names)
    assert binding.state_dim == meta.features["observation.state"].shape[0]
    assert binding.action_dim == meta.features["action"].shape[0]
    blind = bind(spec, with_features(meta, {TOP: None}), {})
    assert (blind.cameras, blind.missing_cameras) == (((WRIST, WRIST),), (TOP,))


def test_cameras_can_be_renamed_and_swapped(spec, meta):
    other = replace(spec, cameras=(BASE, "observation.images.left_wrist_0_rgb"))
    binding = bind(other, meta, {TOP: "observation.images.left_wrist_0_rgb"})
    assert binding.cameras == ((TOP, "observation.images.left_wrist_0_rgb"),)
    assert binding.missing_cameras == (BASE,)
    assert bind(spec, meta, {TOP: WRIST, WRIST: TOP}).cameras == ((TOP, WRIST), (WRIST, TOP))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"observation.images.tpo": TOP}, f"did you mean {TOP}"),
        ({"zzz": TOP}, f"{TOP}, {WRIST}"),
        ({TOP: "observation.images.tpo"}, f"did you mean {TOP}"),
        ({TOP: WRIST}, WRIST),
    ],
    ids=str,
)
def test_a_wrong_rename_map_is_an_error(spec, meta, names, message):
    with pytest.raises(ValueError, match=message):
        bind(spec, meta, names)


def test_no_common_camera_is_an_error_with_the_flag_to_map_them(spec, meta):
    with pytest.raises(ValueError, match=f'--rename_map=\'{{"{TOP}": "{BASE}"}}\''):
        bind(replace(spec, cameras=(BASE,)), meta, {})
    with pytest.raises(ValueError, match="cameras"):
        bind(spec, with_features(meta, {TOP: None, WRIST: None}), {})


@pytest.mark.parametrize("key", ["observation.state", "action"])
def test_vectors_must_exist_and_fit(spec, meta, key):
    assert bind(spec, with_features(meta, {key: vector(32)}), {})
    with pytest.raises(ValueError, match=f"'{key}' has 33 dims"):
        bind(spec, with_features(meta, {key: vector(33)}), {})
    with pytest.raises(ValueError, match=f"no feature '{key}'"):
        bind(spec, with_features(meta, {key: None}), {})
    with pytest.raises(ValueError, match=f"'{key}s'"):
        bind(spec, with_features(meta, {key: None, f"{key}s": vector(2)}), {})


@pytest.mark.parametrize("names", [None, ("only one",)])
def test_actions_without_names_are_numbered(names, spec, meta):
    assert bind(spec, with_features(meta, {"action": vector(2, names)}), {}).action_names == ("action_0", "action_1")


@pytest.mark.parametrize(
    ("mode", "names"), [("QUANTILES", ("q01", "q99")), ("MIN_MAX", ("min", "max")), ("MEAN_STD", ("mean", "std"))]
)
def test_each_normalisation_needs_its_statistics(mode, names, spec):
    changed = replace(spec, normalisation={"STATE": mode, "ACTION": "IDENTITY", "VISUAL": "IDENTITY"})
    assert stats_needed(changed) == {"observation.state": names}
    low, high = np.array([1.0]), np.array([2.0])
    (made,) = make_normalisers(changed, {"observation.state": dict(zip(names, (low, high), strict=True))})
    assert (made.key, made.mode, made.low, made.high) == ("observation.state", mode, low, high)


def test_an_unknown_normalisation_is_an_error(spec):
    with pytest.raises(ValueError, match="'MEDIAN'"):
        stats_needed(replace(spec, normalisation={"STATE": "MEDIAN"}))
