"""More rows of the table (cases.py): code in parquet files, malformed metadata, and honest mistakes."""

import json
import shutil
from collections.abc import Callable
from typing import Any

from bombs import (
    DATA,
    EPISODES,
    INFO,
    TASKS,
    VIDEO,
    a_list_of,
    a_png_of,
    at,
    claiming_frames,
    column,
    damaged_after_checksums,
    line,
    one_byte,
    table,
)
from payloads import of_type, pickled, pickled_type
from place import (
    CANARY,
    EXPORT,
    INSPECT,
    READ,
    REPORT,
    RESUME,
    TRAIN,
    Case,
    Make,
    Place,
    as_fifo,
    changed_json,
    linked_out,
    nothing,
    replaced,
    resealed,
    text,
    updated,
)

STATS, PRE = "meta/stats.json", "policy_preprocessor.json"
CAMERA = "observation.images.top"
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
OLDER_INSPECT, OLDER_TRAIN = (one.replace("{dataset}", "{older}") for one in (INSPECT, TRAIN))


def both(name: str, make: Make, says: str, train: str | None = None) -> list[Case]:
    """Found by `inspect`, refused by `train`."""
    return [Case(name, make, INSPECT, says, 1), Case(f"{name}, train", make, TRAIN, train or says)]


def older(name: str, make: Make, says: str, train: str | None = None) -> list[Case]:
    return [Case(name, make, OLDER_INSPECT, says, 1), Case(f"{name}, train", make, OLDER_TRAIN, train or says)]


def feature(name: str, **values: Any) -> Make:
    return changed_json("dataset", INFO, lambda info, _: info["features"][name].update(values))


def renamed_feature(name: str, new: str) -> Make:
    def change(info: dict[str, Any], _: Place) -> None:
        info["features"][new] = info["features"].pop(name)

    return changed_json("dataset", INFO, change)


def removed(which: str, file: str) -> Make:
    def make(place: Place) -> None:
        path = getattr(place, which) / file
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return make


def cut(which: str, file: str, share: float) -> Make:
    """The first part of a file, as a download that broke off leaves it."""

    def make(place: Place) -> None:
        path = getattr(place, which) / file
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return make


def moved(which: str, file: str, to: str) -> Make:
    def make(place: Place) -> None:
        shutil.move(getattr(place, which) / file, getattr(place, which) / to)

    return make


def stats(change: Callable[[dict[str, Any]], Any]) -> Make:
    def make(content: dict[str, Any], _: Place) -> None:
        change(content)

    return changed_json("dataset", STATS, make)


def no_columns(file: str, *names: str) -> Make:
    def make(place: Place) -> None:
        import pyarrow.parquet as pq

        path = place.dataset / file
        pq.write_table(pq.read_table(path).drop_columns(list(names)), path)

    return make


def rows(file: str, begin: int, end: int) -> Make:
    def make(place: Place) -> None:
        import pyarrow.parquet as pq

        path = place.dataset / file
        pq.write_table(pq.read_table(path).slice(begin, end - begin), path)

    return make


def dictionary() -> Any:
    import pyarrow as pa

    return pa.dictionary(pa.int32(), pa.string())


def texts() -> Any:
    import pyarrow as pa

    return pa.string()


def of_lists(file: str, name: str, change: Callable[[list[Any]], Any]) -> Make:
    """A column of lists that may differ in length."""

    def make(place: Place) -> None:
        import pyarrow as pa

        column(file, name, change, kind=pa.list_(pa.float32()))(place)

    return make


def float_lists() -> Any:
    import pyarrow as pa

    return pa.list_(pa.float32())


def in_memory(make: Make, name: str) -> Make:
    """The dataset in a remote store, after `make`."""

    def put(place: Place) -> None:
        import fsspec

        make(place)
        fsspec.filesystem("memory").put(str(place.dataset), f"/{name}", recursive=True)

    return put


def a_project(*files: str) -> Make:
    """Somebody's folder with a config.json in it."""

    def make(place: Place) -> None:
        for file in ("config.json", *files):
            (place.outside / file).parent.mkdir(parents=True, exist_ok=True)
            (place.outside / file).write_text(json.dumps({"job_name": "demo"}))

    return make


def links_to_each_other(place: Place) -> None:
    folders = [place.dataset / "data" / f"f{number}" for number in range(12)]
    for folder in folders:
        folder.mkdir()
    for folder in folders:
        for other in folders:
            (folder / f"to-{other.name}").symlink_to(other)


def pictures(side: int) -> Make:
    """A camera whose pictures are in the data files; the first is so many pixels wide and high."""

    def make(place: Place) -> None:
        import pyarrow as pa

        feature(CAMERA, dtype="image")(place)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        first, rest = ({"bytes": a_png_of(one), "path": None} for one in (side, 96))
        for file in (DATA, DATA.replace("file-000", "file-001")):
            of_type(file, CAMERA, lambda: kind, rest)(place)
        column(DATA, CAMERA, lambda rows: [first, *rows[1:]])(place)

    return make


def never_changes(place: Place) -> None:
    for file in (DATA, DATA.replace("file-000", "file-001")):
        column(file, "action", lambda rows: [[0.0, *row[1:]] for row in rows])(place)


def options(**values: str) -> str:
    return f"train --dataset.root=s3://bucket/x --policy.path=x --dataset.storage_options={json.dumps(values, separators=(',', ':'))}"


PICKLES = [
    one
    for what, make, says in (
        ("a pickle for a sentence", pickled(TASKS, "task"), "meta/tasks.parquet: column 'task' has the extension type"),
        (
            "a pickle in a column of tasks that nobody reads",
            pickled(TASKS, "note", deep=True),
            "meta/tasks.parquet: column 'note.item' has the extension type",
        ),
        (
            "a pickle for an episode's sentences",
            pickled(EPISODES, "tasks", deep=True),
            "meta/episodes/chunk-000/file-000.parquet: column 'tasks.item",
        ),
        (
            "a pickle for an episode's length",
            pickled(EPISODES, "length"),
            "meta/episodes/chunk-000/file-000.parquet: column 'length' has",
        ),
        (
            "a pickle for actions",
            pickled(DATA, "action", deep=True),
            "data/chunk-000/file-000.parquet: column 'action.item' has the",
        ),
        (
            "a pickle in a column of data that nobody reads",
            pickled(DATA, "note"),
            "data/chunk-000/file-000.parquet: column 'note' has the",
        ),
        ("a type that is a pickle", pickled_type(TASKS, "note"), "has the extension type 'ray.data.arrow_tensor'"),
        (
            "a type of data that is a pickle",
            pickled_type(DATA, "note"),
            "data/chunk-000/file-000.parquet: column 'note' has the",
        ),
    )
    for one in (
        *both(what, make, says),
        Case(f"{what}, read_lerobot", make, READ, says),
    )
] + [
    *both("a dictionary column", of_type(DATA, "note", dictionary, "a"), "has the type dictionary"),
]

PASSED_ON = [
    Case(
        "a manifest without files, resume",
        updated("run", "checkpoints/00000002/manifest.json", files={}),
        RESUME,
        "names no files",
    ),
]

PLACES = [
    Case("links to each other in data", links_to_each_other, INSPECT, "no problems found", 0),
    Case("a demo in a project", a_project(".git/config"), "demo --output_dir={outside}", "is not the folder of a demo"),
    Case("a demo among notes", a_project("notes.txt"), "demo --output_dir={outside}", "is not the folder of a demo"),
    Case("an export over a project", a_project(".git/config"), "export {run} {outside}", "exists and is not an empty"),
    Case("a run in a project", a_project("x"), TRAIN.replace("{out}", "{outside}"), "holds a run with other settings"),
    Case(
        "a template that leaves",
        updated("dataset", INFO, data_path="../../{file_index}.parquet"),
        INSPECT,
        "the file name '../../0.parquet' leaves the dataset's folder",
        1,
    ),
    Case(
        "a template that leaves, train",
        updated("dataset", INFO, data_path="../../{file_index}.parquet"),
        TRAIN,
        "the file name '../../0.parquet' leaves the dataset's folder",
    ),
    *both(
        "a template with an absolute path",
        updated("dataset", INFO, video_path="/etc/{file_index}"),
        "the file name '/etc/0' leaves the dataset's folder",
    ),
    *both(
        "a template that reaches into objects",
        updated("dataset", INFO, data_path="data/{file_index.__class__}"),
        "meta/info.json: cannot read the path template",
    ),
    *both(
        "a template with an endless width",
        updated("dataset", INFO, data_path="data/{file_index:0999999999d}"),
        "meta/info.json: cannot read the path template",
    ),
    *both(
        "a camera named as a path out",
        renamed_feature(CAMERA, "../../../etc"),
        "meta/episodes/chunk-000/file-000.parquet lacks the column",
    ),
    Case(
        "a remote SDP text",
        in_memory(replaced("dataset", VIDEO, text("v=0\nm=video 5004 RTP/AVP 96\n")), "sdp"),
        "inspect memory://sdp",
        "Invalid data",
        1,
    ),
]

SECRETS = [
    Case(f"an option named {name}", nothing, options(**{name: CANARY}), f"'{name}' looks like a secret")
    for name in ("secret", "pw", "bearer", "jwt", "pem", "connection_string", "sas_token", "api_key", "client_secret")
] + [
    Case("a password in an option", nothing, options(endpoint_url=f"https://u:{CANARY}@host"), "looks like a secret"),
    Case(
        "a token in a base's address",
        nothing,
        f"{TRAIN.replace('{base}', 'https://' + CANARY + '@host/x')}",
        "--policy.path: its address holds a password, a token or a",
    ),
    Case(
        "a secret in --storage_path",
        nothing,
        f"{TRAIN} --storage_path=s3://AKIA:{CANARY}@bucket/x",
        "--storage_path: its address holds a password, a token or a",
    ),
    Case(
        "a secret in a config file",
        replaced("outside", "c.yaml", text(f'dataset:\n  root: ["s3://a:{CANARY}@b/x"]\n')),
        "train --policy.path={base} --config_path={outside}/c.yaml",
        "a dataset's URL holds a password, a token or a signature",
    ),
    Case(
        "a secret in a misspelt flag",
        nothing,
        f"train --dataset.rot=s3://a:{CANARY}@b/x",
        "unknown flag --dataset.rot; did you mean --dataset.root?",
    ),
    Case("a presigned Google address", nothing, f"inspect https://host/x?X-Goog-Signature={CANARY}", "or a signature"),
    Case("a bearer in a query", nothing, f"inspect https://host/x?bearer={CANARY}", "or a signature"),
]

ESCAPES = [
    *both(
        "a camera's name is an escape sequence",
        renamed_feature(CAMERA, f"observation.images.{ESCAPE}"),
        "lacks the column 'videos/observation.images.?]0;owned??[2J?",
    ),
    *both(
        "a feature's name is an escape sequence", renamed_feature("action", f"action{ESCAPE}"), "no feature 'action'"
    ),
    Case(
        "a sentence is an escape sequence",
        column(TASKS, "task", lambda rows: [f"{ESCAPE}{row}" for row in rows]),
        INSPECT,
        "?]0;owned??[2J?",
        0,
    ),
    *both(
        "a column's name is an escape sequence",
        of_type(DATA, ESCAPE, dictionary, "a"),
        "column '?]0;owned??[2J?' has the type dictionary",
    ),
    Case(
        "a robot's type is an escape sequence",
        updated("dataset", INFO, robot_type=ESCAPE),
        INSPECT,
        "?]0;owned??[2J?",
        0,
    ),
    Case(
        "metrics with escapes",
        replaced("run", "metrics.jsonl", text(json.dumps({"optimizer_step": 1, ESCAPE: 1, "loss": ESCAPE}))),
        REPORT,
        "line 1: 'loss': expected a whole number, found ?]0;owned??[2J?",
    ),
]

INFOS = [
    one
    for what, make, *says in (
        ("info.json is empty", replaced("dataset", INFO, text("")), "meta/info.json is not readable JSON"),
        (
            "info.json is a list",
            replaced("dataset", INFO, text("[]")),
            "meta/info.json: it is [], expected a JSON object, as LeRobot",
        ),
        (
            "info.json is a number",
            replaced("dataset", INFO, text("1e999")),
            "meta/info.json: it is inf, expected a JSON object, as LeRobot",
        ),
        (
            "info.json is no text",
            replaced("dataset", INFO, lambda path: path.write_bytes(b"\xff\xfe\x00{")),
            "meta/info.json is not readable JSON",
        ),
        (
            "no features",
            updated("dataset", INFO, features={}),
            "meta/info.json: 'features' is {}, expected an object of name",
        ),
        (
            "features that are a list",
            updated("dataset", INFO, features=[1]),
            "meta/info.json: 'features' is [1], expected an object of name",
        ),
        (
            "a feature that is a text",
            changed_json("dataset", INFO, lambda info, _: info["features"].update(action="float32")),
            "meta/info.json: feature 'action' lacks dtype or shape",
        ),
        (
            "a feature without a shape",
            changed_json("dataset", INFO, lambda info, _: info["features"]["action"].pop("shape")),
            "meta/info.json: feature 'action' lacks dtype or shape",
        ),
        ("a shape of -1", feature("action", shape=[-1]), "meta/info.json: feature 'action' has shape [-1], expected a"),
        ("a shape of 0", feature("action", shape=[0]), "meta/info.json: feature 'action' has shape [0], expected a"),
        ("a shape of text", feature("action", shape="7"), "meta/info.json: feature 'action' has shape '7', expected a"),
        ("a shape of 10^9", feature("action", shape=[10**9]), "VLATUNE_MAX_FEATURE_VALUES=1000000000"),
        ("a camera of two sides", feature(CAMERA, shape=[96, 96]), "has shape [96, 96], expected three sides"),
        ("a rate of 0", updated("dataset", INFO, fps=0), "meta/info.json: 'fps' is 0, expected frames per second, a"),
        (
            "a rate of NaN",
            updated("dataset", INFO, fps=float("nan")),
            "meta/info.json: 'fps' is nan, expected frames per second, a",
        ),
        (
            "no rate",
            changed_json("dataset", INFO, lambda info, _: info.pop("fps")),
            "meta/info.json: there is no 'fps', expected frames per",
        ),
        (
            "chunks of 0",
            updated("dataset", INFO, chunks_size=0),
            "meta/info.json: 'chunks_size' is 0, expected a whole number",
        ),
        (
            "a total of text",
            updated("dataset", INFO, total_episodes="7"),
            "meta/info.json: 'total_episodes' is '7', expected a whole",
        ),
    )
    for one in both(what, make, *says)
]

EPISODES_OF = [
    one
    for what, make, *says in (
        ("episodes without rows", rows(EPISODES, 0, 0), "it has no episodes"),
        (
            "an episode twice",
            column(EPISODES, "episode_index", lambda rows: [0, *rows[:-1]]),
            "lists episode 0 after episode 0, expected episode 1: missing",
        ),
        (
            "an episode of no frames",
            column(EPISODES, "length", lambda rows: [0, *rows[1:]]),
            "episode 0 has length 0, expected 1 or more",
        ),
        (
            "an episode of -1 frames",
            column(EPISODES, "length", lambda rows: [-1, *rows[1:]]),
            "episode 0 has length -1, expected 1 or more",
        ),
        (
            "an episode without a length",
            column(EPISODES, "length", lambda rows: [None, *rows[1:]]),
            "column 'length': 1 values are null",
        ),
        (
            "an episode that begins at -5",
            column(EPISODES, "dataset_from_index", lambda rows: [-5, *rows[1:]]),
            "episode 0 begins at row -5 and overlaps the episode before",
        ),
        (
            "an episode in chunk -1",
            column(EPISODES, "data/chunk_index", lambda rows: [-1, *rows[1:]]),
            "data/chunk--01/file-000.parquet",
        ),
        (
            "an episode in chunk 2^62",
            column(EPISODES, "data/chunk_index", lambda rows: [2**62, *rows[1:]]),
            "data/chunk-4611686018427387904/file-000.parquet",
        ),
        (
            "an episode at NaN seconds",
            column(EPISODES, f"videos/{CAMERA}/from_timestamp", lambda rows: [float("nan"), *rows[1:]]),
            "meta/episodes places it at nan s",
        ),
        (
            "an episode at 10^300 seconds",
            column(EPISODES, f"videos/{CAMERA}/from_timestamp", lambda rows: [1e300, *rows[1:]]),
            "meta/episodes places it at 1e+300 s",
        ),
        (
            "lengths of text",
            of_type(EPISODES, "length", texts, "12"),
            "its type is string, expected a whole number per episode",
        ),
        (
            "lengths in lists",
            of_type(EPISODES, "length", float_lists, [12.0]),
            "its type is list<element: float>, expected a whole number",
        ),
        ("no lengths", no_columns(EPISODES, "length"), "lacks the column 'length'"),
        (
            "episodes that overlap in their video",
            column(EPISODES, f"videos/{CAMERA}/from_timestamp", lambda rows: [0.0] * len(rows)),
            "episodes overlap inside a file",
            "episode 1 begins at 0.0000 s of its mp4 file, inside of episode 0",
        ),
        (
            "tasks without rows",
            rows(TASKS, 0, 0),
            "rows whose task_index has no sentence",
            "task_index 0 has no sentence",
        ),
        (
            "a sentence that is null",
            column(TASKS, "task", lambda rows: [None, *rows[1:]]),
            "meta/tasks.parquet: the sentence of task_index 0 is None",
        ),
        (
            "a task_index of -1",
            column(TASKS, "task_index", lambda rows: [-1, *rows[1:]]),
            "meta/tasks.parquet: task_index must count 0, 1, 2, ...",
        ),
        (
            "a task_index of 2^62",
            column(TASKS, "task_index", lambda rows: [2**62, *rows[1:]]),
            "task_index must count 0, 1, 2",
        ),
        (
            "sentences of numbers",
            of_type(TASKS, "task", float_lists, [1.0]),
            "meta/tasks.parquet: the sentence of task_index 0 is [1.0]",
        ),
        ("no sentences", no_columns(TASKS, "task"), "meta/tasks.parquet has columns ['task_index'], expected task"),
        (
            "rows of a task that is not there",
            column(DATA, "task_index", lambda rows: [99] * len(rows)),
            "task_index 99: 60 rows",
            "task_index 99 has no sentence",
        ),
        (
            "rows in another order",
            column(DATA, "frame_index", lambda rows: rows[::-1]),
            "rows that are not where meta/episodes places them",
            "row 0 is episode_index 0, frame_index 12",
        ),
        (
            "rows of another episode",
            column(DATA, "episode_index", lambda rows: [5] * len(rows)),
            "rows that are not where meta/episodes places them",
            "row 0 is episode_index 5",
        ),
        (
            "rows that are missing",
            rows(DATA, 0, 5),
            "5 rows, 60 needed",
            "has 5 rows, but meta/episodes places the episode at rows 0 to 14",
        ),
        (
            "actions of other widths",
            of_lists(DATA, "action", lambda rows: [rows[0][:-1], *rows[1:]]),
            "column 'action': its lists have different lengths",
        ),
        (
            "actions of another width",
            of_lists(DATA, "action", lambda rows: [row[:-1] for row in rows]),
            "has rows of 2 float32, expected 3 numbers",
            "column 'action' has rows of shape (2,)",
        ),
        (
            "actions of text",
            of_type(DATA, "action", texts, "x"),
            "'action' is string, not float32",
            "column 'action' has rows of shape ()",
        ),
        (
            "an action that is null",
            column(DATA, "action", lambda rows: [None, *rows[1:]]),
            "column 'action': 1 values are null",
        ),
        (
            "no actions",
            no_columns(DATA, "action"),
            "columns that meta/info.json names are missing",
            "lacks the column 'action'",
        ),
        (
            "a time of NaN",
            column(DATA, "timestamp", lambda rows: [float("nan"), *rows[1:]]),
            "rows whose timestamp is no finite number",
            "frame 0 has the timestamp nan s",
        ),
        (
            "statistics of text",
            stats(lambda all_: all_["action"].update(q01="x")),
            "meta/stats.json, action.q01: is 'x', expected numbers in",
        ),
        ("statistics that are a list", replaced("dataset", STATS, text("[1]")), "meta/stats.json: expected feature ->"),
        (
            "statistics of NaN",
            stats(lambda all_: all_["action"].update(q01=[float("nan")] * len(all_["action"]["q01"]))),
            "dims whose statistics are not finite numbers",
            "action dim 0 'velocity_x' has q01 = nan",
        ),
        (
            "statistics without end",
            stats(lambda all_: all_["action"].update(q99=[10**400] * len(all_["action"]["q99"]))),
            "meta/stats.json, action.q99: is",
        ),
    )
    for one in both(what, make, *says)
]

WARNED = [
    Case(
        "times of another rate",
        column(DATA, "timestamp", lambda rows: [2 * row for row in rows]),
        INSPECT,
        "rows whose timestamp is not frame_index / fps",
        0,
    ),
    Case(
        "another rate than the videos'",
        updated("dataset", INFO, fps=20),
        INSPECT,
        "is not that of the episode's frames",
        0,
    ),
    Case("an action that never changes", never_changes, INSPECT, "dims that never change", 0),
    Case(
        "a value far outside the statistics",
        column(DATA, "action", lambda rows: rows[3].__setitem__(0, 1e6)),
        INSPECT,
        "values more than 10 times the range outside q01 and q99",
        0,
    ),
    Case(
        "statistics upside down",
        stats(lambda all_: all_["action"].update(q01=all_["action"]["q99"], q99=all_["action"]["q01"])),
        INSPECT,
        "dims whose q01 lies above q99",
        0,
    ),
]

OLDER_MORE = [
    *older(
        "a line that is no JSON",
        line("meta/episodes.jsonl", lambda: "{\n"),
        "meta/episodes.jsonl, line 1 is not readable JSON (Expecting",
    ),
    *older(
        "a line that is a list",
        line("meta/episodes.jsonl", lambda: "[]\n"),
        "meta/episodes.jsonl, line 1 is not a JSON object",
    ),
    *older(
        "a line without a length",
        line("meta/episodes.jsonl", lambda: '{"episode_index": 0}\n'),
        "meta/episodes.jsonl, line 1: there is no 'length', expected a",
    ),
    *older(
        "a task of number",
        line("meta/tasks.jsonl", lambda: '{"task_index": 0, "task": 5}\n'),
        "meta/tasks.jsonl: the sentence of task_index 0 is 5, expected",
    ),
    *older(
        "statistics of lists of text",
        line("meta/episodes_stats.jsonl", lambda: '{"episode_index": 0, "stats": {"action": {"mean": ["x"]}}}\n'),
        "meta/episodes_stats.jsonl, line 1, feature 'action': expected",
    ),
    *older(
        "no episodes.jsonl",
        removed("older", "meta/episodes.jsonl"),
        "no meta/episodes.jsonl, which a v2.1 dataset must have",
    ),
]

MISTAKES = [
    one
    for what, make, *says in (
        (
            "a data file is a Git LFS pointer",
            replaced("dataset", DATA, text(LFS)),
            "is a Git LFS pointer: run `git lfs pull`",
            "is not readable parquet (its 74 bytes do not end with PAR1)",
        ),
        (
            "a video is a Git LFS pointer",
            replaced("dataset", VIDEO, text(LFS)),
            "is a Git LFS pointer: run `git lfs pull`",
            "cannot be opened as video",
        ),
        ("a data file that broke off", cut("dataset", DATA, 0.6), "do not end with PAR1"),
        ("a video that broke off", cut("dataset", VIDEO, 0.6), "it is cut off: its last frames are not there"),
        ("an empty data file", cut("dataset", DATA, 0), "its 0 bytes do not end with PAR1"),
        (
            "an empty video",
            cut("dataset", VIDEO, 0),
            "files that cannot be opened as video",
            "cannot be opened as video",
        ),
        (
            "a missing data file",
            removed("dataset", DATA),
            "1 of 2 .parquet files are missing",
            "data/chunk-000/file-000.parquet is missing",
        ),
        (
            "a missing video",
            removed("dataset", VIDEO),
            "1 of 6 .mp4 files are missing",
            "file-000.mp4 is missing, one of 1 missing files",
        ),
        ("no meta/episodes", removed("dataset", "meta/episodes"), "no meta/episodes/*/*.parquet"),
        ("no tasks.parquet", removed("dataset", TASKS), "no meta/tasks.parquet"),
        ("no info.json", removed("dataset", INFO), "no meta/info.json in it, so it is not a LeRobot dataset"),
        (
            "a folder named video",
            moved("dataset", "videos", "video"),
            "there is no folder videos/: rename video/ to videos/, or",
        ),
        (
            "a dataset of v2.0",
            updated("dataset", INFO, codebase_version="v2.0"),
            "convert it with LeRobot's conversion scripts",
        ),
        ("a dataset of v4.0", updated("dataset", INFO, codebase_version="v4.0"), "it is newer than this vlatune"),
        (
            "fewer episodes than promised",
            updated("dataset", INFO, total_episodes=9),
            "total_episodes is 9",
            "says total_episodes 9, but meta/ lists only 7",
        ),
        (
            "another size than the videos'",
            feature(CAMERA, shape=[48, 48, 3]),
            "file-000.mp4: 96x96",
            "its pictures are 96x96 (height x width), meta/info.json says 48x48",
        ),
        ("actions named actions", renamed_feature("action", "actions"), '--rename_map=\'{"actions": "action"}\''),
        (
            "a dtype that is not there",
            feature("action", dtype="int64"),
            "'action' is list<element: float>, not int64",
            "holds float32 of shape (3,), meta/info.json says int64",
        ),
    )
    for one in both(what, make, *says)
]

BASE_MORE = [
    Case(what, make, TRAIN, says)
    for what, make, says in (
        ("no config.json", removed("base", "config.json"), "no config.json in it; --policy.path must be a LeRobot"),
        (
            "config.json of another policy",
            updated("base", "config.json", type="smolvla"),
            "config.json says type 'smolvla', expected 'pi05'; set",
        ),
        ("config.json that broke off", cut("base", "config.json", 0.5), "config.json is not readable JSON"),
        (
            "config.json that is a list",
            replaced("base", "config.json", text("[]")),
            "config.json is not readable JSON (it holds a list, expected",
        ),
        ("no preprocessor", removed("base", PRE), "no policy_preprocessor.json in it; --policy.path must be a"),
        (
            "a preprocessor without steps",
            replaced("base", PRE, text('{"steps": 3}')),
            "policy_preprocessor.json has no list of steps; use a base",
        ),
        (
            "a step that is a text",
            changed_json("base", PRE, lambda content, _: content["steps"].append("x")),
            "policy_preprocessor.json, step 7: expected an object, found a",
        ),
        ("no tokenizer", removed("base", "tokenizer"), "put its folder into the policy's own"),
        (
            "a tokenizer that broke off",
            cut("base", "tokenizer/tokenizer.json", 0.5),
            "tokenizer.json is not readable JSON",
        ),
        (
            "a tokenizer of another class",
            updated(
                "base",
                "tokenizer/tokenizer_config.json",
                tokenizer_class="Evil",
                auto_map={"AutoTokenizer": "evil.Evil"},
            ),
            "tokenizer_config.json says tokenizer_class 'Evil', of which",
        ),
        (
            "a tokenizer whose model is a number",
            updated("base", "tokenizer/tokenizer.json", model=5),
            "cannot be used (Cannot instantiate Tokenizer from buffer",
        ),
        (
            "tokens without ids",
            updated("base", "tokenizer/tokenizer.json", added_tokens=[{"content": "x"}]),
            "tokenizer.json: added_tokens is not a list of tokens with",
        ),
        (
            "tokens that are a number",
            updated("base", "tokenizer/tokenizer.json", added_tokens=1),
            "tokenizer.json: added_tokens is not a list of tokens with",
        ),
        ("no weights", removed("base", "model.safetensors"), "model.safetensors is missing; fetch the base model anew"),
        ("weights that broke off", cut("base", "model.safetensors", 0.5), "model.safetensors is damaged"),
        (
            "weights that are a pickle",
            replaced("base", "model.safetensors", lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n")),
            "model.safetensors is damaged",
        ),
        (
            "weights whose header claims 2^62 bytes",
            replaced("base", "model.safetensors", lambda path: path.write_bytes(b"\0\0\0\0\0\0\0\x40{}")),
            "model.safetensors is damaged",
        ),
        (
            "a size without a depth",
            changed_json("base", "vlatune_size.json", lambda content, _: content.pop("depth")),
            "missing: ['depth']",
        ),
        (
            "a size of text",
            updated("base", "vlatune_size.json", depth="2"),
            "PI0.5's size: depth='2': must be an integer above 0",
        ),
        (
            "a depth of -1",
            updated("base", "vlatune_size.json", depth=-1),
            "PI0.5's size: depth=-1: must be an integer above 0",
        ),
        (
            "chunk_size of 0",
            updated("base", "config.json", chunk_size=0),
            "chunk_size is 0, expected a number: a whole one, from 1",
        ),
        (
            "chunk_size of NaN",
            updated("base", "config.json", chunk_size=float("nan")),
            "chunk_size is nan, expected a number",
        ),
    )
]

RUN_MORE = [
    Case(what, make, command, says, code)
    for what, make, command, code, says in (
        ("no run", nothing, "report {out}", 2, "not a run folder (none of config.json, metrics.jsonl"),
        (
            "no run, export",
            nothing,
            "export {out} {outside}/x",
            2,
            "is not a run folder: there is no config.json in it; RUN is",
        ),
        ("a run without checkpoints", removed("run", "checkpoints"), EXPORT, 2, "there is no checkpoint yet in"),
        (
            "a run without config.json",
            removed("run", "config.json"),
            EXPORT,
            2,
            "is not a run folder: there is no config.json in it; RUN is",
        ),
        (
            "a config.json that broke off",
            cut("run", "config.json", 0.5),
            RESUME,
            2,
            "config.json' is not readable JSON",
        ),
        (
            "a checkpoint without a manifest",
            removed("run", "checkpoints/00000002/manifest.json"),
            EXPORT,
            2,
            "manifest.json is not readable",
        ),
        (
            "a checkpoint without state.json",
            removed("run", "checkpoints/00000002/state.json"),
            RESUME,
            2,
            "state.json is missing",
        ),
        (
            "a checkpoint without policy/",
            removed("run", "checkpoints/00000002/policy"),
            EXPORT,
            2,
            "policy/config.json is missing",
        ),
        (
            "tensors that broke off",
            cut("run", "checkpoints/00000002/trainable.safetensors", 0.5),
            EXPORT,
            2,
            "has 5 bytes, the manifest says 10",
        ),
        (
            "tensors that are a pickle",
            resealed(
                replaced(
                    "run",
                    "checkpoints/00000002/trainable.safetensors",
                    lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n"),
                )
            ),
            EXPORT,
            2,
            "trainable.safetensors' is damaged",
        ),
        (
            "a manifest that names files outside",
            changed_json(
                "run",
                "checkpoints/00000002/manifest.json",
                lambda content, _: content["files"].update(
                    {"../../../outside/secret.json": {"bytes": 1, "sha256": "0"}}
                ),
            ),
            EXPORT,
            2,
            "names a file outside of its folder",
        ),
        (
            "a manifest of text sizes",
            changed_json(
                "run",
                "checkpoints/00000002/manifest.json",
                lambda content, _: content["files"]["state.json"].update(bytes="x"),
            ),
            EXPORT,
            2,
            "manifest.json is not readable",
        ),
        (
            "a state of another version",
            resealed(updated("run", "checkpoints/00000002/state.json", version=99)),
            RESUME,
            2,
            "state.json has not the expected fields (version); use the",
        ),
        (
            "a state with a negative step",
            resealed(updated("run", "checkpoints/00000002/state.json", optimizer_step=-1)),
            RESUME,
            2,
            "state.json: optimizer_step is -1, which no run writes",
        ),
        (
            "a state with settings of text",
            resealed(updated("run", "checkpoints/00000002/state.json", config="x")),
            EXPORT,
            2,
            "state.json: config is x, which no run writes; restore the",
        ),
        (
            "a state with a binding of text",
            resealed(updated("run", "checkpoints/00000002/state.json", binding="x")),
            EXPORT,
            2,
            "state.json: binding is x, which no run writes; restore the",
        ),
        (
            "a state with a hub's base",
            resealed(
                changed_json(
                    "run",
                    "checkpoints/00000002/state.json",
                    lambda content, _: content["config"]["policy"].update(path="/etc"),
                )
            ),
            EXPORT,
            2,
            "names places outside of its folder, and no command of yours has named them on this machine: --policy.path=/etc;",
        ),
        (
            "other settings",
            nothing,
            RESUME.replace("--batch_size=4", "--batch_size=2"),
            2,
            "holds a run with other settings: the global batch, batch_size",
        ),
        (
            "a summary that broke off",
            replaced("run", "summary.json", text('{"optimizer')),
            REPORT,
            2,
            "is not readable JSON",
        ),
        (
            "a summary that is a list",
            replaced("run", "summary.json", text("[]")),
            REPORT,
            2,
            "expected an object, found []",
        ),
        (
            "a summary of scripts",
            replaced(
                "run",
                "summary.json",
                text(json.dumps({"verdict": "<script>alert(1)</script>", "optimizer_steps": "x"})),
            ),
            REPORT,
            2,
            "'final_loss' is missing",
        ),
        (
            "settings with markup",
            replaced("run", "config.json", text('{"job_name": 5}')),
            REPORT,
            2,
            "'job_name': expected text, found 5",
        ),
    )
]

WORDS = [
    Case(what, nothing, command, says)
    for what, command, says in (
        ("a dataset that is not there", "inspect /no/such/folder", "there is no such folder"),
        ("a dataset that is not there, train", TRAIN.replace("{dataset}", "/no/such/folder"), "check --dataset.root"),
        (
            "a base that is not there",
            TRAIN.replace("{base}", "/no/such/base"),
            "--policy.path=/no/such/base: there is no such folder, and it",
        ),
        ("a misspelt flag", f"{TRAIN} --stepz=3", "unknown flag --stepz; did you mean --steps?"),
        ("a flag without a value", f"{TRAIN} --steps", "--steps: no value given; write --steps=VALUE"),
        ("steps of text", f"{TRAIN} --steps=many", "--steps=many: expected a whole number"),
        ("steps of -1", f"{TRAIN} --steps=-1", "--steps=-1: must be 1 or more"),
        ("steps of 10^30", f"{TRAIN} --steps=1{'0' * 30}", "--steps=1000000000000000000000000000000: must be"),
        (
            "a rate of NaN for learning",
            f"{TRAIN} --optimizer.lr=nan",
            "--optimizer.lr=nan: expected a number, as 0.5 or 1e-4",
        ),
        ("a batch of 0", f"{TRAIN} --batch_size=0", "--batch_size=0: must be 1 or more"),
        (
            "an episode that is not there",
            f"{TRAIN} --dataset.episodes=[99]",
            "there is no episode 99; it has 7 episodes, 0 to 6; correct",
        ),
        ("a recipe that is not there", f"{TRAIN} --recipe=none", "unknown recipe 'none' (there are tiny, pi05-heads"),
        ("a policy that is not there", f"{TRAIN} --policy.type=evil", "--policy.type=evil: must be one of pi05"),
        (
            "a rename_map that is no map",
            f"{TRAIN} --rename_map=[1]",
            '--rename_map=[1]: expected a mapping, as {"from": "to"}',
        ),
        (
            "a camera that is not there",
            f'{TRAIN} --rename_map={{"nope":"x"}}',
            "has no feature 'nope'; there are action, episode_index",
        ),
        (
            "a config that is not there",
            "train --config_path=/no/such.yaml",
            "--config_path=/no/such.yaml: No such file or directory",
        ),
        ("no command's operand", "inspect", "DATASET is missing; usage: vlatune inspect DATASET..."),
        ("an unknown command", "trian", "unknown command 'trian'; did you mean train?"),
        ("no dataset", "train --policy.path={base}", "no dataset: name one with --dataset.root=FOLDER (or"),
        (
            "a job's name as a path",
            TRAIN.replace("--output_dir={out}", "--job_name=../../x"),
            "--job_name=../../x: must be the name of a folder below runs/",
        ),
    )
]

CONFIGS = [
    Case(what, replaced("outside", "c.yaml", text(content)), "train --config_path={outside}/c.yaml", says)
    for what, content, says in (
        (
            "a config that makes objects",
            "!!python/object/apply:os.system ['touch x']",
            "the file must be a mapping of names to values",
        ),
        (
            "a config of aliases",
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{two}: &{two} [{','.join(['*' + one] * 9)}]\n"
                for one, two in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "unknown key a",
        ),
        ("a config nested deeply", "[" * 5000, "not a YAML or JSON file: maximum recursion depth exceeded"),
        ("a config that is a list", "[1, 2]", "the file must be a mapping of names to values"),
        ("a config with an unknown key", "stepz: 3", "unknown key stepz; did you mean steps?"),
        ("a config that is no YAML", "a: [\n", "not a YAML or JSON file"),
        ("a config with bytes", "\x00\x01", "not a YAML or JSON file: unacceptable character #x0000"),
    )
]

READS = [
    Case(f"{what}, read_lerobot", make, READ, says)
    for what, make, says in (
        (
            "NaN in a state",
            column(DATA, "observation.state", at(3, 0, float("nan"))),
            "frame 3: column 'observation.state'",
        ),
        ("NaN in an action", column(DATA, "action", at(30, 2, float("nan"))), "column 'action' has nan in dim 2"),
        ("infinity in an action", column(DATA, "action", at(0, 1, -float("inf"))), "has -inf in dim 1"),
        ("a data file is a link out", linked_out("dataset", DATA), "is a link that leads out of"),
        ("a data file is a FIFO", as_fifo("dataset", DATA), "is a FIFO, expected a file"),
        ("a video is a link out", linked_out("dataset", VIDEO), "is a link that leads out of"),
        ("a video is a FIFO", as_fifo("dataset", VIDEO), "is a FIFO, expected a file"),
        (
            "a video is an SDP text",
            replaced("dataset", VIDEO, text("v=0\nm=video 5004 RTP/AVP 96\n")),
            "cannot be decoded (Invalid",
        ),
        ("a video of 10 million frames", claiming_frames(10_000_000), "tells of frames: 10,000,000"),
        ("a video that broke off", cut("dataset", VIDEO, 0.6), "file-000.mp4"),
        ("a list of 5 million values", table(DATA, lambda: a_list_of(5_000_000)), "VLATUNE_MAX_PARQUET_ROW_VALUES="),
        ("a picture of 13,000 x 13,000", pictures(13_000), "a picture of 13000x13000 has pixels: 169,000,000"),
        (
            "times of another rate",
            column(DATA, "timestamp", lambda rows: [2 * row for row in rows]),
            "no frame within 0.0001 s",
        ),
        ("episodes without rows", rows(EPISODES, 0, 0), "it has no episodes"),
        (
            "a byte of a video, with checksums",
            damaged_after_checksums(VIDEO, one_byte),
            "its checksum in meta/checksums.json",
        ),
    )
]

ROWS = [
    *READS,
    *PICKLES,
    *PASSED_ON,
    *PLACES,
    *SECRETS,
    *ESCAPES,
    *INFOS,
    *EPISODES_OF,
    *WARNED,
    *OLDER_MORE,
    *MISTAKES,
    *BASE_MORE,
    *RUN_MORE,
    *WORDS,
    *CONFIGS,
]
