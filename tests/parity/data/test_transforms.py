"""Transforms of rows, bitwise equal to LeRobot's processors, and the noise and times of flow matching."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import (
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    TokenizerProcessorStep,
    UnnormalizerProcessorStep,
)

from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, STATE, TASK, TIME, TOKEN_MASK, TOKENS, Columns
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.data.reader import CameraSpec, ReadSpec, VectorSpec, make_unit, read_unit
from vlatune.data.transforms import Normalise, apply_all
from vlatune.policies.base import NoiseSpec
from vlatune.policies.binding import bind
from vlatune.policies.flow_matching import FlowNoise
from vlatune.policies.pi05.adapter import Pi05Adapter
from vlatune.policies.pi05.spec import StatePrompt
from vlatune.policies.tokenizer import Tokenise, load_tokenizer

examples = settings(deadline=None, max_examples=60)
STATS_OF = {"QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max"), "MEAN_STD": ("mean", "std")}
TASKS = ["pick_up the cube", "  two\nlines ", "", "naïve übung 拿起", "x" * 300]


def objects(*values) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@st.composite
def vectors(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (values, low, high) of three dims; spans may be 0, tiny or huge."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 10.0 ** draw(st.integers(-6, 6))
    low = rng.normal(size=3) * scale
    span = draw(st.lists(st.sampled_from([0.0, 1e-7, 0.5, 1.0, 30.0]), min_size=3, max_size=3))
    values = (low + rng.normal(size=(8, 3)) * 2 * scale).astype(np.float32)
    return values, low, low + np.array(span) * scale


@examples
@pytest.mark.parametrize("mode", STATS_OF)
@given(vectors())
def test_normalisation_equals_lerobots_bitwise(mode, drawn):
    values, low, high = drawn
    if mode == "MEAN_STD":
        high = np.abs(high - low)
    stats = dict(zip(STATS_OF[mode], (low, high), strict=True))
    options = {
        "features": {"action": PolicyFeature(FeatureType.ACTION, (3,))},
        "norm_map": {FeatureType.ACTION: NormalizationMode(mode)},
        "stats": {"action": stats},
    }
    ours = Normalise("action", mode, low, high)
    for theirs, our_way in ((NormalizerProcessorStep, ours.forward), (UnnormalizerProcessorStep, ours.inverse)):
        expected = theirs(**options)({TransitionKey.ACTION: torch.from_numpy(values)})[TransitionKey.ACTION]
        assert np.array_equal(our_way(values).view(np.int32), expected.numpy().view(np.int32))


@examples
@given(
    st.lists(st.lists(st.floats(-1.5, 1.5, width=32), min_size=4, max_size=4), min_size=1, max_size=4),
    st.lists(st.text(max_size=20) | st.sampled_from(TASKS), min_size=4, max_size=4),
)
@example([[-1.0, 1.0, 0.9921875, -0.9921875]], TASKS[:4])
def test_prompts_equal_lerobots(states, tasks):
    state, tasks = np.array(states, np.float32), tasks[: len(states)]
    transition = {
        TransitionKey.OBSERVATION: {STATE: torch.from_numpy(state)},
        TransitionKey.COMPLEMENTARY_DATA: {"task": list(tasks)},
    }
    expected = Pi05PrepareStateTokenizerProcessorStep()(transition)[TransitionKey.COMPLEMENTARY_DATA]["task"]
    assert StatePrompt()({STATE: state, TASK: objects(*tasks)})[TASK].tolist() == expected


@pytest.mark.parametrize("max_length", [4, 16, 200])
def test_tokens_equal_lerobots_also_when_truncated(max_length, small_base):
    step = TokenizerProcessorStep(tokenizer_name=str(small_base / "tokenizer"), max_length=max_length)
    prompts = [f"Task: {task}, State: 0 255 17;\nAction: " for task in TASKS]
    transition = {TransitionKey.OBSERVATION: {}, TransitionKey.COMPLEMENTARY_DATA: {"task": prompts}}
    expected = step(transition)[TransitionKey.OBSERVATION]
    tokenizer = load_tokenizer(small_base / "tokenizer" / "tokenizer.json", 1000)
    ours = Tokenise(tokenizer, max_length, 1000)({TASK: objects(*prompts)})
    assert np.array_equal(ours[TOKENS], expected[TOKENS].numpy())
    assert np.array_equal(ours[TOKEN_MASK], expected[TOKEN_MASK].numpy())


@pytest.fixture(scope="module")
def raw_rows(dataset_v3, small_base) -> Columns:
    """Read every row of the dataset."""
    meta, spec = load_meta(str(dataset_v3)), Pi05Adapter().read_spec(small_base)
    read_spec = ReadSpec(
        root=meta.root,
        dataset_index=0,
        tolerance_s=1e-4,
        cameras=tuple(CameraSpec(name, "video", *spec.image_hw) for name in meta.cameras),
        vectors=(
            VectorSpec(STATE, "float32", meta.features[STATE].shape),
            VectorSpec(ACTION, "float32", meta.features[ACTION].shape, tuple(range(spec.horizon))),
        ),
        tasks=meta.tasks,
    )
    units = [
        make_unit(meta, read_spec, episode, np.arange(length), meta.episodes.from_row[episode] + np.arange(length))
        for episode, length in enumerate(meta.episodes.length)
    ]
    blocks = [read_unit(read_spec, unit) for unit in units]
    return {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}


def our_rows(meta: DatasetMeta, base: Path, rows: Columns) -> Columns:
    adapter = Pi05Adapter()
    spec = adapter.read_spec(base)
    transforms = adapter.make_transforms(spec, bind(spec, meta, {}), meta.stats, NoiseSpec(seed=5))
    return apply_all(transforms, rows)


def lerobot_rows(dataset: Path, base: Path, rows: Columns) -> dict[str, torch.Tensor]:
    """Return LeRobot's preprocessor, loaded from the folder, with the dataset's statistics."""
    pipeline = PolicyProcessorPipeline.from_pretrained(
        base,
        config_filename="policy_preprocessor.json",
        overrides={
            "normalizer_processor": {"stats": json.loads((dataset / "meta/stats.json").read_text())},
            "tokenizer_processor": {"tokenizer_name": str(base / "tokenizer")},
        },
    )
    batch = {key: torch.from_numpy(rows[key]) for key in (STATE, ACTION)}
    return pipeline(batch | {"task": rows[TASK].tolist()})


def test_all_transforms_together_equal_lerobots_bitwise(dataset_v3, small_base, raw_rows):
    meta = load_meta(str(dataset_v3))
    ours, theirs = our_rows(meta, small_base, raw_rows), lerobot_rows(dataset_v3, small_base, raw_rows)
    for key in (TOKENS, TOKEN_MASK, STATE):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    width = meta.features[ACTION].shape[0]
    assert np.array_equal(ours[ACTION][..., :width], theirs[ACTION].numpy())
    assert not ours[ACTION][..., width:].any()
    assert theirs[TOKEN_MASK].sum(dim=1).unique().numel() > 1  # prompts of several lengths were compared


def test_all_transforms_together_give_the_documented_columns(dataset_v3, small_base, raw_rows):
    meta = load_meta(str(dataset_v3))
    ours = our_rows(meta, small_base, raw_rows)
    config = json.loads((small_base / "config.json").read_text())
    dims, length = config["max_action_dim"], config["tokenizer_max_length"]
    expected = dict.fromkeys(meta.cameras, ("uint8", (3, 48, 48)))
    expected |= dict.fromkeys(("dataset_index", "index", "episode_index", "frame_index", "slot"), ("int64", ()))
    expected |= {STATE: ("float32", meta.features[STATE].shape), ACTION: ("float32", (5, dims))}
    expected |= {ACTION_IS_PAD: ("bool", (5,)), TOKENS: ("int64", (length,)), TOKEN_MASK: ("bool", (length,))}
    expected |= {NOISE: ("float32", (1, 5, dims)), TIME: ("float32", (1,))}
    assert {key: (str(ours[key].dtype), ours[key].shape[1:]) for key in expected} == expected
    assert set(ours) == set(expected)
    for camera in meta.cameras:
        assert ours[camera] is raw_rows[camera]  # not copied


def ids(*slots: int, index: int = 3, dataset: int = 0) -> Columns:
    """Return ids of samples at these slots, all of one frame."""
    return {
        "slot": np.array(slots),
        "index": np.full(len(slots), index),
        "dataset_index": np.full(len(slots), dataset),
    }


def test_noise_depends_on_seed_and_slot_alone():
    draw = FlowNoise(NoiseSpec(1), horizon=3, dims=4)
    together, apart = draw(ids(7, 8, 9)), draw(ids(100, 9, 7, index=4, dataset=1))
    for key in (NOISE, TIME):
        assert np.array_equal(together[key][0], apart[key][2])
        assert np.array_equal(together[key][2], apart[key][1])


def test_validation_noise_depends_on_seed_and_frame_alone():
    draw = FlowNoise(NoiseSpec(1, by_frame=True), horizon=3, dims=4)
    one, again, other, in_a_mixture = (
        draw(ids(place, index=index, dataset=dataset))[NOISE]
        for place, index, dataset in ((7, 3, 0), (100, 3, 0), (7, 4, 0), (7, 3, 1))
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.array_equal(one, in_a_mixture)


def test_noise_differs_between_slots_seeds_and_uses():
    samples = [
        FlowNoise(NoiseSpec(seed, by_frame=by_frame), horizon=3, dims=4)(ids(first, first + 1, first + 2) | frames)
        for seed in (0, 1)
        for by_frame in (False, True)
        for first in (0, 1000)
        for frames in [{"index": np.arange(first, first + 3)}]
    ]
    noise = np.concatenate([sample[NOISE].reshape(3, -1) for sample in samples])
    time = np.concatenate([sample[TIME].reshape(3) for sample in samples])
    assert len(np.unique(noise)) == noise.size
    assert len(np.unique(time)) == time.size


def test_noise_is_normal_and_time_is_lerobots_beta(small_base):
    config = json.loads((small_base / "config.json").read_text())
    draw = FlowNoise(NoiseSpec(3), horizon=4, dims=5)
    assert draw.flow_time[:2] == (config["time_sampling_beta_alpha"], config["time_sampling_beta_beta"])
    assert (draw.flow_time[2], draw.flow_time[3]) == (config["time_sampling_scale"], config["time_sampling_offset"])
    out = draw(ids(*range(4000)))
    noise, time = out[NOISE].astype(np.float64), out[TIME].astype(np.float64).reshape(-1)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 4 * np.sqrt(2 / noise.size)
    between = np.corrcoef(noise.reshape(4000, -1), rowvar=False)
    assert np.abs(between - np.eye(20)).max() < 5 / np.sqrt(4000)  # independent steps and dims
    assert abs(np.corrcoef(noise.reshape(4000, -1)[:-1, 0], noise.reshape(4000, -1)[1:, 0])[0, 1]) < 5 / np.sqrt(4000)
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    for point in (0.1, 0.3, 0.5, 0.7, 0.9):
        share = np.mean(time <= point * 0.999 + 0.001)
        assert abs(share - point**1.5) < 4 * 0.5 / np.sqrt(time.size)  # Beta(1.5, 1): P(x <= p) = p^1.5
