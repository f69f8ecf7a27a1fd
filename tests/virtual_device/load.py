"""Load policies onto the virtual device: `python -m virtual_device.load LIBRARY DATASET KIND BASE ...`.

Prints a line of JSON per KIND and BASE: the most bytes on the host and on the device, and the bytes of the model, its buffers and its
largest stored tensor.
"""

import json
import sys
from pathlib import Path

import torch
from parity.policies.flow_parity import Case
from safetensors.torch import load_file
from tensor_bytes import TensorBytes, bytes_of

from virtual_device.backend import NAME, VirtualDevice
from vlatune.policies.base import ModuleOptions


def main(library: Path, dataset: Path, named: list[str]) -> None:
    VirtualDevice(library)
    device = torch.device(NAME, 0)
    for kind, base in zip(named[::2], named[1::2], strict=True):
        setup = Case(kind, Path(base), dataset).setup
        options = ModuleOptions(train="expert", dtype="bfloat16")
        with TensorBytes() as counter:
            module = setup.adapter.load_module(setup.policy, setup.binding, options, device)
        assert {one.device for one in (*module.parameters(), *module.buffers())} == {device}
        found = {
            "host": counter.peak["cpu"],
            "device": counter.peak[NAME],
            "model": bytes_of([*module.parameters(), *module.buffers()]),
            "buffers": bytes_of(module.buffers()),
            "largest": max(one.nbytes for one in load_file(Path(base) / "model.safetensors").values()),
        }
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
