"""The table of hostile and broken files: what is wrong, the command, what it must say and its exit code.

A row is run by test_hostile.py, or by test_hostile_read.py where its command is `read_lerobot`. docs/hostile_inputs.md
is printed from it.
"""

from dataclasses import replace
from pathlib import Path

from bombs import (
    EPISODES,
    a_list_of,
    a_sentence_of,
    at,
    claiming_frames,
    column,
    damaged_after_checksums,
    json_text,
    line,
    normalisers,
    one_byte,
    rows_of,
    stats_of,
    swapped_lines,
    table,
    understated,
    updated_camera,
)
from place import (
    CANARY,
    COMPARE,
    DOCTOR,
    EXPORT,
    INSPECT,
    REPORT,
    RESUME,
    TRAIN,
    Case,
    a_link_to,
    a_socket,
    as_fifo,
    beside_another,
    linked_out,
    nothing,
    replaced,
    resealed,
    text,
    updated,
    with_step,
)
from rows import ROWS
from ways_in import WAYS_IN

INFO, TASKS, STATS = "meta/info.json", "meta/tasks.parquet", "meta/stats.json"
DATA, VIDEO = "data/chunk-000/file-000.parquet", "videos/observation.images.top/chunk-000/file-000.mp4"
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
MANIFEST, STATE = "checkpoints/00000002/manifest.json", "checkpoints/00000002/state.json"
NAN, INF = float("nan"), float("inf")
OUT, LOOP, SPECIAL = "is a link that leads out of", "is a link that leads back to itself", "is a FIFO, expected a file"
PAYLOAD = {"class": "subprocess.Popen", "config": {"args": ["touch", "MARKER"]}}
SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 0.0.0.0\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n"
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"

DATASETS = [
    Case("info.json is a link out", linked_out("dataset", INFO), INSPECT, OUT, 1),
    Case("info.json is a link out, train", linked_out("dataset", INFO), TRAIN, OUT),
    Case("info.json is a FIFO", as_fifo("dataset", INFO), INSPECT, SPECIAL, 1),
    Case("info.json is a FIFO, train", as_fifo("dataset", INFO), TRAIN, SPECIAL),
    Case("info.json is an endless device", replaced("dataset", INFO, a_link_to("/dev/zero")), INSPECT, OUT, 1),
    Case("info.json is a socket", replaced("dataset", INFO, a_socket), TRAIN, "is a socket, expected a file"),
    Case("info.json is a folder", replaced("dataset", INFO, Path.mkdir), TRAIN, "is a folder, expected a file"),
    Case("info.json is too large", replaced("dataset", INFO, text(" " * (17 << 20))), TRAIN, "16,777,216 bytes"),
    Case("stats.json is a link out", linked_out("dataset", STATS), TRAIN, OUT),
    Case("stats.json is a FIFO", as_fifo("dataset", STATS), TRAIN, SPECIAL),
    Case("tasks.parquet is a link out", linked_out("dataset", TASKS), TRAIN, OUT),
    Case("tasks.parquet is a FIFO", as_fifo("dataset", TASKS), INSPECT, SPECIAL, 1),
    Case("a data file is a link out", linked_out("dataset", DATA), TRAIN, OUT),
    Case("a data file is a FIFO", as_fifo("dataset", DATA), TRAIN, SPECIAL),
    Case("a data file is a link to itself", replaced("dataset", DATA, a_link_to("file-000.parquet")), TRAIN, "missing"),
    Case("the data folder is a link out", linked_out("dataset", "data"), TRAIN, OUT),
    Case("a video is a link out", linked_out("dataset", VIDEO), TRAIN, OUT),
    Case("a video is a link out, inspect", linked_out("dataset", VIDEO), INSPECT, OUT, 1),
    Case("a video is a FIFO", as_fifo("dataset", VIDEO), TRAIN, SPECIAL),
    Case("a video is a FIFO, inspect", as_fifo("dataset", VIDEO), INSPECT, SPECIAL, 1),
    Case("a video is an SDP text", replaced("dataset", VIDEO, text(SDP)), INSPECT, "Invalid data", 1),
    Case("a video is an SDP text, train", replaced("dataset", VIDEO, text(SDP)), TRAIN, "cannot be opened as video"),
    Case("a video is a playlist", replaced("dataset", VIDEO, text(PLAYLIST)), INSPECT, "Invalid data", 1),
    Case("fps is an escape sequence", updated("dataset", INFO, fps=ESCAPE), TRAIN, "'fps' is"),
    Case(
        "the version is an escape sequence",
        updated("dataset", INFO, codebase_version=ESCAPE),
        TRAIN,
        "codebase_version",
    ),
    Case("a template is an escape sequence", updated("dataset", INFO, data_path=f"data/{ESCAPE}"), TRAIN, "data"),
]

OLDER = [
    Case(f"{file} is {what}", make("older", f"meta/{file}"), command, says, code)
    for file in ("episodes.jsonl", "tasks.jsonl")
    for what, make, says in (("a link out", linked_out, OUT), ("a FIFO", as_fifo, SPECIAL))
    for command, code in ((TRAIN.replace("{dataset}", "{older}"), 2),)
]

BASES = [
    Case("the size is a FIFO", as_fifo("base", "vlatune_size.json"), TRAIN, SPECIAL),
    Case("the size is a link out", linked_out("base", "vlatune_size.json"), TRAIN, OUT),
    Case("the index of the weights is a FIFO", as_fifo("base", "model.safetensors.index.json"), TRAIN, SPECIAL),
    Case("the tokenizer's config is a FIFO", as_fifo("base", "tokenizer/tokenizer_config.json"), TRAIN, SPECIAL),
    Case("config.json is a link out", linked_out("base", "config.json"), TRAIN, OUT),
    Case("config.json is a FIFO", as_fifo("base", "config.json"), TRAIN, SPECIAL),
    Case(
        "config.json has an object for a number",
        updated("base", "config.json", chunk_size={}),
        TRAIN,
        "expected a number",
    ),
    Case("the weights are a link out", linked_out("base", "model.safetensors"), TRAIN, OUT),
    Case("the weights are a FIFO", as_fifo("base", "model.safetensors"), TRAIN, SPECIAL),
    Case("the tokenizer is a link out", linked_out("base", "tokenizer/tokenizer.json"), TRAIN, OUT),
    Case("the tokenizer is a FIFO", as_fifo("base", "tokenizer/tokenizer.json"), TRAIN, SPECIAL),
    Case("the tokenizer's folder is a link out", linked_out("base", "tokenizer"), TRAIN, OUT),
    Case("the preprocessor is a FIFO", as_fifo("base", PRE), TRAIN, SPECIAL),
    Case(
        "the preprocessor names a class", with_step("base", PRE, PAYLOAD), TRAIN, "names the class 'subprocess.Popen'"
    ),
    Case(
        "the postprocessor names a class", with_step("base", POST, PAYLOAD), TRAIN, "names the class 'subprocess.Popen'"
    ),
    Case(
        "a class beside a known name",
        with_step("base", PRE, {"registry_name": "to_batch_processor", **PAYLOAD}),
        TRAIN,
        "names the class 'subprocess.Popen'",
    ),
    Case("a step that is not listed", with_step("base", PRE, {"registry_name": "evil"}), TRAIN, "'evil' is not known"),
    Case(
        "a tokenizer that runs code",
        with_step("base", PRE, {"registry_name": "tokenizer_processor", "config": {"trust_remote_code": True}}),
        TRAIN,
        "'trust_remote_code' is not known",
    ),
    Case(
        "a step's tensors lie elsewhere",
        with_step("base", PRE, {"registry_name": "normalizer_processor", "state_file": "../../x.safetensors"}),
        TRAIN,
        "is not a name that LeRobot gives",
    ),
]

RUNS = [
    Case("summary.json is a FIFO, report", as_fifo("run", "summary.json"), REPORT, SPECIAL),
    Case("summary.json is a FIFO, train", as_fifo("run", "summary.json"), RESUME, SPECIAL),
    Case("config.json is a FIFO", as_fifo("run", "config.json"), REPORT, SPECIAL),
    Case("config.json is a link out", linked_out("run", "config.json"), EXPORT, OUT),
    Case("eval.json is a link out", linked_out("run", "eval.json"), REPORT, OUT),
    Case("eval.json is a FIFO", as_fifo("run", "eval.json"), REPORT, SPECIAL),
    Case("metrics.jsonl is a FIFO", as_fifo("run", "metrics.jsonl"), REPORT, SPECIAL),
    Case("eval_samples.npz is a FIFO", as_fifo("run", "eval_samples.npz"), REPORT, SPECIAL, 1),
    Case(".lock is a link out", linked_out("run", ".lock"), RESUME, OUT),
    Case(".writer.lock is a link out", linked_out("run", ".writer.lock"), RESUME, OUT),
    Case("logs is a link out", linked_out("run", "logs"), RESUME, OUT),
    Case("logs/traceback.txt is a link out", linked_out("run", "logs/traceback.txt"), RESUME, OUT),
    Case("checkpoints is a link out", linked_out("run", "checkpoints"), RESUME, "is a link"),
    Case("checkpoints is a link out, export", linked_out("run", "checkpoints"), EXPORT, "is a link"),
]

EXPORTS = [
    Case("tensors are a link out", linked_out("run", "checkpoints/00000002/trainable.safetensors"), EXPORT, OUT),
    Case("tensors are a FIFO", as_fifo("run", "checkpoints/00000002/trainable.safetensors"), EXPORT, SPECIAL),
    Case(
        "tensors are a link out, resume", linked_out("run", "checkpoints/00000002/trainable.safetensors"), RESUME, OUT
    ),
    Case("the manifest is a FIFO", as_fifo("run", "checkpoints/00000002/manifest.json"), EXPORT, SPECIAL),
    Case("the manifest is a FIFO, resume", as_fifo("run", "checkpoints/00000002/manifest.json"), RESUME, SPECIAL),
    Case("state.json is a link out", resealed(linked_out("run", "checkpoints/00000002/state.json")), RESUME, OUT),
    Case("a link out in policy/", linked_out("run", "checkpoints/00000002/policy/more.json"), EXPORT, "damaged"),
    Case(
        "a link out in policy/, with a new manifest",
        resealed(linked_out("run", "checkpoints/00000002/policy/policy_preprocessor.json")),
        EXPORT,
        OUT,
    ),
    Case("policy/config.json is a FIFO", as_fifo("run", "checkpoints/00000002/policy/config.json"), EXPORT, "FIFO"),
    Case(
        "a manifest without files",
        updated("run", "checkpoints/00000002/manifest.json", files={}),
        EXPORT,
        "names no files",
    ),
    Case(
        "a file that the manifest does not name",
        replaced("run", "checkpoints/00000002/ema.safetensors", text("x")),
        EXPORT,
        "ema.safetensors is not in manifest.json",
    ),
    Case(
        "a checkpoint that names a class",
        resealed(with_step("run", f"checkpoints/00000002/policy/{PRE}", PAYLOAD)),
        EXPORT,
        "names the class 'subprocess.Popen'",
    ),
    Case(
        "a checkpoint whose config has an object for a number",
        resealed(updated("run", "checkpoints/00000002/policy/config.json", chunk_size={"a": 1})),
        EXPORT,
        "expected a number",
    ),
]

FLAGS = [
    Case("an S3 secret with a slash", nothing, "inspect s3://AKIA:can/ary-4f1d-must@bucket/x", "holds a password"),
    Case("a token in an address", nothing, f"inspect https://{CANARY}@host/x", "holds a password, a token"),
    Case("a presigned address", nothing, f"inspect https://host/x?X-Amz-Signature={CANARY}", "or a signature"),
    Case("an address with SAS", nothing, f"inspect abfs://c@host/x?sv=1&sig={CANARY}", "or a signature"),
    Case("a name with escapes", nothing, f"inspect /no/{ESCAPE}", "there is no such folder"),
    Case("a command with escapes", nothing, f"{ESCAPE} x", "unknown command"),
    Case(
        "a config file that is a FIFO",
        as_fifo("outside", "config.yaml"),
        "train --config_path={outside}/config.yaml",
        "is a FIFO",
    ),
]

NUMBERS = [
    Case("NaN in an action", column(DATA, "action", at(30, 2, NAN)), INSPECT, "not finite numbers", 1),
    Case("NaN in an action, train", column(DATA, "action", at(30, 2, NAN)), TRAIN, "episode 2, frame"),
    Case("NaN in a state", column(DATA, "observation.state", at(3, 0, NAN)), INSPECT, "episode 0, frame 3", 1),
    Case(
        "NaN in a state, train",
        column(DATA, "observation.state", at(3, 0, NAN)),
        TRAIN,
        "frame 3: column 'observation.state'",
    ),
    Case("infinity in an action", column(DATA, "action", at(0, 1, INF)), INSPECT, "episode 0, frame 0", 1),
    Case("infinity in an action, train", column(DATA, "action", at(0, 1, -INF)), TRAIN, "has -inf in dim 1"),
    Case("statistics of width 1", stats_of(1), INSPECT, "statistics of another width", 1),
    Case("statistics of width 1, train", stats_of(1), TRAIN, "has 1 values of q01, expected"),
    Case("statistics of width 5, train", stats_of(5), TRAIN, "has 5 values of q01, expected"),
    Case("statistics of width 0", stats_of(0), INSPECT, "statistics of another width", 1),
    Case("statistics of width 0, train", stats_of(0), TRAIN, "has 0 values of q01, expected"),
    Case("a task_index twice", column(TASKS, "task_index", lambda rows: [0, *rows[:-1]]), INSPECT, "is there twice", 1),
    Case(
        "a task_index twice, train", column(TASKS, "task_index", lambda rows: [0, *rows[:-1]]), TRAIN, "is there twice"
    ),
    Case(
        "a task_index twice, v2.1",
        line("meta/tasks.jsonl", lambda: '{"task_index": 0, "task": "a"}\n' * 2),
        "inspect {older}",
        "is there twice",
        1,
    ),
    Case(
        "sentences that changed places",
        column(TASKS, "task_index", lambda rows: rows[::-1]),
        INSPECT,
        "rows with another sentence than meta/episodes names",
        1,
    ),
    Case(
        "sentences that changed places, train",
        column(TASKS, "task_index", lambda rows: rows[::-1]),
        TRAIN,
        "and meta/episodes says",
    ),
    Case(
        "sentences that changed places, v2.1",
        swapped_lines("meta/tasks.jsonl", "task_index"),
        TRAIN.replace("{dataset}", "{older}"),
        "and meta/episodes says",
    ),
]

BOMBS = [
    Case(
        "a list of 101 million values",
        table(DATA, lambda: a_list_of(101_000_000)),
        TRAIN,
        "VLATUNE_MAX_PARQUET_VALUES=",
    ),
    Case(
        "a list of 5 million values",
        table(DATA, lambda: a_list_of(5_000_000)),
        TRAIN,
        "VLATUNE_MAX_PARQUET_ROW_VALUES=",
    ),
    Case("a file of 21 million rows", table(DATA, lambda: rows_of(21_000_000)), TRAIN, "VLATUNE_MAX_PARQUET_ROWS="),
    Case(
        "a file of 21 million rows, inspect",
        table(DATA, lambda: rows_of(21_000_000)),
        INSPECT,
        "it has rows: 21,000,000",
        1,
    ),
    Case(
        "a sentence of 100 MB",
        table(TASKS, lambda: a_sentence_of(100 << 20)),
        INSPECT,
        "VLATUNE_MAX_PARQUET_UNPACKED_BYTES=",
        1,
    ),
    Case(
        "a list of 5 million values that the footer hides",
        understated(table(DATA, lambda: a_list_of(5_000_000)), DATA, "action", "num_values"),
        TRAIN,
        "its pages hold 5,000,000 values",
    ),
    Case(
        "a sentence of 100 MB that the footer hides",
        understated(table(TASKS, lambda: a_sentence_of(100 << 20)), TASKS, "task", "total_uncompressed_size"),
        INSPECT,
        "bytes or more, its footer tells of",
        1,
    ),
    Case("a sentence of 1 MB", table(TASKS, lambda: a_sentence_of(1 << 20)), TRAIN, "VLATUNE_MAX_TEXT_CHARS=1048576"),
    Case(
        "an episode of 10^9 frames",
        column(EPISODES, "length", lambda rows: [10**9, *rows[1:]]),
        TRAIN,
        "EPISODE_FRAMES=",
    ),
    Case(
        "an episode of 2^62 frames", column(EPISODES, "length", lambda rows: [2**62] * len(rows)), INSPECT, "frames:", 1
    ),
    Case("info.json nested deeply", json_text("dataset", INFO, "[" * 100_000), INSPECT, "not readable JSON", 1),
    Case("info.json nested", json_text("dataset", INFO, "[" * 100 + "]" * 100), TRAIN, "nested to a depth of 65"),
    Case(
        "info.json of 8 million values",
        json_text("dataset", INFO, "[" + "," * 8_200_000),
        TRAIN,
        "VLATUNE_MAX_JSON_VALUES=",
    ),
    Case("a rate of 10^400", updated("dataset", INFO, fps=10**400), TRAIN, "expected frames per second"),
    Case(
        "a line of 40 MB",
        line("meta/episodes.jsonl", lambda: "x" * (40 << 20)),
        "inspect {older}",
        "VLATUNE_MAX_LINE_BYTES=",
        1,
    ),
    Case("a video of 10 million frames", claiming_frames(10_000_000), TRAIN, "tells of frames: 10,000,000"),
    Case(
        "a video of 10 million frames, inspect", claiming_frames(10_000_000), INSPECT, "tells of frames: 10,000,000", 1
    ),
    Case("a video of more frames than bytes", claiming_frames(4_000_000), TRAIN, "tells of 4,000,000 frames"),
    Case("a camera of 10^6 pixels on a side", updated_camera([10**6, 10**6, 3]), TRAIN, "VLATUNE_MAX_PICTURE_SIDE="),
    Case("a depth of 10^6", updated("base", "vlatune_size.json", depth=10**6), TRAIN, "VLATUNE_MAX_MODEL_DEPTH="),
    Case(
        "a vocabulary of 10^12",
        updated("base", "vlatune_size.json", vocab_size=10**12),
        TRAIN,
        "VLATUNE_MAX_MODEL_WIDTH=",
    ),
    Case("chunk_size of 10^9", updated("base", "config.json", chunk_size=10**9), TRAIN, "chunk_size is 1000000000"),
    Case(
        "an endless image_resolution",
        updated("base", "config.json", image_resolution=[10**9, 8]),
        TRAIN,
        "height and width",
    ),
    Case(
        "a number without end", updated("base", "config.json", time_sampling_scale=10**400), TRAIN, "expected a number"
    ),
    Case("forty normalisers", normalisers(40), TRAIN, "VLATUNE_MAX_TOKENIZER_GROWTH="),
    Case("a normaliser that writes 1 MB", normalisers(1, "a" * (1 << 20)), TRAIN, "VLATUNE_MAX_TOKENIZER_GROWTH="),
    Case("a hundred normalisers", normalisers(100, "a"), TRAIN, "VLATUNE_MAX_TOKENIZER_STEPS="),
]

CHECKSUMS = [
    Case(
        f"{what}, with checksums",
        damaged_after_checksums(file, change),
        command,
        "its checksum in meta/checksums.json",
        code,
    )
    for what, file, change in (
        ("a byte of a data file", DATA, one_byte),
        ("a byte of a video", VIDEO, one_byte),
        ("a sentence", TASKS, one_byte),
        ("a new info.json", INFO, lambda path: path.write_text(path.read_text() + " ")),
    )
    for command, code in ((INSPECT, 1), (TRAIN, 2))
]

RECORDS = [
    Case(f"{what}", replaced("run", file, text(content)), REPORT, says, code)
    for what, file, content, says, code in (
        ("metrics of text", "metrics.jsonl", '{"optimizer_step": 1, "loss": "x"}\n', "'loss': expected", 2),
        ("metrics of lists", "metrics.jsonl", '{"optimizer_step": 1, "loss": [1]}\n', "'loss': expected", 2),
        ("a record without a step", "metrics.jsonl", '{"loss": 1}\n', "no record with an optimizer_step", 1),
        ("a record that is a list", "metrics.jsonl", "[1]\n", "no record with an optimizer_step", 1),
        ("metrics nested deeply", "metrics.jsonl", "[" * 100_000 + "\n", "line 1 is not JSON", 1),
        ("an evaluation of text", "eval.json", '{"action_error": "x"}', "'action_error': expected", 2),
        ("an evaluation of lists", "eval.json", '{"per_dim_error": [1]}', "'per_dim_error': expected an object", 2),
        ("an evaluation that is a list", "eval.json", "[]", "expected a JSON object", 2),
        (
            "a validation of text",
            "validation.jsonl",
            '{"optimizer_step": 1, "val_loss": "x"}\n',
            "'val_loss': expected",
            2,
        ),
        (
            "a validation without end",
            "validation.jsonl",
            '{"optimizer_step": 1, "val_loss": 1%s}\n' % ("0" * 400),
            "'val_loss'",
            2,
        ),
        ("validations that are a list", "validation.jsonl", "[1]\n", "no record with an optimizer_step", 1),
        ("a first batch that is no archive", "first_batch.npz", "x", "cannot be read", 1),
        ("settings of other kinds", "config.json", '{"ray": [1]}', "'ray': expected an object", 2),
        ("steps that are text", "config.json", '{"steps": "many"}', "'steps': expected a whole number", 2),
        ("samples that are no archive", "eval_samples.npz", "x", "cannot be read", 1),
        (
            "a summary of numbers without end",
            "summary.json",
            '{"optimizer_steps": 1%s}' % ("0" * 400),
            "summary.json",
            2,
        ),
    )
] + [
    Case("a manifest of infinite size", updated("run", MANIFEST, optimizer_step=1e999), EXPORT, "damaged"),
    Case("a manifest nested deeply", json_text("run", MANIFEST, "[" * 100_000), EXPORT, "damaged"),
    Case("a state that is a list", resealed(json_text("run", STATE, "[]")), RESUME, "state.json holds no object"),
    Case("a state nested deeply", resealed(json_text("run", STATE, "[" * 100_000)), RESUME, "is not readable JSON"),
    Case("a state of 10^30 lanes", resealed(updated("run", STATE, lanes=10**30)), RESUME, "lanes is 1000000"),
    Case("a state without sums", resealed(updated("run", STATE, loss_sums=[])), RESUME, "loss_sums is []"),
]

ONE_WAY_IN = [
    *DATASETS,
    *OLDER,
    *BASES,
    *RUNS,
    *EXPORTS,
    *FLAGS,
    *NUMBERS,
    *BOMBS,
    *CHECKSUMS,
    *RECORDS,
    *ROWS,
    *WAYS_IN,
]

SHOWN_TO_DOCTOR = (
    "info.json is a link out, train",
    "info.json is a FIFO, train",
    "info.json nested",
    "stats.json is a FIFO",
    "tasks.parquet is a link out",
    "a video is an SDP text, train",
    "NaN in a state, train",
    "statistics of width 1, train",
    "config.json is a FIFO",
    "the weights are a link out",
    "the preprocessor names a class",
    "a tokenizer that runs code",
    "a depth of 10^6",
)
"""What `train` refuses, `doctor` finds, and goes on with what does not need it: some of each kind, as a row takes a second."""
DOCTORS = [
    replace(
        case, name=f"{case.name.removesuffix(', train')}, doctor", command=TRAIN.replace("train", DOCTOR, 1), code=1
    )
    for case in ONE_WAY_IN
    if case.command == TRAIN and case.name in SHOWN_TO_DOCTOR
]

COMPARED = [
    replace(
        case,
        name=f"{case.name.removesuffix(', report')}, report of two",
        make=beside_another(case.make),
        command=COMPARE,
    )
    for case in ONE_WAY_IN
    if case.command == REPORT and "samples" not in case.name
]
"""A page of two runs reads no samples."""

CASES = [*ONE_WAY_IN, *DOCTORS, *COMPARED]
