"""Hostile and damaged datasets: `inspect` reports them (exit code 1), `train` rejects them (exit code 2)."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.storage.pickled_columns import put_pickled_type, put_pickles
from unit.untrusted.damage import (
    CAMERA,
    DATA,
    EPISODES,
    ESCAPE,
    INFO,
    STATS,
    TASKS,
    VIDEO,
    claim_frames,
    column,
    edit,
    feature,
    fifo,
    first,
    flip_bit,
    keep_rows,
    link_out,
    link_to,
    long_list,
    long_task,
    number,
    remove,
    rename_feature,
    replace,
    table,
    text,
    truncate,
    understate,
    update,
)

from vlatune import cli

NAN, INF = float("nan"), float("inf")
FLOATS = pa.list_(pa.float32())
SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 0.0.0.0\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n"


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the complete path is too long for a socket
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(before)


REJECTED = {
    # damage that is not hostile: `test_dataset_meta.py`, `test_damage.py`
    # only regular files below the folder
    "info.json is a link out": (link_out(INFO), "outside of"),
    "info.json is a FIFO": (fifo(INFO), "is a FIFO"),
    "info.json is an endless device": (link_to(INFO, "/dev/zero"), "outside of"),
    "info.json is a socket": (replace(INFO, make_socket), "is a socket"),
    "info.json of 17 MB": (text(INFO, " " * (17 << 20)), "16,777,216"),
    "data file is a link out": (link_out(DATA), "outside of"),
    "data file is a link to itself": (link_to(DATA, "file-000.parquet"), DATA),
    "data folder is a link out": (link_out("data"), ""),
    "video is a link out": (link_out(VIDEO), "outside of"),
    "video is a FIFO": (fifo(VIDEO), "is a FIFO"),
    # path templates
    "template leaves the dataset": (update(INFO, data_path="../../{file_index}.parquet"), "'../../0.parquet'"),
    "template is absolute": (update(INFO, video_path="/etc/{file_index}"), "'/etc/0'"),
    "template reads attributes": (update(INFO, data_path="data/{file_index.__class__}"), INFO),
    "template of endless width": (update(INFO, data_path="data/{file_index:0999999999d}"), INFO),
    "camera name leaves the dataset": (rename_feature(CAMERA, "../../../etc"), "../../../etc"),
    # info.json
    "info.json is not text": (replace(INFO, lambda path: path.write_bytes(b"\xff\xfe\x00{")), INFO),
    "info.json is nested": (text(INFO, "[" * 100 + "]" * 100), "depth of 65"),
    "info.json is nested beyond the parser": (text(INFO, "[" * 100_000), INFO),
    "info.json of 8 million values": (text(INFO, "[" + "," * 8_200_000), "VLATUNE_LIMIT_SCALE=2"),
    "shape of 10^9": (feature("action", shape=[10**9]), "VLATUNE_LIMIT_SCALE=250"),
    "camera of 10^6 pixels a side": (feature(CAMERA, shape=[10**6, 10**6, 3]), "VLATUNE_LIMIT_SCALE="),
    "fps of 10^400": (update(INFO, fps=10**400), "frames per second"),
    "more episodes than there are": (update(INFO, total_episodes=9), "total_episodes"),
    "version v2.0": (update(INFO, codebase_version="v2.0"), "convert"),
    "version v4.0": (update(INFO, codebase_version="v4.0"), "newer"),
    # meta/episodes
    "no episodes": (keep_rows(EPISODES, 0), "no episodes"),
    "an episode twice": (column(EPISODES, "episode_index", lambda rows: [0, *rows[:-1]]), "episode 0"),
    "an episode of -1 frames": (column(EPISODES, "length", first(-1)), "length -1"),
    "an episode of 10^9 frames": (column(EPISODES, "length", first(10**9)), "VLATUNE_LIMIT_SCALE=100"),
    "an episode without length": (column(EPISODES, "length", first(None)), "'length'"),
    "an episode in chunk 2^62": (column(EPISODES, "data/chunk_index", first(2**62)), f"data/chunk-{2**62}"),
    "an episode at NaN seconds": (column(EPISODES, f"videos/{CAMERA}/from_timestamp", first(NAN)), "nan s"),
    "lengths are text": (column(EPISODES, "length", lambda rows: ["12"] * len(rows), pa.string()), "'length'"),
    # tasks
    "no tasks.parquet": (remove(TASKS), TASKS),
    "a task without text": (column(TASKS, "task", first(None)), TASKS),
    "task_index of 2^62": (column(TASKS, "task_index", first(2**62)), TASKS),
    "task_index twice": (column(TASKS, "task_index", lambda rows: [0, *rows[:-1]]), "twice"),
    "tasks in another order": (column(TASKS, "task_index", lambda rows: rows[::-1]), "meta/episodes"),
    # data files
    "rows in another order": (column(DATA, "frame_index", lambda rows: rows[::-1]), "frame_index"),
    "missing rows": (keep_rows(DATA, 5), "5 rows"),
    "NaN in an action": (column(DATA, "action", number(30, 2, NAN)), "episode 2"),
    "infinity in an action": (column(DATA, "action", number(0, 1, -INF)), "episode 0"),
    "NaN in a state": (column(DATA, "observation.state", number(3, 0, NAN)), "frame 3"),
    "actions of several widths": (column(DATA, "action", lambda rows: [rows[0][:-1], *rows[1:]], FLOATS), "'action'"),
    "actions of another width": (column(DATA, "action", lambda rows: [row[:-1] for row in rows], FLOATS), "action"),
    "an action is null": (column(DATA, "action", first(None)), "'action'"),
    "another dtype": (feature("action", dtype="int64"), "int64"),
    "half a data file": (truncate(DATA, 0.6), "PAR1"),
    # statistics
    "statistics of width 1": (edit(STATS, lambda stats: stats["action"].update(q01=[0.0])), "action"),
    "statistics are text": (edit(STATS, lambda stats: stats["action"].update(q01="x")), "action.q01"),
    "statistics of NaN": (edit(STATS, lambda stats: stats["action"].update(q01=[NAN] * 3)), "action"),
    "statistics of 10^400": (edit(STATS, lambda stats: stats["action"].update(q99=[10**400] * 3)), "action.q99"),
    # videos
    "a video is a playlist": (text(VIDEO, PLAYLIST), VIDEO),
    "a video is an SDP file": (text(VIDEO, SDP), VIDEO),
    "a video of 10 million frames": (claim_frames(10_000_000), "VLATUNE_LIMIT_SCALE=2"),
    "a video with more frames than bytes": (claim_frames(4_000_000), "4,000,000"),
    # sizes
    "a list of 5 million values": (table(DATA, lambda: long_list(5_000_000)), "VLATUNE_LIMIT_SCALE=2"),
    "21 million rows": (table(DATA, lambda: {"index": np.zeros(21_000_000, np.int8)}), "21,000,000"),
    "a task of 100 MB": (table(TASKS, lambda: long_task(100 << 20)), "VLATUNE_LIMIT_SCALE=2"),
    # control characters
    "fps is an escape sequence": (update(INFO, fps=ESCAPE), "'fps'"),
    "a camera name is an escape sequence": (rename_feature(CAMERA, f"observation.images.{ESCAPE}"), "?]0;owned?"),
    "a template is an escape sequence": (update(INFO, data_path=f"data/{ESCAPE}"), "?]0;owned?"),
}


@pytest.mark.parametrize(("damage", "mention"), REJECTED.values(), ids=REJECTED)
def test_a_damaged_dataset_is_reported_and_rejected(damage, mention, sandbox, vlatune) -> None:
    damage(sandbox.dataset)
    vlatune("inspect", sandbox.dataset, code=1, mentions="")
    vlatune("train", *sandbox.train_flags(), code=2, mentions=mention)


@pytest.mark.parametrize(
    "name", ["info.json is a FIFO", "NaN in a state", "a video is an SDP file", "half a data file"]
)
def test_doctor_reports_hostile_files_as_findings(name, sandbox, vlatune) -> None:
    damage, mention = REJECTED[name]
    damage(sandbox.dataset)
    html = sandbox.folder / "doctor.html"
    vlatune("doctor", *sandbox.train_flags(), f"--html={html}", code=1, mentions=mention)


@pytest.mark.parametrize(
    ("file", "damage", "mention"),
    [
        ("episodes.jsonl", link_out, "outside of"),
        ("tasks.jsonl", fifo, "is a FIFO"),
        ("episodes.jsonl", remove, "meta/episodes.jsonl"),
        ("episodes.jsonl", "{\n", "meta/episodes.jsonl, line 1"),
        ("episodes.jsonl", "[]\n", "meta/episodes.jsonl, line 1"),
        ("episodes.jsonl", '{"episode_index": 0}\n', "there is no 'length'"),
        ("episodes.jsonl", '{"episode_index": 0, "length": "1"}\n', "'length' is '1'"),
        ("episodes.jsonl", '{"episode_index": 0, "length": 0}\n', "episode 0 has length 0"),
        ("episodes.jsonl", '{"episode_index": 1, "length": 3}\n', "lists episode 1 at place 0"),
        ("episodes.jsonl", "", "it has no episodes"),
        ("episodes.jsonl", "x" * (40 << 20), "VLATUNE_LIMIT_SCALE="),
        ("tasks.jsonl", '{"task_index": 0, "task": 5}\n', "meta/tasks.jsonl"),
        ("tasks.jsonl", '{"task_index": 0, "task": "a"}\n' * 2, "twice"),
        ("tasks.jsonl", '{"task_index": 1, "task": "a"}\n', "task_index 1"),
        ("episodes_stats.jsonl", '{"stats": 3}\n', "episodes_stats.jsonl, line 1"),
        ("episodes_stats.jsonl", '{"episode_index": 0, "stats": {"action": {"mean": ["x"]}}}\n', "'action'"),
    ],
)
def test_a_damaged_dataset_of_version_2_1(file, damage, mention, sandbox, vlatune) -> None:
    name = f"meta/{file}"
    (text(name, damage) if isinstance(damage, str) else damage(name))(sandbox.dataset_v21)
    vlatune("inspect", sandbox.dataset_v21, code=1, mentions=mention)
    vlatune("train", *sandbox.train_flags(dataset=sandbox.dataset_v21), code=2, mentions=mention)


@pytest.mark.parametrize(
    ("damage", "mention"),
    [
        (column(DATA, "timestamp", first(NAN)), "timestamp"),
        (column(DATA, "timestamp", lambda rows: [2 * row for row in rows]), "timestamp"),
        (column(DATA, "action", number(3, 0, 1e6)), "q99"),
        (update(INFO, robot_type=ESCAPE), "?]0;owned?"),
        (column(TASKS, "task", lambda rows: [f"{ESCAPE}{row}" for row in rows]), "?]0;owned?"),
    ],
    ids=["NaN timestamp", "other timestamps", "outlier", "escapes in the robot type", "escapes in a task"],
)
def test_inspect_warns_about_plausible_datasets(damage, mention, sandbox, vlatune) -> None:
    damage(sandbox.dataset)
    vlatune("inspect", sandbox.dataset, code=0, mentions=mention)


@pytest.mark.parametrize(
    ("file", "name", "nested"),
    [(TASKS, "task", False), (EPISODES, "length", False), (DATA, "action", True), (DATA, "observation.state", False)],
)
def test_pickled_columns_are_rejected_without_running_them(file, name, nested, sandbox, vlatune) -> None:
    put_pickles(sandbox.dataset / file, name, sandbox.marker, nested=nested)
    vlatune("inspect", sandbox.dataset, code=1, mentions=file)
    vlatune("train", *sandbox.train_flags(), code=2, mentions=file)


def test_pickled_columns_that_are_not_read_are_ignored(sandbox, vlatune) -> None:
    put_pickles(sandbox.dataset / DATA, "note", sandbox.marker)
    put_pickled_type(sandbox.dataset / TASKS, "note", sandbox.marker)
    vlatune("inspect", sandbox.dataset, code=0, mentions="no problems found")


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize(
    ("file", "make", "name", "what"),
    [
        (DATA, lambda: long_list(5_000_000), "action", "num_values"),
        (TASKS, lambda: long_task(100 << 20), "task", "total_uncompressed_size"),
    ],
    ids=["values", "bytes"],
)
def test_pages_larger_than_the_footer_states_are_rejected(file, make, name, what, is_remote, sandbox, vlatune) -> None:
    table(file, make)(sandbox.dataset)
    understate(file, name, what)(sandbox.dataset)
    root = str(sandbox.dataset)
    if is_remote:
        root = f"memory://{sandbox.folder.name}"
        fsspec.filesystem("memory").put(str(sandbox.dataset), f"/{sandbox.folder.name}", recursive=True)
    vlatune("train", *sandbox.train_flags(dataset=root), code=2, mentions=f"column '{name}")


@pytest.mark.parametrize("content", [SDP, PLAYLIST])
def test_a_remote_video_of_another_format_is_rejected(content, sandbox, vlatune) -> None:
    text(VIDEO, content)(sandbox.dataset)
    fsspec.filesystem("memory").put(str(sandbox.dataset), f"/{sandbox.folder.name}", recursive=True)
    vlatune("inspect", f"memory://{sandbox.folder.name}", code=1, mentions=VIDEO)


def test_the_scale_raises_a_limit(sandbox, vlatune, monkeypatch) -> None:
    table(TASKS, lambda: long_task(30_000))(sandbox.dataset)
    vlatune("inspect", sandbox.dataset, code=1, mentions="set VLATUNE_LIMIT_SCALE=2")
    monkeypatch.setenv("VLATUNE_LIMIT_SCALE", "2")
    output = vlatune("inspect", sandbox.dataset, code=1, mentions="")
    assert "VLATUNE_LIMIT_SCALE" not in output


@pytest.mark.parametrize("name", [DATA, VIDEO, TASKS, INFO])
def test_checksums_detect_a_changed_bit(name, sandbox, vlatune) -> None:
    vlatune("inspect", sandbox.dataset, "--json=true", code=0, mentions='"has_checksums": false')
    vlatune("inspect", sandbox.dataset, "--write_checksums=true", code=0, mentions="meta/checksums.json")
    sums = json.loads((sandbox.dataset / "meta/checksums.json").read_text())["sha256"]
    assert {INFO, DATA, VIDEO, TASKS} <= sums.keys()
    vlatune("inspect", sandbox.dataset, "--json=true", code=0, mentions='"has_checksums": true')
    if name == INFO:
        (sandbox.dataset / INFO).write_text((sandbox.dataset / INFO).read_text() + " ")
    else:
        flip_bit(name)(sandbox.dataset)
    vlatune("inspect", sandbox.dataset, code=1, mentions="checksum in meta/checksums.json")
    vlatune("train", *sandbox.train_flags(), code=2, mentions="checksum in meta/checksums.json")


def test_links_inside_the_dataset_are_followed(sandbox, vlatune) -> None:
    for name in (INFO, DATA, VIDEO):
        path = sandbox.dataset / name
        target = sandbox.dataset / ".annex" / path.name
        target.parent.mkdir(exist_ok=True)
        shutil.move(path, target)
        path.symlink_to(target)
    folders = [sandbox.dataset / "data" / f"f{at}" for at in range(12)]
    for folder in folders:
        folder.mkdir()
    for folder in folders:  # cycles of links end
        for other in folders:
            (folder / f"to-{other.name}").symlink_to(other)
    vlatune("inspect", sandbox.dataset, code=0, mentions="no problems found")


@pytest.mark.parametrize("which", ["dataset", "base"])
def test_the_hub_cache_is_read(which, sandbox, vlatune) -> None:
    """Its snapshots are links to blobs next to them; links to any other file are rejected."""
    cache = sandbox.folder / "hub/x--owner--name"
    snapshot = Path(shutil.copytree(getattr(sandbox, which), cache / "snapshots/1234567890abcdef"))
    (cache / "blobs").mkdir()
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    for at, path in enumerate(files):
        shutil.move(path, cache / "blobs" / str(at))
        path.symlink_to(Path("../" * len(path.relative_to(cache).parts[:-1])) / "blobs" / str(at))
    flags = [*sandbox.train_flags(**{which: snapshot}), "--batch_size=4096"]
    vlatune("train", *flags, code=2, mentions="global batch")  # all files were read by then
    (cache / "blobs/0").rename(cache / "other")
    files[0].unlink()
    files[0].symlink_to(cache / "other")
    vlatune("train", *flags, code=2, mentions="outside of")


SHELL = """x$(mkdir code-ran)`mkdir code-ran`';mkdir code-ran;'";mkdir code-ran;"&mkdir code-ran"""


@pytest.mark.parametrize("name", [SHELL, f"{SHELL}\nmkdir code-ran\n"], ids=["one line", "several lines"])
def test_suggested_commands_are_quoted(name, sandbox, capsys, monkeypatch) -> None:
    """A suggested command is given to a shell with a `vlatune` that records its arguments."""
    new, old = f"observation.images.{name}", "observation.images.wrist"
    (sandbox.dataset / "videos" / old).rename(sandbox.dataset / "videos" / new)
    rename_feature(old, new)(sandbox.dataset)
    edit(STATS, lambda stats: stats.update({new: stats.pop(old)}))(sandbox.dataset)
    for file in (sandbox.dataset / "meta/episodes").rglob("*.parquet"):
        rows = pq.read_table(file)
        pq.write_table(rows.rename_columns([one.replace(old, new) for one in rows.column_names]), file)
    root = sandbox.dataset.rename(sandbox.folder / "data $(mkdir code-ran)")
    monkeypatch.chdir(sandbox.folder)
    (sandbox.folder / "vlatune").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" >> words\n")
    (sandbox.folder / "vlatune").chmod(0o700)
    cli.main(["inspect", str(root), "--json"])
    shown = [json.loads(capsys.readouterr().out)["command"]]
    cli.main(["doctor", *sandbox.train_flags(dataset=root), "--html=d.html", "--json"])
    found = json.loads(capsys.readouterr().out)
    shown += [found["command"], *(one["command"] for one in found["findings"])]
    shown += [f"vlatune train {one['flags']}" for one in found["findings"] if one["flags"]]
    env = {"PATH": f"{sandbox.folder}:{os.environ['PATH']}"}
    for command in filter(None, shown):
        for pasted in (command, "".join(char if char.isprintable() else "?" for char in command)):
            subprocess.run(["/bin/sh", "-c", pasted], env=env, capture_output=True, check=False)
    assert not sandbox.marker.exists()
    assert "--rename_map=" in (sandbox.folder / "words").read_text(), "no command was suggested"
