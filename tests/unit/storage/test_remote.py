"""Datasets in an object store: the S3 protocol on loopback, with faults of stores and networks."""

import logging
import multiprocessing
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import fsspec
import numpy as np
import pytest
from unit.storage.loopback_s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Fault, Proxy, put, running_s3

from vlatune.data.frames.decoder import decode_into
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.data.reader import CameraSpec, ReadSpec, VectorSpec, make_unit, read_unit
from vlatune.storage import remote_file, remote_fs, remote_retry
from vlatune.storage.root import Root

SIDE = 64
BIG = "big/noise.mp4"
PAYLOAD = np.random.default_rng(5).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
FAULTS = ["503", "500", "429", "reset", "cut", "short", "hang", "hang_in_body"]


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with running_s3() as proxy:
        put(proxy, "files/payload.bin", PAYLOAD)
        yield proxy


@pytest.fixture
def s3(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The server without faults and counts, short pauses, an empty cache."""
    monkeypatch.setattr(remote_retry, "FIRST_BACKOFF_S", 0.001)
    server.reset()
    remote_file.cache.clear()
    yield server
    server.reset()


@pytest.fixture
def memory() -> Iterator[Any]:
    """The filesystem behind memory://, emptied again."""
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def uploaded(server: Proxy, dataset_v3: Path, dataset_v21: Path) -> dict[str, Path]:
    """Prefix in the bucket -> the folder with the same files."""
    folders = {"v3": dataset_v3, "v21": dataset_v21}
    for prefix, folder in folders.items():
        upload(server, folder, prefix)
    return folders


@pytest.fixture(scope="module")
def big_mp4(server: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "noise.mp4"
    write_noise(path)
    put(server, BIG, path.read_bytes())
    return path


def root_of(proxy: Proxy, prefix: str = "files", **config: Any) -> Root:
    return Root(f"s3://{BUCKET}/{prefix}", proxy.storage_options(**config))


def upload(proxy: Proxy, folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            put(proxy, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def write_noise(path: Path, *, fps: int = 30, repeats: int = 20) -> None:
    """97 MB in 40 s of 320x240: sixty frames of noise in groups of ten, again and again; the index is at the end."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        options = {"preset": "ultrafast", "qp": "18", "g": "10", "bf": "0", "tune": "zerolatency"}
        stream: Any = container.add_stream("libx264", rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        packets: list[Any] = []
        for number in range(60):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, (240, 320, 3), dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        encoded = [(bytes(packet), packet.is_keyframe) for packet in packets]
        for number, (data, is_keyframe) in enumerate(encoded * repeats):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, fps), is_keyframe
            packet.pts = packet.dts = number
            packet.duration = 1
            container.mux(packet)


def decode(source: Any, wanted_s: list[float]) -> np.ndarray:
    out_NCHW = np.zeros((len(wanted_s), 3, SIDE, SIDE), dtype=np.uint8)
    decode_into(source, wanted_s, out_NCHW, BIG, tolerance_s=1e-3)
    return out_NCHW


def spec_of(meta: DatasetMeta) -> ReadSpec:
    vectors = {name: meta.features[name].shape for name in ("action", "observation.state")}
    return ReadSpec(
        root=meta.root,
        dataset_index=0,
        tolerance_s=1e-3,
        cameras=tuple(CameraSpec(name, "video", SIDE, SIDE) for name in meta.cameras),
        vectors=tuple(VectorSpec(name, "float32", shape) for name, shape in vectors.items()),
        tasks=meta.tasks,
    )


def read_episode(meta: DatasetMeta, position: int) -> dict[str, np.ndarray]:
    frames = np.arange(meta.episodes.length[position])
    spec = spec_of(meta)
    return dict(read_unit(spec, make_unit(meta, spec, position, frames, frames)))


# --- datasets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["v3", "v21"])
def test_meta_and_every_frame_equal_the_local_ones(s3: Proxy, uploaded: dict[str, Path], prefix: str) -> None:
    local, remote = load_meta(str(uploaded[prefix])), load_meta(root_of(s3, prefix))
    assert (remote.version, remote.fps, remote.tasks) == (local.version, local.fps, local.tasks)
    assert (remote.features, remote.templates) == (local.features, local.templates)
    np.testing.assert_equal(remote.stats, local.stats)
    np.testing.assert_equal(asdict(remote.episodes), asdict(local.episodes))
    for position in range(len(local.episodes)):
        here, there = read_episode(local, position), read_episode(remote, position)
        assert here.keys() == there.keys()
        for name, values in here.items():
            np.testing.assert_array_equal(there[name], values, err_msg=f"episode {position}, {name}")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_dataset_is_read_right_through_faults(s3: Proxy, dataset_v3: Path, kind: str) -> None:
    expected = read_episode(load_meta(str(dataset_v3)), 2)
    upload(s3, dataset_v3, f"faulty-{kind}")
    root = root_of(s3, f"faulty-{kind}", **({"read_timeout": 0.5} if "hang" in kind else {}))
    s3.faults += [Fault(kind, part="/meta/"), Fault(kind, part="/data/"), Fault(kind, part="/videos/")]
    found = read_episode(load_meta(root), 2)
    assert [fault.times for fault in s3.faults] == [0, 0, 0]
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


# --- how much is read ----------------------------------------------------------------------------------------------


def test_a_few_seconds_of_a_big_mp4_are_few_requests_and_bytes(s3: Proxy, big_mp4: Path) -> None:
    wanted_s = [20.0 + number / 30 for number in range(90)]
    size, seconds = big_mp4.stat().st_size, 40
    assert size >= 60_000_000
    root = root_of(s3, "big")
    with root.open("noise.mp4") as file:
        found = decode(file, wanted_s)
    np.testing.assert_array_equal(found, decode(str(big_mp4), wanted_s))
    span_bytes = size * 3 // seconds
    cold_bytes = sum(one.sent_bytes for one in s3.seen)
    assert cold_bytes <= 2 * span_bytes + 1_000_000
    assert len(s3.seen) <= 12

    s3.reset()
    with root.open("noise.mp4") as file:
        decode(file, [7.0 + number / 30 for number in range(30)])
    assert len(s3.seen) <= 8
    assert all(one.range[0] > 4_000_000 and one.range[1] < size - 4_000_000 for one in s3.gets() if one.range), (
        "the index was fetched again"
    )


def test_a_small_object_is_one_request(s3: Proxy) -> None:
    put(s3, "files/small.json", b"x" * 900_000)
    assert root_of(s3).read_bytes("small.json") == b"x" * 900_000
    assert [one.method for one in s3.seen if "small.json" in one.target] == ["HEAD", "GET"]


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failed_request_is_retried(s3: Proxy, kind: str) -> None:
    root = root_of(s3, read_timeout=0.5) if "hang" in kind else root_of(s3)
    s3.faults.append(Fault(kind, times=2, part="payload.bin"))
    if kind not in ("cut", "short", "hang_in_body"):  # a HEAD has no body
        s3.faults.append(Fault(kind, times=2, method="HEAD", part="payload.bin"))
    assert root.read_bytes("payload.bin") == PAYLOAD
    assert not any(fault.times for fault in s3.faults)
    assert sum(one.is_faulty for one in s3.gets()) == 2
    assert len({one.range for one in s3.gets()[:3]}) == 1, "the same range is requested again"


@pytest.mark.parametrize("kind", ["503", "reset", "cut"])
def test_a_failed_listing_is_retried(s3: Proxy, uploaded: dict[str, Path], kind: str) -> None:
    expected = Root(str(uploaded["v3"])).glob("meta/episodes/*/*.parquet")
    s3.faults.append(Fault(kind, times=2, part="list-type"))
    assert root_of(s3, "v3").glob("meta/episodes/*/*.parquet") == expected != []
    assert s3.faults[0].times == 0


@pytest.mark.parametrize(
    ("method", "kind", "error", "message"),
    [
        ("GET", "400", RuntimeError, "request rejected"),
        ("GET", "403", PermissionError, "denied"),
        ("GET", "404", FileNotFoundError, "no such object"),
        ("HEAD", "403", PermissionError, "denied"),
        ("HEAD", "404", FileNotFoundError, "no such object"),
    ],
)
def test_permanent_errors_are_not_retried(
    s3: Proxy, method: str, kind: str, error: type[Exception], message: str
) -> None:
    s3.faults.append(Fault(kind, times=-1, method=method, part="payload.bin"))
    with pytest.raises(error, match=f"'s3://{BUCKET}/files/payload.bin': .*{message}"):
        root_of(s3).read_bytes("payload.bin")
    assert sum(one.is_faulty for one in s3.seen) == 1


def test_the_last_error_names_object_and_tries(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_retry, "MAX_TRIES", 4)
    s3.faults.append(Fault("503", times=-1))
    pattern = f"'s3://{BUCKET}/files/payload.bin': gave up after 4 tries in .* s; the last failed with .*503"
    with pytest.raises(RuntimeError, match=pattern):
        root_of(s3).read_bytes("payload.bin")
    assert len(s3.gets()) == 4


@pytest.mark.parametrize("kind", ["503", "403"])
def test_failures_that_ffmpeg_swallows_are_raised(
    s3: Proxy, big_mp4: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """The fault begins in the middle of the span: ffmpeg has frames to give by then, and reads on."""
    monkeypatch.setattr(remote_retry, "MAX_TRIES", 2)
    size = big_mp4.stat().st_size
    s3.faults.append(Fault(kind, times=-1, first_byte=size // 2 + 1_000_000))
    error = RuntimeError if kind == "503" else PermissionError
    with pytest.raises(error, match=BIG), root_of(s3, "big").open("noise.mp4") as file:
        decode(file, [20.0 + number / 30 for number in range(90)])
    assert "Traceback" not in capfd.readouterr().err

    def read_and_lose() -> None:
        with root_of(s3, "big").open("noise.mp4") as file, suppress(OSError, RuntimeError):
            file.seek(size // 2 + 3_000_000)
            file.read(10)

    with pytest.raises(error, match=BIG):
        read_and_lose()


def test_retries_do_not_use_the_global_random_state(s3: Proxy) -> None:
    before = random.getstate()
    s3.faults.append(Fault("503", times=3))
    root_of(s3).read_bytes("payload.bin")
    assert random.getstate() == before


# --- objects that change -------------------------------------------------------------------------------------------


def read_during(root: Root, name: str, event: Callable[[], None]) -> None:
    with root.open(name) as file:
        file.read(1000)
        event()
        file.seek(2_000_000)
        file.read(1000)


def test_a_change_during_reading_is_detected_by_the_store(s3: Proxy) -> None:
    put(s3, "files/moving.bin", PAYLOAD)
    root = root_of(s3)
    before = root.version("moving.bin")
    with pytest.raises(RuntimeError, match=r"moving.bin' changed while it was read"):
        read_during(root, "moving.bin", lambda: put(s3, "files/moving.bin", PAYLOAD[::-1]))
    assert root.version("moving.bin") != before
    assert root.read_bytes("moving.bin") == PAYLOAD[::-1], "blocks of the old version must not be used"


def test_a_change_during_reading_is_detected_on_close(memory: Any) -> None:
    root = Root("memory://moving")
    memory.pipe("/moving/file.bin", PAYLOAD)
    before = root.version("file.bin")
    with pytest.raises(RuntimeError, match=r"file.bin' changed while it was read"):
        read_during(root, "file.bin", lambda: memory.pipe("/moving/file.bin", PAYLOAD[::-1]))
    assert root.version("file.bin") != before
    assert root.read_bytes("file.bin") == PAYLOAD[::-1]


# --- listings ------------------------------------------------------------------------------------------------------


def test_exists_glob_and_no_stale_listing(s3: Proxy) -> None:
    root = root_of(s3, "listed")
    assert not root.is_dir()
    assert root.glob("meta/*/*.parquet") == []
    for name in ("meta/a/1.parquet", "meta/b/2.parquet", "meta/b/2.json", "meta/3.parquet"):
        put(s3, f"listed/{name}", b"x")
    assert root.is_dir()
    assert root.exists("meta/a/1.parquet")
    assert root.exists("meta/a")
    assert not root.exists("meta/a/1")
    assert root.glob("meta/*/*.parquet") == ["meta/a/1.parquet", "meta/b/2.parquet"]
    put(s3, "listed/meta/c/4.parquet", b"x")
    assert root.glob("meta/*/*.parquet") == ["meta/a/1.parquet", "meta/b/2.parquet", "meta/c/4.parquet"]
    put(s3, "listed/meta/c/4.parquet", b"longer")
    assert root.read_bytes("meta/c/4.parquet") == b"longer", "the size must not come from the listing"


def test_a_root_with_wildcards_in_its_name(memory: Any) -> None:
    memory.pipe("/odd[1]*/meta/a.json", b"x")
    memory.pipe("/odd1x/meta/b.json", b"x")
    assert Root("memory://odd[1]*").glob("meta/*.json") == ["meta/a.json"]


# --- processes, threads, secrets -----------------------------------------------------------------------------------


def test_a_forked_child_reads(s3: Proxy) -> None:
    root = root_of(s3)
    assert root.read_bytes("payload.bin") == PAYLOAD
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(root,))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    assert root.read_bytes("payload.bin") == PAYLOAD


def _read_in_child(root: Root) -> None:
    assert root.read_bytes("payload.bin") == PAYLOAD


def test_secrets_are_not_printed_or_logged(
    s3: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(remote_retry, "MAX_TRIES", 2)
    root = root_of(s3)

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError(f"cannot sign with {SECRET_KEY} of {ACCESS_KEY}")

    with root.open("payload.bin") as file, monkeypatch.context() as patch:
        patch.setattr(file, "_get", fail)
        with pytest.raises(RuntimeError, match=r"gave up .* cannot sign with \*\*\*") as failed:
            file.read(10)
        file.__dict__["_failure"] = None
    shown = "".join(traceback.format_exception(failed.value)) + repr(root) + str(root) + caplog.text
    assert "retrying" in caplog.text
    assert SECRET_KEY not in shown
    assert ACCESS_KEY not in shown


def test_a_password_in_a_url_is_rejected_without_printing_it() -> None:
    with pytest.raises(ValueError, match="holds a password") as caught:
        Root("sftp://user:hunter2@host/robots")
    assert "hunter2" not in str(caught.value)
    Root("hf://datasets/owner/name@main")


# --- set-up mistakes -----------------------------------------------------------------------------------------------


def test_an_unknown_scheme() -> None:
    with pytest.raises(ValueError, match="dataset 's33://x': unknown scheme 's33'; did you mean s3"):
        Root("s33://x").exists("meta/info.json")


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scheme: str) -> None:
        raise ImportError(f"Install the driver of {scheme}")

    monkeypatch.setattr(remote_fs.fsspec, "get_filesystem_class", fail)
    with pytest.raises(RuntimeError, match=r"pip install 'vlatune\[gcs\]'"):
        Root("gs://bucket/robots").is_dir()


def test_missing_credentials(s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    root = Root(f"s3://{BUCKET}/files", {"client_kwargs": {"endpoint_url": s3.url}})
    with pytest.raises(PermissionError, match=r"no usable credentials .*'anon': True"):
        root.exists("payload.bin")
    assert s3.seen == []


def test_credentials_of_the_environment(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    assert Root(f"s3://{BUCKET}/files", {"use_ssl": False}).read_bytes("payload.bin") == PAYLOAD


def test_a_misspelt_option(s3: Proxy) -> None:
    with pytest.raises(ValueError, match=r"storage_options has a key that the filesystem does not know .*kee"):
        Root(f"s3://{BUCKET}/files", s3.storage_options() | {"kee": "x"}).exists("payload.bin")


def test_a_folder_is_not_a_file(s3: Proxy) -> None:
    with pytest.raises(IsADirectoryError, match=f"'s3://{BUCKET}/files': is a folder"):
        Root(f"s3://{BUCKET}", s3.storage_options()).open("files")
