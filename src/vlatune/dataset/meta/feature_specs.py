"""Features of info.json -> what the reader is to read: one camera or one vector at a time. Pure."""

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature
from vlatune.dataset.reader import CameraSpec, VectorSpec
from vlatune.dataset.video.recorded import recorded_camera
from vlatune.dataset.video.resize import CENTRED, Letterbox


def camera_spec(
    meta: DatasetMeta,
    name: str,
    resize: tuple[int, int] | None,
    offsets: tuple[int, ...] | None = None,
    *,
    called: str | None = None,
    letterbox: Letterbox = CENTRED,
) -> CameraSpec:
    """A camera at this (height, width), or at the recorded size; files that differ from info.json will be refused."""
    feature = meta.features[name]
    height, width = resize or feature.height_width
    return CameraSpec(name, feature.dtype, height, width, offsets, recorded_camera(meta, name), called, letterbox)


def vector_spec(
    meta: DatasetMeta,
    name: str,
    *,
    is_float32: bool,
    offsets: tuple[int, ...] | None = None,
    called: str | None = None,
) -> VectorSpec:
    """A float32 vector, or values as recorded: a single one without an axis of its own."""
    feature = meta.features[name]
    dtype = numpy_type(feature)
    assert dtype is not None
    if is_float32 and dtype != "object":
        return VectorSpec(name, "float32", feature.shape, offsets, dtype, called)
    return VectorSpec(name, dtype, () if feature.shape == (1,) else feature.shape, offsets, dtype, called)


def numpy_type(feature: Feature) -> str | None:
    """None for what is no number and no text, such as pictures and nested records: not read as a column."""
    if feature.dtype in ("string", "str"):
        return "object" if feature.shape in ((), (1,)) else None
    try:
        dtype = np.dtype(feature.dtype)
    except TypeError:
        return None
    return dtype.name if dtype.kind in "biuf" else None
