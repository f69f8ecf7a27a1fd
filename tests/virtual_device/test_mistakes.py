"""The virtual device notices mistakes, and does not complain about correct code."""

import pytest

from virtual_device.conftest import run_program

FOUND = {
    "wait_event": "violation",
    "record_stream": "violation",
    "host buffer": "violation",
    "save": "OSError",  # the kernel cannot read the buffer either
    "host touches device memory": "violation",
    "host reads too early": "violation",
    "collective": "violation",
    "collective of the host": "ValueError",
    "host sync": "RuntimeError",
    "host sync in backward": "RuntimeError",
    "pageable copy": "RuntimeError",
    "host tensor": "RuntimeError",
    "other device": "RuntimeError",
    "uninitialised": "wrong",
    "freed": "wrong",
    "out of memory": "OutOfMemoryError",
}


@pytest.fixture(scope="module")
def outcomes(virtual_library) -> dict[str, list[str]]:
    return run_program("mistakes", virtual_library)[-1]


@pytest.mark.parametrize("case", FOUND)
def test_a_mistake_is_noticed(outcomes, case):
    assert outcomes[case] == ["fine", FOUND[case]]
