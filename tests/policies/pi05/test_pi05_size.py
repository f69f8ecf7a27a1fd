"""Building LeRobot's PI0.5 at a size: shapes follow the size, and LeRobot is left as it was."""

import dataclasses
import json
import threading

import pytest
import torch
from lerobot.policies.pi05 import PI05Config, modeling_pi05

from vlatune.policies.model_size import SIZE_FILE, write_size
from vlatune.policies.pi05.size import Pi05Size, building_at, read_size

TINY = Pi05Size(
    width=24,
    depth=2,
    mlp_dim=40,
    head_dim=8,
    expert_width=16,
    expert_mlp_dim=20,
    vision_width=12,
    vision_depth=1,
    vision_mlp_dim=28,
    vision_heads=3,
    patch_size=8,
    vocab_size=300,
)
REPLACED = ("get_gemma_config", "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")


def tiny_config(**changes) -> PI05Config:
    return PI05Config(image_resolution=(16, 16), chunk_size=5, n_action_steps=5, device="cpu", **changes)


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def lerobot_names() -> list[object]:
    return [getattr(modeling_pi05, name) for name in REPLACED]


def test_the_default_size_is_lerobots_own():
    with torch.device("meta"):
        theirs = modeling_pi05.PI05Pytorch(PI05Config(device="cpu"))
        with building_at(Pi05Size()):
            ours = modeling_pi05.PI05Pytorch(PI05Config(device="cpu"))
    assert shapes(ours) == shapes(theirs)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Pi05Size)])
def test_every_field_decides_a_shape(field):
    step = {"vision_width": TINY.vision_heads, "patch_size": 8, "vision_heads": 1}.get(field, 2)
    changed = dataclasses.replace(TINY, **{field: getattr(TINY, field) + step})
    models = []
    for size in (TINY, changed):
        with torch.device("meta"), building_at(size):
            models.append(modeling_pi05.PI05Pytorch(tiny_config()))
    if field == "vision_heads":  # heads split the width: the same parameters, another computation
        heads = [model.paligemma_with_expert.paligemma.config.vision_config.num_attention_heads for model in models]
        assert heads == [3, 4]
    else:
        assert shapes(models[0]) != shapes(models[1])


def test_a_tiny_model_learns_and_samples():
    with building_at(TINY):
        model = modeling_pi05.PI05Pytorch(tiny_config())
    images, image_masks = [torch.zeros(2, 3, 16, 16)], [torch.ones(2, dtype=torch.bool)]
    tokens = torch.randint(0, TINY.vocab_size, (2, 6))
    masks = torch.ones(2, 6, dtype=torch.bool)
    noise = torch.randn(2, 5, 32)
    loss = model(images, image_masks, tokens, masks, torch.zeros(2, 5, 32), noise, torch.tensor([0.3, 0.9]))
    assert loss.shape == (2, 5, 32)
    loss.mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    actions = model.sample_actions(images, image_masks, tokens, masks, noise=noise, num_steps=2)
    assert actions.shape == (2, 5, 32)


def test_names_are_restored_also_after_an_error_and_when_nested():
    before = lerobot_names()
    with pytest.raises(RuntimeError, match="on purpose"), building_at(TINY):
        raise RuntimeError("on purpose")
    assert lerobot_names() == before
    with building_at(TINY):
        outer = lerobot_names()
        with building_at(dataclasses.replace(TINY, depth=1)):
            assert len(modeling_pi05.PI05Pytorch(tiny_config()).paligemma_with_expert.gemma_expert.model.layers) == 1
        assert lerobot_names() == outer
    assert lerobot_names() == before


def test_another_thread_waits_for_its_turn():
    entered, order = threading.Event(), []

    def build_deeper():
        entered.set()
        with building_at(dataclasses.replace(TINY, depth=3)):
            order.append(modeling_pi05.get_gemma_config("gemma_2b").depth)

    with building_at(TINY):
        thread = threading.Thread(target=build_deeper)
        thread.start()
        entered.wait()
        order.append(modeling_pi05.get_gemma_config("gemma_2b").depth)
    thread.join()
    assert order == [TINY.depth, 3]


def test_a_size_survives_its_file(tmp_path):
    assert read_size(tmp_path) is None
    write_size(tmp_path, TINY)
    assert read_size(tmp_path) == TINY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": None}, "missing: \\['depth'\\]"),
        ({"widht": 3}, "unknown: \\['widht'\\]"),
        ({"width": "wide"}, "width='wide'"),
    ],
)
def test_a_broken_size_file_is_refused_by_name(tmp_path, changes, message):
    values = {name: value for name, value in (TINY.to_json() | changes).items() if value is not None}
    (tmp_path / SIZE_FILE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as caught:
        read_size(tmp_path)
    assert SIZE_FILE in str(caught.value)


@pytest.mark.parametrize("wrong", [{"vision_heads": 5}, {"head_dim": 7}, {"expert_width": 15}, {"width": 0}])
def test_sizes_that_cannot_be_built_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(TINY, **wrong)
