"""What is asked of a dataset: features that cannot be delivered are named, none goes away in silence."""

import json
import logging
import shutil

from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.request import Request, make_deliveries


def test_features_that_are_left_out_are_named(dataset_v3, tmp_path, caplog):
    root = shutil.copytree(dataset_v3, tmp_path / "odd")
    info = json.loads((root / "meta/info.json").read_text())
    info["features"] |= {
        "note": {"dtype": "string", "shape": [2], "names": None},
        "tree": {"dtype": "struct", "shape": [1], "names": None},
        "reward": {"dtype": "float32", "shape": [1], "names": None},
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    with caplog.at_level(logging.WARNING):
        (delivery,) = make_deliveries([load_meta(str(root))], Request(), [{}])
    assert caplog.messages == [
        f"dataset '{root}': features that are neither numbers nor a text are left out: 'note' (string), 'tree' (struct)"
    ]
    assert {"reward", "action"} <= {vector.name for vector in delivery.spec.vectors}


def test_nothing_is_said_where_nothing_is_left_out(dataset_v3, caplog):
    make_deliveries([load_meta(str(dataset_v3))], Request(), [{}])
    assert caplog.messages == []


def test_what_is_read_is_held_against_info(dataset_v3):
    (delivery,) = make_deliveries([load_meta(str(dataset_v3))], Request(), [{}])
    top = delivery.spec.cameras[0].recorded
    assert top is not None
    assert (top.height, top.width, top.fps) == (96, 96, 10.0)
    assert {vector.recorded_dtype for vector in delivery.spec.vectors} == {"float32"}
