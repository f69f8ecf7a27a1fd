"""The small PI0.5: a folder that LeRobot itself loads, a tokenizer that speaks its prompts, weights that can learn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi05 import PI05Policy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vlatune.dataset.synthetic.world import TASKS
from vlatune.policies.pi05.prompt import NUM_STATE_BINS, make_prompt
from vlatune.policies.pi05.size import building_at, read_size
from vlatune.policies.pi05.small import make_small_pi05, make_tokenizer

CAMERAS = ("observation.images.top", "observation.images.wrist")
STATE_DIM, ACTION_DIM, HORIZON, IMAGE_SIZE = 3, 3, 4, 32


def make_base(folder: Path, seed: int = 0) -> Path:
    return make_small_pi05(
        folder,
        cameras=CAMERAS,
        state_dim=STATE_DIM,
        action_dim=ACTION_DIM,
        horizon=HORIZON,
        image_size=IMAGE_SIZE,
        tasks=TASKS,
        seed=seed,
    )


def load_policy(folder: Path) -> PI05Policy:
    size = read_size(folder)
    assert size is not None
    with building_at(size):
        return PI05Policy.from_pretrained(folder)


def observation(task: str) -> dict:
    images = {camera: torch.full((3, IMAGE_SIZE, IMAGE_SIZE), 0.5) for camera in CAMERAS}
    return {
        **images,
        "observation.state": torch.tensor([-1.0, 0.0, 1.0]),
        "action": torch.zeros(HORIZON, ACTION_DIM),
        "task": task,
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("small") / "base")


def test_lerobot_loads_every_weight_as_it_was_saved(base):
    saved = load_file(base / "model.safetensors")
    loaded = load_policy(base).state_dict()
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, msg=name)


def test_the_config_says_what_was_asked_for(base):
    config = PreTrainedConfig.from_pretrained(base)
    assert config.type == "pi05"
    assert tuple(config.image_features) == CAMERAS
    assert config.input_features["observation.state"].shape == (STATE_DIM,)
    assert config.output_features["action"].shape == (ACTION_DIM,)
    assert (config.chunk_size, config.n_action_steps) == (HORIZON, HORIZON)
    assert tuple(config.image_resolution) == (IMAGE_SIZE, IMAGE_SIZE)


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(base, tmp_path):
    again, other = make_base(tmp_path / "again"), make_base(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "config.json", "vlatune_size.json", "tokenizer/tokenizer.json"):
        assert (again / name).read_bytes() == (base / name).read_bytes(), name
    assert (other / "model.safetensors").read_bytes() != (base / "model.safetensors").read_bytes()


def test_making_a_base_model_leaves_the_random_generator_alone(tmp_path):
    before = torch.get_rng_state()
    make_base(tmp_path / "base")
    assert torch.equal(torch.get_rng_state(), before)


def test_every_state_bin_and_every_word_is_one_token():
    tokenizer = make_tokenizer(TASKS)
    for state_bin in range(NUM_STATE_BINS):
        assert len(tokenizer.tokenize(f" {state_bin}")) == 1
    for word in {word for task in TASKS for word in task.split()}:
        assert len(tokenizer.tokenize(f" {word}")) == 1, word


@pytest.mark.parametrize("task", [TASKS[0], "", "fold the blue towel, twice"])
def test_prompts_survive_the_tokenizer(base, task):
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    prompt = make_prompt(task, [0, 128, 255])
    ids = tokenizer(prompt)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    assert max(ids) < read_size(base).vocab_size


def test_lerobots_processors_write_our_prompt_and_pad_it(base):
    config = PreTrainedConfig.from_pretrained(base)
    stats = {name: {"q01": np.full(3, -1.0), "q99": np.full(3, 1.0)} for name in ("observation.state", "action")}
    overrides = {"normalizer_processor": {"stats": stats}}
    preprocess, _ = make_pre_post_processors(
        config,
        str(base),
        preprocessor_overrides=overrides,
        postprocessor_overrides={"unnormalizer_processor": {"stats": stats}},
    )
    batch = preprocess(observation(TASKS[0]))
    tokens, mask = batch[OBS_LANGUAGE_TOKENS][0], batch[OBS_LANGUAGE_ATTENTION_MASK][0]
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    assert tokenizer.decode(tokens[mask], skip_special_tokens=True) == make_prompt(TASKS[0], [0, 128, 255])
    assert len(tokens) == config.tokenizer_max_length
    assert (tokens[~mask] == tokenizer.pad_token_id).all()


def test_the_longest_prompt_is_not_cut(base):
    tokenizer, config = AutoTokenizer.from_pretrained(base / "tokenizer"), PreTrainedConfig.from_pretrained(base)
    longest = max(len(tokenizer(make_prompt(task, [255] * STATE_DIM))["input_ids"]) for task in TASKS)
    assert longest <= config.tokenizer_max_length < longest + 8


def test_after_two_steps_the_gradient_reaches_pictures_words_and_time(base):
    """Closed gates would leave the prefix without gradient for long; see `init_for_scratch`."""
    model = load_policy(base).model
    images = [torch.rand(2, 3, IMAGE_SIZE, IMAGE_SIZE) for _ in CAMERAS]
    image_masks = [torch.ones(2, dtype=torch.bool) for _ in CAMERAS]
    tokens, masks = torch.randint(3, 200, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the expert's branches begin at zero: the first step opens them
        optimizer.zero_grad()
        loss = model(
            images,
            image_masks,
            tokens,
            masks,
            torch.ones(2, HORIZON, 32),
            torch.randn(2, HORIZON, 32),
            torch.tensor([0.5, 0.9]),
        )
        loss.mean().backward()
        optimizer.step()
    paligemma = model.paligemma_with_expert.paligemma.model
    vision = paligemma.vision_tower.vision_model.embeddings.patch_embedding.weight
    for weight in (vision, paligemma.language_model.embed_tokens.weight, model.time_mlp_in.weight):
        assert weight.grad is not None
        assert weight.grad.norm() > 0
