"""What is kept of a picture stands in for it: same loss and gradients for every way to train that keeps the tower as it is."""

from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda, is_fake_cuda
from pi05_parity import DRAWS, GRADIENT_RTOL, LOSS_RTOL, distance, gradients, worst_distance
from test_smolvla_module import load
from torch.utils.flop_counter import FlopCounterMode

from vlatune.batch import TIME
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.dataset.storage.feature_files import FeatureRow
from vlatune.policies.base import ModuleOptions, require_kept
from vlatune.policies.registry import get_adapter
from vlatune.policies.smolvla import POLICY
from vlatune.policies.smolvla.smolvla_size import KEPT_PART, KNOWN
from vlatune.train.driver.feature_stage import CHUNK

DTYPES = {"float32": (LOSS_RTOL, GRADIENT_RTOL), "bfloat16": (2.0**-8, 2.0**-5)}
"""With how much each may differ: a batch of another size may round otherwise."""
PICTURE_BYTES = 3 * 512 * 512


def options_of(train: str, dtype: str = "float32") -> ModuleOptions:
    return ModuleOptions(train=train, dtype=dtype, lora_rank=8, lora_alpha=12.0, keep_features=True)


def kept_of(setup, batch: dict[str, torch.Tensor], options: ModuleOptions) -> dict[str, torch.Tensor]:
    """The batch with features in place of pictures, computed as the stage does, through numpy."""
    encoder = setup.adapter.load_encoder(setup.policy, options)
    row, made = setup.adapter.kept_feature(setup.policy, options), {}
    for _, camera in setup.binding.cameras:
        pictures = torch.zeros(CHUNK, *batch[camera].shape[1:], dtype=torch.uint8)
        pictures[: len(batch[camera])] = batch[camera]
        values = encoder(pictures).numpy()[: len(batch[camera])]
        assert values.shape[1:] == row.shape
        assert values.dtype == row.column_dtype
        made[camera] = torch.from_numpy(values)
    return batch | made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", KEPT_PART)
def test_loss_and_gradients_are_those_of_pictures(setup, draws, train, dtype):
    module: Any = load(setup, train, dtype=dtype, flow_samples=DRAWS)
    kept = kept_of(setup, draws, options_of(train, dtype))
    loss, gradient = (module(draws), module(kept)), []
    for one in loss:
        gradient.append(gradients(module, one))
        module.zero_grad(set_to_none=True)
    of_loss, of_gradient = DTYPES[dtype]
    assert distance(loss[1], loss[0]) <= of_loss
    error, name = worst_distance(gradient[1], gradient[0])
    assert error <= of_gradient, name
    other = kept | {camera: kept[camera].flip(0) for _, camera in setup.binding.cameras}
    assert distance(module(other), loss[0]) > of_loss  # they are looked at


def test_a_way_that_trains_the_tower_keeps_nothing(setup):
    assert KEPT_PART.keys() == POLICY.train_ways.keys() - {"full"}
    with pytest.raises(
        ValueError, match=r"--policy.train=full .* leave the flag out, or give --policy.train=expert, or give"
    ):
        require_kept(setup.adapter, setup.policy, POLICY, options_of("full"))


def test_other_policies_offer_none(setup):
    assert get_adapter("act").kept_feature(setup.policy, options_of("full")) is None


@pytest.mark.parametrize("train", KEPT_PART)
def test_a_step_from_features_never_waits_for_the_device(setup, draws, train):
    module = load(setup, train, flow_samples=DRAWS)
    kept = kept_of(setup, draws, options_of(train))
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *kept.values()]) as spy:
        module(kept).backward()
    assert spy.table() == []


def test_the_encoder_reads_only_its_own_weights_and_stays_on_the_device(setup, batch):
    camera = setup.binding.cameras[0][1]
    with fake_cuda():
        encoder = setup.adapter.load_encoder(setup.policy, options_of("expert", "bfloat16"), CUDA)
        assert all(is_fake_cuda(one) for one in (*encoder.parameters(), *encoder.buffers()))
        assert {name.partition(".")[0] for name, _ in encoder.named_parameters()} == {"vision_model", "connector"}
        assert is_fake_cuda(encoder(batch[camera].to(CUDA)))
    before_the_connector = setup.adapter.load_encoder(setup.policy, options_of("language"))
    assert {name.partition(".")[0] for name, _ in before_the_connector.named_parameters()} == {"vision_model"}


@pytest.mark.parametrize("train", KEPT_PART)
def test_a_step_from_features_costs_about_what_the_adapter_says(setup, batch, train):
    module, kept = load(setup, train), kept_of(setup, batch, options_of(train))
    with FlopCounterMode(display=False) as counter:
        module(kept).backward()
    said = setup.adapter.step_flops(setup.policy, setup.binding, options_of(train))
    assert 0.4 < said / (counter.get_total_flops() / len(batch[TIME])) < 2


def test_at_its_published_size_a_picture_shrinks_unless_the_connector_trains():
    size = next(iter(KNOWN.values()))
    patches = (512 // size.patch_size) ** 2
    kept = FeatureRow("connector", (patches // size.shuffle**2, size.width), "bfloat16")
    assert (kept.shape, kept.nbytes) == ((64, 960), 122_880)
    assert kept.nbytes < PICTURE_BYTES < FeatureRow("vision_model", (patches, size.vision_width), "bfloat16").nbytes
