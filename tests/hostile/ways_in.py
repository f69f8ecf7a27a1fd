"""More rows of the table (cases.py): what the first rows show to `train` and `inspect`, through the other commands."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bombs import DATA, INFO, TASKS, VIDEO, a_list_of, a_sentence_of, column, table, understated
from payloads import Payload, pickled
from place import (
    CANARY,
    EXPORT,
    REPORT,
    TRAIN,
    Case,
    Make,
    Place,
    a_link_to,
    as_fifo,
    changed_json,
    linked_out,
    replaced,
    resealed,
    text,
    updated,
    with_step,
)
from rows import ESCAPE, in_memory, stats

EVAL, EVAL_TRUSTED = "eval {run}", "eval {run} --trust_run=true"
EXPORT_TRUSTED = f"{EXPORT} --trust_run=true"
JSON, BENCH, FEED = "inspect {dataset} --json=true", "bench reader --root={dataset}", "bench feed --root={dataset}"
CONFIG = "config.json"
PAYLOAD = {"class": "subprocess.Popen", "config": {"args": ["touch", "MARKER"]}}
OUTSIDE = "names places outside of its folder, and no command of yours has named them on this machine:"
SDP = "v=0\nm=video 5004 RTP/AVP 96\n"


def of_the_run(make: Make) -> Make:
    """A stranger's run whose dataset and base are those of the place, after `make`."""

    def put(place: Place) -> None:
        make(place)

        def change(config: dict[str, Any], place: Place) -> None:
            config["dataset"]["root"], config["policy"]["path"] = [str(place.dataset)], str(place.base)

        changed_json("run", CONFIG, change)(place)

    return put


def elsewhere(file: str, change: Callable[[dict[str, Any], Path], None]) -> Make:
    """The run's settings, or its checkpoint's, name the user's own folder."""
    return changed_json("run", file, lambda content, place: change(content, place.outside))


def unlisted(place: Place) -> None:
    """A data file that no episode is in; who reads all files of the folder reads it, too."""
    spare = DATA.replace("file-000", "file-777")
    (place.dataset / spare).write_bytes((place.dataset / DATA).read_bytes())
    pickled(spare, "note")(place)


def pickled_samples(place: Place) -> None:
    """An archive of arrays, one of which is a pickle."""
    import numpy as np

    packed = io.BytesIO()
    np.savez(packed, json=np.array([Payload(place.marker)], dtype=object))
    (place.run / "eval_samples.npz").write_bytes(packed.getvalue())


STRANGERS = [
    Case(
        "a run whose checkpoints lie elsewhere, eval",
        elsewhere(CONFIG, lambda config, outside: config.update(storage_path=str(outside))),
        EVAL,
        f"{OUTSIDE} --storage_path=",
    ),
    Case(
        "a run whose checkpoints lie elsewhere, export",
        elsewhere(CONFIG, lambda config, outside: config.update(storage_path=str(outside))),
        EXPORT,
        f"{OUTSIDE} --storage_path=",
    ),
    Case(
        "a run whose checkpoints lie at an address, export",
        updated("run", CONFIG, storage_path="s3://attacker/x"),
        EXPORT,
        f"{OUTSIDE} --storage_path=s3://attacker/x; look at them, and if you trust who made the run, add --trust_run=true",
    ),
    Case(
        "a run whose checkpoints lie at an address with a secret",
        updated("run", CONFIG, storage_path=f"s3://AKIA:{CANARY}@bucket/x"),
        EXPORT_TRUSTED,
        "--storage_path: URL holds a password",
    ),
    Case(
        "a run whose dataset lies elsewhere",
        elsewhere(CONFIG, lambda config, outside: config["dataset"].update(root=[str(outside)])),
        EVAL,
        f"{OUTSIDE} --dataset.root=",
    ),
    Case(
        "a run whose dataset is a hub's",
        changed_json("run", CONFIG, lambda config, _: config["dataset"].update(root=[], repo_id="attacker/x")),
        EVAL,
        f"{OUTSIDE} --dataset.repo_id=attacker/x",
    ),
    Case(
        "a run whose store is another server",
        changed_json(
            "run",
            CONFIG,
            lambda config, _: config["dataset"].update(storage_options='{"endpoint_url":"http://attacker"}'),
        ),
        EVAL,
        f"{OUTSIDE} --dataset.storage_options=",
    ),
    Case(
        "a run whose base is a hub's",
        changed_json("run", CONFIG, lambda config, _: config["policy"].update(path="attacker/x")),
        EVAL,
        f"{OUTSIDE} --policy.path=attacker/x",
    ),
    Case(
        "a checkpoint whose base is a hub's",
        resealed(
            changed_json(
                "run",
                "checkpoints/00000002/state.json",
                lambda content, _: content["config"]["policy"].update(path="attacker/x"),
            )
        ),
        EXPORT,
        f"{OUTSIDE} --policy.path=attacker/x",
    ),
    Case("places.json is a FIFO", as_fifo("run", "places.json"), EXPORT, f"{OUTSIDE} --policy.path="),
    Case("places.json is a link out", linked_out("run", "places.json"), EXPORT, f"{OUTSIDE} --policy.path="),
    Case(
        "places.json with a seal of somebody else",
        updated("run", "places.json", places=["/"], seal="0" * 64),
        EXPORT,
        f"{OUTSIDE} --policy.path=",
    ),
]

EVALS = [
    Case(
        "a pickle for a sentence, eval",
        of_the_run(pickled(TASKS, "task")),
        EVAL_TRUSTED,
        "meta/tasks.parquet: column 'task' has the extension type",
    ),
    Case(
        "a base that names a class, eval",
        of_the_run(with_step("base", "policy_preprocessor.json", PAYLOAD)),
        EVAL_TRUSTED,
        "names the class 'subprocess.Popen'",
    ),
    Case(
        "a dataset's info.json is a link out, eval", of_the_run(linked_out("dataset", INFO)), EVAL_TRUSTED, "leads out"
    ),
    Case(
        "a manifest without files, eval",
        updated("run", "checkpoints/00000002/manifest.json", files={}),
        EVAL,
        "names no files",
    ),
    Case(
        "tensors are a link out, eval",
        linked_out("run", "checkpoints/00000002/trainable.safetensors"),
        EVAL,
        "leads out",
    ),
    Case("tensors are a FIFO, eval", as_fifo("run", "checkpoints/00000002/trainable.safetensors"), EVAL, "is a FIFO"),
    Case("checkpoints is a link out, eval", linked_out("run", "checkpoints"), EVAL, "is a link"),
    Case("config.json is a FIFO, eval", as_fifo("run", CONFIG), EVAL, "is a FIFO, expected a file"),
    Case(
        "config.json is an endless device, eval", replaced("run", CONFIG, a_link_to("/dev/zero")), EVAL, "leads out of"
    ),
    Case("no run, eval", lambda _: None, "eval {out}", "is not a run folder"),
    Case("samples that are a pickle", pickled_samples, REPORT, "cannot be read (Object arrays cannot be loaded", 1),
    Case("samples are a link out", linked_out("run", "eval_samples.npz"), REPORT, "leads out of", 1),
]

EVAL_FOLDER = "eval {base} --dataset.root={dataset} --output_dir={out}"
FOLDERS = [
    Case(f"a policy's folder: {what}, eval", make, EVAL_FOLDER, says)
    for what, make, says in (
        ("config.json is a link out", linked_out("base", CONFIG), "leads out of"),
        ("config.json is a FIFO", as_fifo("base", CONFIG), "is a FIFO, expected a file"),
        ("config.json is an endless device", replaced("base", CONFIG, a_link_to("/dev/zero")), "leads out of"),
        ("config.json nested deeply", replaced("base", CONFIG, text("[" * 100_000)), "is not readable JSON"),
        ("a type that runs code", updated("base", CONFIG, type="os.system"), "its type 'os.system' is not known"),
        ("a type of escapes", updated("base", CONFIG, type=ESCAPE), "its type '?]0;owned?"),
        ("chunk_size of 10^9", updated("base", CONFIG, chunk_size=10**9), "chunk_size is 1000000000"),
        (
            "a step that names a class",
            with_step("base", "policy_preprocessor.json", PAYLOAD),
            "names the class 'subprocess.Popen'",
        ),
        ("the steps are a link out", linked_out("base", "policy_preprocessor.json"), "leads out of"),
        ("the weights are a link out", linked_out("base", "model.safetensors"), "leads out of"),
        ("the weights are a FIFO", as_fifo("base", "model.safetensors"), "is a FIFO, expected a file"),
        (
            "the weights are a pickle",
            replaced("base", "model.safetensors", lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n")),
            "model.safetensors is damaged",
        ),
    )
]
EVAL_OTHER = "eval {run} --trust_run=true --dataset.root={dataset} --output_dir={out}"
FOLDERS += [
    Case(
        "another dataset with a pickle for a sentence, eval",
        pickled(TASKS, "task"),
        EVAL_OTHER,
        "has the extension type",
    ),
    Case("another dataset's info.json is a link out, eval", linked_out("dataset", INFO), EVAL_OTHER, "leads out of"),
]

BENCHES = [
    Case("a pickle for a sentence, bench", pickled(TASKS, "task"), BENCH, "`vlatune inspect` finds errors in it"),
    Case(
        "a pickle for actions, bench", pickled(DATA, "action", deep=True), FEED, "`vlatune inspect` finds errors in it"
    ),
    Case(
        "a pickle in a file that nobody lists, bench",
        unlisted,
        BENCH,
        "data/chunk-000/file-777.parquet: column 'note' has the extension type",
    ),
    Case("a video is an SDP text, bench", replaced("dataset", VIDEO, text(SDP)), BENCH, "finds errors in it"),
    Case("a video is a FIFO, bench", as_fifo("dataset", VIDEO), "bench train --root={dataset}", "finds errors in it"),
    Case("a data file is a link out, bench", linked_out("dataset", DATA), BENCH, "finds errors in it"),
]

JSONS = [
    Case(
        "a sentence is an escape sequence, --json",
        column(TASKS, "task", lambda rows: [f"{ESCAPE}{row}" for row in rows]),
        JSON,
        r"\u001b]0;owned\u0007\u001b[2J\u202e",
        0,
    ),
    Case("a pickle for a sentence, --json", pickled(TASKS, "task"), JSON, "has the extension type", 1),
    Case("info.json is a link out, --json", linked_out("dataset", INFO), JSON, "leads out of", 1),
    Case(
        "statistics of NaN, --json",
        stats(lambda all_: all_["action"].update(q01=[float("nan")] * len(all_["action"]["q01"]))),
        JSON,
        "dims whose statistics are not finite numbers",
        1,
    ),
    Case(
        "a secret in an address, --json",
        lambda _: None,
        f"inspect s3://AKIA:{CANARY}@b/x --json=true",
        "holds a password",
    ),
]

WRITES = [
    Case(
        "a dataset over a project",
        replaced("outside", "notes", text("x")),
        "make-dataset {outside}",
        "exists and is not empty",
    ),
    Case(
        "a dataset through a link",
        lambda place: (place.folder / "out-link").symlink_to(place.outside),
        "make-dataset {outside}/../out-link",
        "exists and is not empty",
    ),
    Case(
        "a dataset with a name of escapes",
        lambda _: None,
        f"make-dataset {{outside}}/{ESCAPE} --episodes=0",
        "--episodes=0",
    ),
    Case(
        "an export through a link",
        lambda place: (place.folder / "l").symlink_to(place.outside),
        "export {run} {outside}/../l",
        "is not an empty",
    ),
]


def augmented(kind: str, settings: str) -> Make:
    """A config that trains on the place's dataset, with one kind of augmentation."""
    transforms = f"{{enable: true, tfs: {{x: {{type: {kind}, kwargs: {settings}}}}}}}"

    def make(place: Place) -> None:
        data = f"dataset: {{root: [{place.dataset}], image_transforms: {transforms}}}"
        run = f"batch_size: 4\noutput_dir: {place.folder / 'out'}\n"
        (place.outside / "c.yaml").write_text(f"{data}\npolicy: {{path: {place.base}}}\n{run}")

    return make


CONFIG_PATHS = [
    Case(what, make, "train --config_path={outside}/c.yaml", says)
    for what, make, says in (
        ("a config that is an endless device", replaced("outside", "c.yaml", a_link_to("/dev/zero")), "c.yaml"),
        ("a config that is a folder", replaced("outside", "c.yaml", Path.mkdir), "c.yaml"),
        (
            "a config that is somebody's secrets",
            replaced("outside", "c.yaml", text(f"token: {CANARY}\n")),
            "unknown key token",
        ),
        (
            "a config with a secret for a number",
            replaced("outside", "c.yaml", text(f"steps: s3://a:{CANARY}@b\n")),
            "expected a whole number",
        ),
        (
            "an augmentation that names code",
            augmented("os.system", "{command: [1]}"),
            "'x' has the type 'os.system', which is not among those",
        ),
        (
            "an augmentation with a setting that is not its own",
            augmented("ColorJitter", "{__class__: [1]}"),
            "__class__",
        ),
        (
            "an augmentation without an end",
            augmented("RandomAffine", "{degrees: [-1.0e+400, 1.0e+400]}"),
            "expected a number",
        ),
        ("a config of 17 MB", replaced("outside", "c.yaml", text("a" * (17 << 20))), "16,777,216"),
        (
            "a config with escapes",
            replaced("outside", "c.yaml", lambda path: path.write_text('"\\x1b]0;owned\\x07": 1\n')),
            "unknown key ?]0;owned?",
        ),
    )
]

PASSED_ON = [
    Case(
        "a tokenizer that brings code",
        updated("base", "tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenizer_evil.Evil", None]}),
        TRAIN,
        "tokenizer_config.json names code of its own (auto_map)",
    ),
]

REMOTE = [
    Case(
        "a list of 5 million values that a remote footer hides",
        in_memory(understated(table(DATA, lambda: a_list_of(5_000_000)), DATA, "action", "num_values"), "hidden-list"),
        TRAIN.replace("{dataset}", "memory://hidden-list"),
        "its pages hold 5,000,000 values",
    ),
    Case(
        "a sentence of 100 MB that a remote footer hides",
        in_memory(
            understated(table(TASKS, lambda: a_sentence_of(100 << 20)), TASKS, "task", "total_uncompressed_size"),
            "hidden-sentence",
        ),
        "inspect memory://hidden-sentence",
        "bytes or more, its footer tells of",
        1,
    ),
    Case(
        "a remote list of 5 million values",
        in_memory(table(DATA, lambda: a_list_of(5_000_000)), "open-list"),
        TRAIN.replace("{dataset}", "memory://open-list"),
        "VLATUNE_MAX_PARQUET_ROW_VALUES=",
    ),
    Case(
        "a remote pickle for a sentence",
        in_memory(pickled(TASKS, "task"), "pickled"),
        "inspect memory://pickled",
        "meta/tasks.parquet: column 'task' has the extension type",
        1,
    ),
    Case(
        "a remote video is a playlist",
        in_memory(replaced("dataset", VIDEO, text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n")), "playlist"),
        TRAIN.replace("{dataset}", "memory://playlist"),
        "cannot be opened as video",
    ),
]


def as_lerobot(**values: Any) -> Make:
    """A train_config.json with little in it but these; dots in a name are levels."""

    def put(path: Path) -> None:
        content: dict[str, Any] = {"dataset": {"repo_id": "a/b"}, "policy": {"type": "pi05"}}
        for name, value in values.items():
            here, names = content, name.split("__")
            for part in names[:-1]:
                here = here.setdefault(part, {})
            here[names[-1]] = value
        path.write_text(json.dumps(content))

    return replaced("outside", "t.json", put)


def written(content: str) -> Make:
    return replaced("outside", "t.json", text(content))


FROM_LEROBOT = [
    Case(f"LeRobot's {what}", make, "train --from_lerobot={outside}/t.json", says)
    for what, make, says in (
        ("settings that are a FIFO", as_fifo("outside", "t.json"), "is a FIFO, expected a file"),
        ("settings that are an endless device", replaced("outside", "t.json", a_link_to("/dev/zero")), "leads out of"),
        ("settings that are a folder", replaced("outside", "t.json", Path.mkdir), "is a folder, expected a file"),
        ("settings of 17 MB", written(" " * (17 << 20)), "16,777,216"),
        ("settings nested deeply", written("[" * 100_000), "is not readable JSON"),
        ("settings nested", written('{"dataset":' * 100 + "1" + "}" * 100), "nested to a depth of 65"),
        ("settings that are a list", written("[]"), "there is no 'dataset' in it"),
        (
            "a dataset that is a text",
            written('{"dataset": "x", "policy": {"type": "pi05"}}'),
            "dataset: LeRobot has no",
        ),
        ("a policy that runs code", as_lerobot(policy__type="os.system"), "policy.type=os.system: there are"),
        ("a policy that is a list", as_lerobot(policy__type=["pi05"]), "policy.type"),
        ("a policy of escapes", as_lerobot(policy__type=ESCAPE), "policy.type=?]0;owned?"),
        ("a field of escapes", as_lerobot(**{ESCAPE: 1}), "?]0;owned?"),
        ("half a letter", as_lerobot(**{"\ud800": "\ud800"}), "LeRobot has no such field"),
        ("200,000 fields", written(json.dumps({"dataset": 1, **{f"f{n}": 1 for n in range(200_000)}})), "and 199,9"),
        ("a field of a million parts", as_lerobot(**{"a." * 1_000_000: 1}), "LeRobot has no such field"),
        ("steps without end", as_lerobot(steps=10**400), "must be 1000000000000000 or less"),
        ("a seed that is an object", as_lerobot(seed={"a": {"b": 1}}), "seed.a.b: LeRobot has no such field"),
        ("a rate that is no number", as_lerobot(policy__optimizer_lr="nan"), "lr"),
        ("a base of a long name", as_lerobot(policy__path="a" * 100_000), "its config.json cannot be read"),
        ("a base in nobody's home", as_lerobot(policy__path="~nobody-at-all/x"), "its config.json cannot be read"),
        ("a rename_map that is a list", as_lerobot(rename_map=[1]), "rename_map"),
        (
            "a root with a secret",
            as_lerobot(dataset__root=f"s3://AKIA:{CANARY}@b/x", policy__path="x"),
            "holds a password",
        ),
    )
]

WAYS_IN = [*STRANGERS, *EVALS, *FOLDERS, *BENCHES, *JSONS, *WRITES, *CONFIG_PATHS, *PASSED_ON, *REMOTE, *FROM_LEROBOT]
