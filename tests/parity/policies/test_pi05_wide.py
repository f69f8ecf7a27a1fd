"""PI0.5 equals LeRobot's at its published widths: language model 2048, expert 1024, vision tower 1152, heads of 256.

Depth, MLPs, vocabulary and tokens are cut. Ours and LeRobot's forward run on the same policy object.
"""

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05 import PI05Config, PI05Policy
from parity.policies.flow_parity import (
    BF16,
    GRADIENT_RTOL,
    LOSS_RTOL,
    distance,
    gradients,
    lerobot_loss,
    randomise,
    randomise_adapters,
    worst_distance,
)

from vlatune.batch import ACTION, NOISE, TIME, TOKEN_MASK, TOKENS
from vlatune.policies.base import Binding, ModuleOptions
from vlatune.policies.flow_matching import FlowSpec
from vlatune.policies.loading import train_only
from vlatune.policies.model_size import building_at
from vlatune.policies.modeling import add_adapters
from vlatune.policies.pi05.model import Pi05Module
from vlatune.policies.pi05.size import Pi05Size
from vlatune.policies.pi05.weights import ADAPTED, TRAINED, unused
from vlatune.policies.tokenizer import PromptTokenizer

SIZE = Pi05Size(depth=2, mlp_dim=4096, expert_mlp_dim=2048, vision_depth=1, vision_mlp_dim=1152, vocab_size=256)
CAMERA = "observation.images.top"
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A loss and its gradients."""
PIXELS, TOKENS_EACH, HORIZON, DIMS = 56, 12, 10, 7


@pytest.fixture(scope="module")
def policy() -> PI05Policy:
    config = PI05Config(
        image_resolution=(PIXELS, PIXELS),
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        input_features={CAMERA: PolicyFeature(FeatureType.VISUAL, (3, PIXELS, PIXELS))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (DIMS,))},
        device="cpu",
    )
    with building_at(SIZE):
        policy = PI05Policy(config)
    randomise(policy)
    return policy.train()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, TOKENS_EACH, dtype=torch.bool)
    mask[0, 7:] = False
    return {
        CAMERA: torch.randint(0, 256, (2, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=generator),
        TOKENS: torch.randint(0, SIZE.vocab_size, (2, TOKENS_EACH), generator=generator),
        TOKEN_MASK: mask,
        ACTION: torch.nn.functional.pad(torch.randn(2, HORIZON, DIMS, generator=generator), (0, 32 - DIMS)),
        NOISE: torch.randn(2, 1, HORIZON, 32, generator=generator),
        TIME: torch.rand(2, 1, generator=generator),
    }


def wrap(policy: PI05Policy, train: str) -> Pi05Module:
    spec = FlowSpec(
        type="pi05",
        folder="",
        cameras=(CAMERA,),
        image_hw=(PIXELS, PIXELS),
        action_offsets=tuple(range(HORIZON)),
        max_state_dim=32,
        max_action_dim=32,
        normalisation={},
        tokenizer=PromptTokenizer("", "", 0),
        vocab_size=Pi05Size().vocab_size,
        max_tokens=TOKENS_EACH,
        num_patches=(PIXELS // 14) ** 2,
        image_tokens=(PIXELS // 14) ** 2,
        prefix_width=SIZE.depth * 2 * SIZE.head_dim,
    )
    binding = Binding(((CAMERA, CAMERA),), (), DIMS, DIMS, ())
    train_only(policy, TRAINED[train], unused=unused(policy))
    return Pi05Module(policy, spec, binding, ModuleOptions(train=train))


def ours_and_theirs(policy: PI05Policy, batch: dict[str, torch.Tensor], train: str) -> tuple[Result, Result]:
    module = wrap(policy, train)
    return result(policy, module(batch).loss), result(policy, lerobot_loss(policy, batch))


def result(policy: PI05Policy, loss: torch.Tensor) -> Result:
    return loss.detach(), gradients(policy, loss)


def errors(ours: Result, theirs: Result) -> tuple[float, float]:
    """Return the distance of the loss, and the largest of the gradients."""
    return distance(ours[0], theirs[0]), worst_distance(ours[1], theirs[1])[0]


def test_parity_at_real_width(policy, batch):
    """One test, because adapters and rounding change the policy."""
    for train in ("heads", "expert", "full", "lora"):
        if train == "lora":
            add_adapters(policy, on=ADAPTED, but=unused(policy), rank=16, alpha=16.0)
            randomise_adapters(policy)
        ours, theirs = ours_and_theirs(policy, batch, train)
        loss_error, gradient_error = errors(ours, theirs)
        assert loss_error <= LOSS_RTOL, train
        assert gradient_error <= GRADIENT_RTOL, train
    exact = result(policy, wrap(policy, "heads")(batch).loss)
    policy.model.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")
    policy.config.dtype = "bfloat16"
    # Without LeRobot's backward, which takes minutes here.
    rounded = result(policy, wrap(policy, "heads")(batch).loss)
    loss_error, gradient_error = errors(rounded, exact)
    assert loss_error <= BF16
    assert gradient_error <= 0.03
    assert distance(rounded[0], lerobot_loss(policy, batch)) <= BF16
