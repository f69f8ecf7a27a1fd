"""Transforms: one small dict in, one out, and LeRobot's own processors to the last bit."""

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

from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, STATE, TASK, TIME, TOKEN_MASK, TOKENS, Columns, check_columns
from vlatune.dataset.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.dataset.reader import CameraSpec, ReadSpec, VectorSpec, make_unit, read_unit
from vlatune.pipeline.transforms import Normalise, Rename, Select, apply_all
from vlatune.policies.base import Draw
from vlatune.policies.binding import bind
from vlatune.policies.flow_matching import DrawFlow, PadActions
from vlatune.policies.pi05.adapter import Pi05Adapter
from vlatune.policies.pi05.prompt import StatePrompt
from vlatune.policies.tokenizer import Tokenise

unhurried = settings(deadline=None, max_examples=60)  # a deadline would be a timing assertion
STATS_OF = {"QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max"), "MEAN_STD": ("mean", "std")}
SENTENCES = ["pick_up the cube", "  two\nlines ", "", "naïve übung 拿起", "x" * 300]


def objects(*values) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


# One small dict in, one out


def test_rename():
    top, action = np.zeros(2), np.ones(2)
    renamed = Rename({"top": "observation.images.base"})({"top": top, "action": action})
    assert list(renamed) == ["observation.images.base", "action"]
    assert renamed["observation.images.base"] is top
    assert renamed["action"] is action


def test_rename_can_swap_two_names():
    assert Rename({"a": "b", "b": "a"})({"a": np.array([1]), "b": np.array([2])}) == {
        "b": np.array([1]),
        "a": np.array([2]),
    }


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("QUANTILES", [0.0, 10.0], [4.0, 20.0], [[-0.5, 0.0]]),
        ("MIN_MAX", [0.0, 10.0], [4.0, 20.0], [[-0.5, 0.0]]),
        ("MEAN_STD", [2.0, 5.0], [0.5, 5.0], [[-2.0, 2.0]]),
    ],
)
def test_normalise(mode, low, high, expected):
    normalise = Normalise("action", mode, np.array(low), np.array(high))
    columns = {"action": np.array([[1.0, 15.0]], np.float32), "index": np.array([3])}
    out = normalise(columns)
    assert out["action"].tolist() == expected
    assert out["action"].dtype == np.float32
    assert out["index"] is columns["index"]
    assert columns["action"].tolist() == [[1.0, 15.0]]
    assert normalise.inverse(out["action"]).tolist() == [[1.0, 15.0]]


def test_state_prompt():
    columns = {"observation.state": np.array([[-1.0, 0.0, 0.999]], np.float32), "task": objects(" push_the\ncube ")}
    out = StatePrompt()(columns)
    assert out["task"].tolist() == ["Task: push the cube, State: 0 128 255;\nAction: "]
    assert columns["task"].tolist() == [" push_the\ncube "]


def test_tokenise(small_base):
    file = str(small_base / "tokenizer" / "tokenizer.json")
    prompt = "Task: , State: 7 7;\nAction: "
    out = Tokenise(file, max_length=20, pad_id=0)({"task": objects(prompt, ""), "index": np.array([1, 2])})
    check_columns(out, {TOKENS: ("int64", (20,)), TOKEN_MASK: ("bool", (20,))})
    assert set(out) == {TOKENS, TOKEN_MASK, "index"}
    lengths = out[TOKEN_MASK].sum(axis=1)
    assert lengths[1] == 1  # the token that begins every prompt
    assert out[TOKENS][1].tolist() == [2] + [0] * 19
    assert (out[TOKENS][0, : lengths[0]] > 0).all()
    assert not out[TOKENS][0, lengths[0] :].any()


def test_tokenise_names_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer file '.*none.json' is missing; it belongs to the policy's folder"):
        Tokenise(str(tmp_path / "none.json"), 8, 0)({"task": objects("go")})


def test_pad_actions():
    out = PadActions(4)({"action": np.ones((2, 3, 2), np.float32)})["action"]
    assert out.shape == (2, 3, 4)
    assert out.dtype == np.float32
    assert (out[..., :2] == 1).all()
    assert not out[..., 2:].any()


def test_select():
    kept = Select(("b", "a"))({"a": np.zeros(1), "b": np.ones(1), "task": objects("go")})
    assert list(kept) == ["b", "a"]


def test_apply_all_goes_from_left_to_right():
    assert list(apply_all([Rename({"a": "b"}), Rename({"b": "c"})], {"a": np.zeros(1)})) == ["c"]


# Against LeRobot's steps


@st.composite
def vectors(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values, low, high) of three dims; spans may be nothing, tiny or huge."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 10.0 ** draw(st.integers(-6, 6))
    low = rng.normal(size=3) * scale
    span = draw(st.lists(st.sampled_from([0.0, 1e-7, 0.5, 1.0, 30.0]), min_size=3, max_size=3))
    values = (low + rng.normal(size=(8, 3)) * 2 * scale).astype(np.float32)
    return values, low, low + np.array(span) * scale


@unhurried
@pytest.mark.parametrize("mode", STATS_OF)
@given(vectors())
def test_normalising_is_lerobots_to_the_last_bit(mode, drawn):
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


@unhurried
@given(
    st.lists(st.lists(st.floats(-1.5, 1.5, width=32), min_size=4, max_size=4), min_size=1, max_size=4),
    st.lists(st.text(max_size=20) | st.sampled_from(SENTENCES), min_size=4, max_size=4),
)
@example([[-1.0, 1.0, 0.9921875, -0.9921875]], SENTENCES[:4])
def test_prompts_are_lerobots(states, tasks):
    state, tasks = np.array(states, np.float32), tasks[: len(states)]
    transition = {
        TransitionKey.OBSERVATION: {STATE: torch.from_numpy(state)},
        TransitionKey.COMPLEMENTARY_DATA: {"task": list(tasks)},
    }
    expected = Pi05PrepareStateTokenizerProcessorStep()(transition)[TransitionKey.COMPLEMENTARY_DATA]["task"]
    assert StatePrompt()({STATE: state, TASK: objects(*tasks)})[TASK].tolist() == expected


@pytest.mark.parametrize("max_length", [4, 16, 200])
def test_tokens_are_lerobots_also_when_they_are_cut(max_length, small_base):
    step = TokenizerProcessorStep(tokenizer_name=str(small_base / "tokenizer"), max_length=max_length)
    prompts = [f"Task: {sentence}, State: 0 255 17;\nAction: " for sentence in SENTENCES]
    transition = {TransitionKey.OBSERVATION: {}, TransitionKey.COMPLEMENTARY_DATA: {"task": prompts}}
    expected = step(transition)[TransitionKey.OBSERVATION]
    ours = Tokenise(str(small_base / "tokenizer" / "tokenizer.json"), max_length, 0)({TASK: objects(*prompts)})
    assert np.array_equal(ours[TOKENS], expected[TOKENS].numpy())
    assert np.array_equal(ours[TOKEN_MASK], expected[TOKEN_MASK].numpy())


# The whole list on the whole dataset


@pytest.fixture(scope="module")
def raw_rows(dataset_v3, small_base) -> Columns:
    """Every row of the dataset as the reader gives it."""
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
    transforms = adapter.make_transforms(spec, bind(spec, meta, {}), meta.stats, Draw(seed=5))
    return apply_all(transforms, rows)


def lerobot_rows(dataset: Path, base: Path, rows: Columns) -> dict[str, torch.Tensor]:
    """LeRobot's preprocessor, as it loads it from the folder, with the dataset's statistics."""
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


def test_the_whole_list_gives_lerobots_tensors_to_the_last_bit(dataset_v3, small_base, raw_rows):
    meta = load_meta(str(dataset_v3))
    ours, theirs = our_rows(meta, small_base, raw_rows), lerobot_rows(dataset_v3, small_base, raw_rows)
    for key in (TOKENS, TOKEN_MASK, STATE):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    width = meta.features[ACTION].shape[0]
    assert np.array_equal(ours[ACTION][..., :width], theirs[ACTION].numpy())
    assert not ours[ACTION][..., width:].any()
    assert theirs[TOKEN_MASK].sum(dim=1).unique().numel() > 1  # prompts of several lengths were compared


def test_the_whole_list_keeps_to_the_contract(dataset_v3, small_base, raw_rows):
    meta = load_meta(str(dataset_v3))
    ours = our_rows(meta, small_base, raw_rows)
    config = json.loads((small_base / "config.json").read_text())
    dims, length = config["max_action_dim"], config["tokenizer_max_length"]
    expected = dict.fromkeys(meta.cameras, ("uint8", (3, 48, 48)))
    expected |= dict.fromkeys(("dataset_index", "index", "episode_index", "frame_index", "slot"), ("int64", ()))
    expected |= {STATE: ("float32", meta.features[STATE].shape), ACTION: ("float32", (5, dims))}
    expected |= {ACTION_IS_PAD: ("bool", (5,)), TOKENS: ("int64", (length,)), TOKEN_MASK: ("bool", (length,))}
    expected |= {NOISE: ("float32", (1, 5, dims)), TIME: ("float32", (1,))}
    check_columns(ours, expected)
    assert set(ours) == set(expected)
    for camera in meta.cameras:
        assert ours[camera] is raw_rows[camera]  # pixels are not touched, nor copied


# Noise and time


def ids(*places: int, index: int = 3, dataset: int = 0) -> Columns:
    """Samples at these places of a run's order, all of them of one frame."""
    return {
        "slot": np.array(places),
        "index": np.full(len(places), index),
        "dataset_index": np.full(len(places), dataset),
    }


def test_a_draw_depends_on_seed_and_place_alone():
    draw = DrawFlow(seed=1, horizon=3, dims=4)
    together, apart = draw(ids(7, 8, 9)), draw(ids(100, 9, 7, index=4, dataset=1))
    for key in (NOISE, TIME):
        assert np.array_equal(together[key][0], apart[key][2])
        assert np.array_equal(together[key][2], apart[key][1])


def test_a_validation_draw_depends_on_seed_and_frame_alone():
    draw = DrawFlow(seed=1, horizon=3, dims=4, by_frame=True)
    one, again, other, others = (
        draw(ids(place, index=index, dataset=dataset))[NOISE]
        for place, index, dataset in ((7, 3, 0), (100, 3, 0), (7, 4, 0), (7, 3, 1))
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, others)


def test_draws_differ_between_places_seeds_and_uses():
    draws = [
        DrawFlow(seed, horizon=3, dims=4, by_frame=by_frame)(ids(first, first + 1, first + 2) | frames)
        for seed in (0, 1)
        for by_frame in (False, True)
        for first in (0, 1000)
        for frames in [{"index": np.arange(first, first + 3)}]
    ]
    noise = np.concatenate([draw[NOISE].reshape(3, -1) for draw in draws])
    time = np.concatenate([draw[TIME].reshape(3) for draw in draws])
    assert len(np.unique(noise)) == noise.size
    assert len(np.unique(time)) == time.size


def test_several_draws_of_one_sample_differ():
    out = DrawFlow(seed=0, horizon=3, dims=4, samples=8)(ids(5))
    assert out[NOISE].shape == (1, 8, 3, 4)
    assert out[TIME].shape == (1, 8)
    assert len(np.unique(out[NOISE])) == 8 * 3 * 4
    assert len(np.unique(out[TIME])) == 8


def test_noise_is_normal_and_time_is_lerobots_beta(small_base):
    config = json.loads((small_base / "config.json").read_text())
    draw = DrawFlow(seed=3, horizon=4, dims=5)
    assert (draw.alpha, draw.beta) == (config["time_sampling_beta_alpha"], config["time_sampling_beta_beta"])
    assert (draw.scale, draw.offset) == (config["time_sampling_scale"], config["time_sampling_offset"])
    out = draw(ids(*range(4000)))
    noise, time = out[NOISE].astype(np.float64), out[TIME].astype(np.float64).reshape(-1)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 4 * np.sqrt(2 / noise.size)
    between = np.corrcoef(noise.reshape(4000, -1), rowvar=False)
    assert np.abs(between - np.eye(20)).max() < 5 / np.sqrt(4000)  # neither steps nor dims go together
    assert abs(np.corrcoef(noise.reshape(4000, -1)[:-1, 0], noise.reshape(4000, -1)[1:, 0])[0, 1]) < 5 / np.sqrt(4000)
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    for point in (0.1, 0.3, 0.5, 0.7, 0.9):
        share = np.mean(time <= point * 0.999 + 0.001)
        assert abs(share - point**1.5) < 4 * 0.5 / np.sqrt(time.size)  # Beta(1.5, 1): P(x <= p) = p^1.5
