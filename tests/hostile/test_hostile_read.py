"""The rows of the table that `read_lerobot` meets, in processes with ray.data: the driver's, and Ray's read tasks."""

import pytest
import ray
from cases import CASES
from place import CANARY, READ, Case, Place

from vlatune import read_lerobot


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", [case for case in CASES if case.command == READ], ids=lambda case: case.name)
def test_rows_are_refused_and_nothing_else_happens(case: Case, place: Place, ray_local) -> None:
    case.make(place)
    with pytest.raises((ValueError, RuntimeError, ray.exceptions.RayTaskError)) as caught:
        read_lerobot(str(place.dataset), resize=(16, 16), action_horizon=2).take_all()
    assert case.says in " ".join(str(caught.value).split())
    assert isinstance(caught.value, ValueError) == (case.code == 2)
    assert CANARY not in str(caught.value)
    assert not place.marker.exists()
