"""[ray] What comes before training with --policy.keep_features=true: each picture is looked at once, and the result kept.

    read task (a core) -> pictures, in the object store -> encoder (a GPU, or a core) -> a file of the run

A frozen part's output is a pure function of its weights and of the picture. To make it so to the last bit, an encoder always
computes as many pictures at once, neighbours of one episode from the same places on, with one thread: neither the number of
encoders, nor an earlier end, nor what else is read changes a number. Files that are there are left as they are, so a stage that
was killed goes on. Only the encoders import torch, and they are gone when training starts.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vlatune.config import RunConfig
from vlatune.console import progress_bar
from vlatune.dataset.reader import ReadSpec, Unit, make_unit, read_unit
from vlatune.dataset.storage.feature_files import (
    MANIFEST,
    PART_FRAMES,
    FeatureFiles,
    free_bytes,
    num_parts,
    open_features,
    part_rows,
    remove_leftovers,
    stored_sizes,
)
from vlatune.pipeline.sizing import CORE_FLOPS, Sizing
from vlatune.policies.base import ModuleOptions
from vlatune.report.formatting import format_bytes, format_seconds, plural
from vlatune.run_setup import Setup
from vlatune.train.driver.cluster import Cluster
from vlatune.train.failures import FINAL, root_cause

CHUNK = 8
"""Pictures that an encoder computes at once; of SmolVLA's, 8,192 patches, which keep a GPU busy."""
WORTH_S = 30.0
"""Seconds of computing for which one more encoder without a GPU pays: it takes some ten to start."""
STORE_SHARE = 0.5
"""Of the object store, for pictures under way."""
AHEAD = 2
"""Parts for each encoder, the one that it computes and those whose pictures are ready for it."""
LOOK_S = 0.5
SAY_S = 30.0


@dataclass(frozen=True)
class Part:
    """Neighbouring frames of one episode, of one camera: what one task reads and one file holds."""

    unit: Unit
    camera: int
    """Its place in the dataset's `ReadSpec`."""
    number: int


@dataclass(frozen=True)
class Stage:
    """What is to be kept, and how it is computed; plain values, sent to every encoder."""

    setup: Setup
    options: ModuleOptions
    deterministic: bool = False

    @cached_property
    def specs(self) -> tuple[ReadSpec, ...]:
        """As training reads."""
        return self.setup.training_specs()

    def files(self, dataset: int, camera: int) -> FeatureFiles:
        found = self.specs[dataset].cameras[camera].kept
        assert found is not None  # a run that keeps features has them for each camera
        return found

    def name(self, part: Part) -> str:
        return self.files(part.unit.dataset_index, part.camera).name(part.unit.episode_index, part.number)

    def num_bytes(self, part: Part) -> int:
        return self.files(part.unit.dataset_index, part.camera).part_bytes(part.unit.length, part.number)


def plan_parts(setup: Setup) -> list[Part]:
    """All pictures that training will read."""
    parts, training = [], setup.training
    for dataset, position in zip(training.dataset.tolist(), training.position.tolist(), strict=True):
        meta, spec = setup.metas[dataset], setup.specs[dataset]
        length = int(meta.episodes.length[position])
        for number in range(num_parts(length)):
            frames = number * PART_FRAMES + np.arange(part_rows(length, number))
            for camera in range(len(spec.cameras)):
                unit = make_unit(meta, of_camera(spec, camera), position, frames, np.zeros_like(frames))
                parts.append(Part(unit, camera, number))
    return parts


def of_camera(spec: ReadSpec, camera: int) -> ReadSpec:
    """The pictures of one camera, each by itself, and nothing else."""
    return replace(spec, cameras=(replace(spec.cameras[camera], offsets=None),), vectors=(), absent=())


def find_missing(stage: Stage, parts: Sequence[Part]) -> list[Part]:
    """Those without a file; a file of another size is refused, as none is half written under its name."""
    kept = {(part.unit.dataset_index, part.camera) for part in parts}
    sizes: dict[str, int] = {}
    for dataset, camera in sorted(kept):
        files = stage.files(dataset, camera)
        sizes |= stored_sizes(files.root, files.camera)
    missing = []
    for part in parts:
        name = stage.name(part)
        if name not in sizes:
            missing.append(part)
            continue
        stage.files(part.unit.dataset_index, part.camera).check_size(name, sizes[name], stage.num_bytes(part))
    return missing


def made_of(setup: Setup, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """What decides the numbers, for the manifest."""
    row = setup.kept
    assert row is not None
    return {
        "version": 1,
        "base_weights": fingerprints["base.weights"],
        "datasets": {key: one for key, one in fingerprints.items() if key.endswith((".meta", ".files"))},
        "cameras": [[camera.name for camera in spec.cameras] for spec in setup.specs],
        "image_hw": list(setup.policy.image_hw),
        "pad": setup.policy.pad,
        "part": row.part,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "rows_of_a_file": PART_FRAMES,
        "pictures_at_once": CHUNK,
    }


def check_room(stage: Stage, missing: Sequence[Part]) -> int:
    """Bytes that are still to be written; a disk without room for them is refused."""
    root, needed = stage.setup.features, sum(stage.num_bytes(part) for part in missing)
    assert root is not None
    free = free_bytes(root)
    if free is not None and needed > free:
        raise ValueError(
            f"--policy.keep_features=true: {format_bytes(needed)} of features do not fit '{root.url}', which has {format_bytes(free)} free; "
            f"leave the flag out, or choose another --output_dir or --storage_path"
        )
    return needed


def keep_features(
    config: RunConfig,
    setup: Setup,
    fingerprints: Mapping[str, str],
    cluster: Cluster,
    watch: Callable[[], None],
    *,
    say: Callable[[str], None],
) -> None:
    """Compute what is not there yet; `watch` raises when the run is to end, or cannot go on as it is.

    What broke off is begun again as often as training would be, in a row without a new file.
    """
    assert setup.kept is not None
    assert setup.features is not None
    stage = Stage(setup, ModuleOptions.of(config.policy), config.deterministic)
    open_features(setup.features, made_of(setup, fingerprints))
    parts = plan_parts(setup)
    for dataset, spec in enumerate(setup.specs):
        for camera in range(len(spec.cameras)):
            remove_leftovers(setup.features, stage.files(dataset, camera).camera)
    missing, began_s, in_vain = find_missing(stage, parts), time.monotonic(), 0
    needed = check_room(stage, missing)
    pictures, left = (sum(len(part.unit.frames) for part in of) for of in (parts, missing))
    say(
        f"features of {pictures:,} pictures, of {setup.kept.nbytes:,} bytes each, in {setup.features.url}: "
        + (f"{left:,} are to be computed, {format_bytes(needed)}" if missing else "all are there")
    )
    while missing:
        try:
            compute(stage, missing, config, cluster, watch, say)
        except Exception as error:
            reason, before = root_cause(error), len(missing)
            missing = find_missing(stage, parts)
            in_vain = in_vain + 1 if len(missing) == before else 1
            if isinstance(reason, FINAL) or in_vain > config.max_restarts:
                raise reason from None
            say(f"broken off ({reason}); going on with features of {len(missing):,} files")
            cluster.renew()
        else:
            say(f"features: computed in {format_seconds(time.monotonic() - began_s)}")
            return


def num_encoders(stage: Stage, pictures: int, num_workers: int, sizing: Sizing) -> int:
    """One for each GPU of the run; without, one for each core, where there is work enough for it."""
    if any(node.gpus for node in sizing.nodes):
        return num_workers
    setup, options = stage.setup, stage.options
    flops = [
        setup.adapter.step_flops(setup.policy, setup.binding, replace(options, keep_features=kept))
        for kept in (False, True)
    ]
    seconds = (flops[0] - flops[1]) / max(1, len(setup.binding.cameras)) / CORE_FLOPS * pictures
    return max(1, min(sum(node.cpus for node in sizing.nodes), math.ceil(seconds / WORTH_S)))


def compute(
    stage: Stage,
    missing: Sequence[Part],
    config: RunConfig,
    cluster: Cluster,
    watch: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Read, look and write, part by part, with as many encoders as there is place for."""
    import ray

    sizing, pictures = cluster.sizing, sum(len(part.unit.frames) for part in missing)
    count = min(len(missing), num_encoders(stage, pictures, config.num_workers, sizing))
    gpus = 1 if any(node.gpus for node in sizing.nodes) else 0
    say(f"features: {plural(count, 'encoder')}, {'each ' if count > 1 else ''}on a {'GPU' if gpus else 'core'}")
    actor: Any = ray.remote(Encoder).options(num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD")  # pyright: ignore[reportAttributeAccessIssue]
    there = ray.put(stage)
    encoders = [actor.remote(there) for _ in range(count)]
    try:
        with progress_bar("pictures looked at") as show:
            _run(stage, missing, encoders, _most_under_way(stage, count, sizing), watch, Told(pictures, show, say))
    finally:
        if not cluster.lost_part():  # which takes all its processes along, and would not answer
            for encoder in encoders:
                ray.kill(encoder)


def _most_under_way(stage: Stage, encoders: int, sizing: Sizing) -> int:
    """Parts that are read or computed at once: encoders on GPUs take what all cores read, those on cores need no more
    than keeps them from waiting. The store holds the pictures of all of them.
    """
    on_gpus = any(node.gpus for node in sizing.nodes)
    wanted = AHEAD * encoders + (sum(node.cpus for node in sizing.nodes) if on_gpus else 0)
    part_bytes = PART_FRAMES * 3 * math.prod(stage.setup.policy.image_hw)
    return max(1, min(wanted, int(STORE_SHARE * sizing.store_bytes) // part_bytes))


def _run(
    stage: Stage, missing: Sequence[Part], encoders: Sequence[Any], most: int, watch: Callable[[], None], told: "Told"
) -> None:
    """Each part to the encoder that has least to do; its pictures go there by themselves when they are read."""
    import ray

    specs, read = ray.put(stage.setup.specs), ray.remote(read_pictures)
    waiting, running, load = deque(missing), {}, [0] * len(encoders)
    while waiting or running:
        while waiting and len(running) < most:
            part, idle = waiting.popleft(), load.index(min(load))
            load[idle] += 1
            running[encoders[idle].keep.remote(part, read.remote(specs, part))] = idle  # pyright: ignore[reportArgumentType]
        ready, _ = ray.wait(list(running), timeout=LOOK_S)
        watch()
        for ref in ready:
            load[running.pop(ref)] -= 1
            told.add(ray.get(ref))


class Told:
    """How far the stage is: a bar where there is a terminal, else a line now and then."""

    def __init__(self, total: int, show: Callable[[int, int], None], say: Callable[[str], None]) -> None:
        self._total, self._show, self._say, self._done = total, show, say, 0
        self._began_s = self._said_s = time.monotonic()

    def add(self, pictures: int) -> None:
        self._done += pictures
        self._show(self._done, self._total)
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_S:
            rate = self._done / (now_s - self._began_s)
            self._said_s = now_s
            self._say(
                f"features: {self._done:,} of {self._total:,} pictures, {rate:.3g}/s, "
                f"{format_seconds((self._total - self._done) / rate)} to go"
            )


def read_pictures(specs: Sequence[ReadSpec], part: Part) -> np.ndarray:
    """(N, 3, H, W), at the policy's size, as training would read them. What a read task runs."""
    spec = of_camera(specs[part.unit.dataset_index], part.camera)
    return read_unit(spec, part.unit)[spec.cameras[0].column]


class Encoder:
    """The actor: pictures in, a file out."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._module, self._device = stage, None, None
        self._while_running = ExitStack()

    def keep(self, part: Part, pictures: np.ndarray) -> int:
        """How many; the model is loaded with the first, so that an error in it comes out as one."""
        files = self._stage.files(part.unit.dataset_index, part.camera)
        if self._module is None:
            self._load(files)
        rows = np.concatenate([self._look(pictures[at : at + CHUNK]) for at in range(0, len(pictures), CHUNK)])
        if not files.row.is_finite(rows):
            first = next(nth for nth, row in enumerate(rows) if not files.row.is_finite(row))
            camera = self._stage.setup.specs[part.unit.dataset_index].cameras[part.camera].name
            raise ValueError(
                f"--policy.keep_features=true: dataset {part.unit.dataset_index}, episode {part.unit.episode_index}, frame "
                f"{part.unit.frames[first]}, camera '{camera}': the base's {files.row.part} makes numbers of it that are not finite; "
                f"use another base, or --policy.dtype=float32"
            )
        files.write(part.unit.episode_index, part.number, rows)
        return len(pictures)

    def _load(self, files: FeatureFiles) -> None:
        import torch

        from vlatune.train.worker.device import deterministic_kernels, set_performance_flags

        if not files.root.exists(MANIFEST):
            raise ValueError(
                f"features '{files.root.url}': the folder is not there on every node; give a place that all of them reach with "
                f"--storage_path"
            )
        if self._stage.deterministic:
            self._while_running.enter_context(deterministic_kernels())
        setup = self._stage.setup
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        set_performance_flags(self._device, 1)
        self._module = setup.adapter.load_encoder(setup.policy, self._stage.options, self._device)

    def _look(self, pictures: np.ndarray) -> np.ndarray:
        """Always as many at once: the last of an episode are filled up."""
        import torch

        assert self._module is not None
        chunk = np.zeros((CHUNK, *pictures.shape[1:]), np.uint8)
        chunk[: len(pictures)] = pictures
        kept = self._module(torch.from_numpy(chunk).to(self._device))
        return kept.cpu().numpy()[: len(pictures)]  # device sync: nothing else is under way
