"""Requests: features that cannot be delivered are named, and read specs carry the properties in info.json."""

import json
import logging
import shutil

from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.request import Request, make_read_specs


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
        (spec,), columns = make_read_specs([load_meta(str(root))], Request())
    [message] = caplog.messages
    assert str(root) in message
    assert all(name in message for name in ("'note'", "'tree'"))
    assert "reward" not in message
    assert {"reward", "action"} <= {vector.name for vector in spec.vectors}
    assert {"reward", "action", "action_is_pad"} <= set(columns)
    assert not {"note", "tree"} & set(columns)
