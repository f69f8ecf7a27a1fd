"""The settings of the benchmarks, one class each; light, since `--help` reads them."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class BenchOptions:
    """What all of them have."""

    output: str | None = None
    """File to which the last line is appended as well; `vlatune bench table FILE` shows what lies there beside the bars."""

    def __post_init__(self) -> None:
        """A benchmark takes minutes: a place that cannot be written to is told before them."""
        if self.output is not None and (Path(self.output).is_dir() or not Path(self.output).parent.is_dir()):
            raise ValueError(f"--output={self.output}: must be a file in a folder that exists; make the folder first")


@dataclass(frozen=True)
class ReaderBench(BenchOptions):
    root: str | None = None
    """Dataset to read; one is made per codec when left out."""
    codec: tuple[str, ...] = ("av1", "h264")
    """Codecs of the datasets that are made: av1, h264 or hevc; give the flag again for several."""
    episodes: int = 6
    """Episodes of the dataset that is made, half of them in a file."""
    frames: int = 150
    """Frames per episode."""
    cameras: int = 3
    """Cameras."""
    height: int = 480
    """Recorded height."""
    width: int = 640
    """Recorded width."""
    texture: float = 8.0
    """Texture of the pictures, as `vlatune make-dataset` has it; without it video decodes several times faster than a recording."""
    noise: float = 2.0
    """Noise of the cameras."""
    passes: int = 4
    """How often the limit and ours go through the dataset in a round; the peers, ten times as slow, read two thirds of it once."""
    rounds: int = 3
    """How often every way is run."""
    peers: bool = True
    """Also run the peers' ways; false measures the limit and ours alone."""
    object_store_bytes: int = 2_000_000_000
    """Object store of the cluster; generous, so that the peers need not spill."""


@dataclass(frozen=True)
class PolicyBench:
    type: str = "pi05"
    """Kind of policy: pi05, pi0, smolvla, act or diffusion."""


@dataclass(frozen=True)
class StepBench(BenchOptions):
    policy: PolicyBench = field(default_factory=PolicyBench)
    width: int | None = None
    """Width of the language model (ACT: of its transformers, Diffusion Policy: of its U-Net's first stage); the other widths follow in the usual proportions. 2048 for PI0.5 and PI0, 960 for SmolVLA, 512 for the others when left out."""
    depth: int = 3
    """Layers of the language model and of the action expert; the published ones have 18, SmolVLA 16. ACT and Diffusion Policy have LeRobot's."""
    vision_depth: int = 4
    """Layers of the vision tower; the published ones have 27, SmolVLA 12."""
    batch_size: int = 1
    """Samples per micro-step."""
    flow_samples: int = 8
    """Noise and time draws per observation whose cost is measured against one."""
    keep_features: bool = False
    """Also measure a step from kept features (--policy.keep_features of `vlatune train`), where the way to train has them."""
    train: tuple[str, ...] = ()
    """What is trained; give the flag again for several; all of the policy's ways when left out."""
    rounds: int = 3
    """How often every way is run."""
    cameras: int = 3
    """Pictures per sample."""
    image_size: int | None = None
    """Pixels on a side of a picture; 512 for SmolVLA and 224 for the others when left out."""
    tokens: int = 200
    """Prompt tokens, padding included."""
    horizon: int | None = None
    """Actions per sample; 100 for ACT, 64 for Diffusion Policy and 50 for the others when left out."""
    small_batch_size: int = 8
    """Samples per micro-step of the small model, on which the host's own time is measured."""
    small_steps: int = 20
    """Micro-steps of the small model."""
    seed: int = 0
    """Decides weights and batches."""


@dataclass(frozen=True)
class FeedBench(BenchOptions):
    root: str | None = None
    """Dataset to read; one is made when left out."""
    codec: str = "h264"
    """Codec of the dataset that is made: av1, h264 or hevc."""
    episodes: int = 12
    """Episodes of the dataset that is made."""
    frames: int = 100
    """Frames per episode."""
    cameras: int = 3
    """Cameras."""
    height: int = 480
    """Recorded height."""
    width: int = 640
    """Recorded width."""
    texture: float = 8.0
    """Texture of the pictures, as `vlatune make-dataset` has it."""
    noise: float = 2.0
    """Noise of the cameras."""
    store_bytes: int = 500_000_000
    """Object store."""
    small_store_bytes: int = 150_000_000
    """Another, smaller one."""
    batch_size: int = 8
    """Samples per batch."""
    step_s: float = 1.0
    """Seconds that the slow consumer takes per batch."""
    rows: int = 400
    """Samples that the slow consumer takes."""
    rounds: int = 3
    """How often the reader and the feed take turns at full speed."""
    peers: bool = True
    """Also run the template's way."""


@dataclass(frozen=True)
class ResumeBench(BenchOptions):
    interval: int = 30
    """Optimizer steps between two checkpoints of the small model's run."""
    steps: int = 600
    """Optimizer steps of that run, at least four times the interval: it is killed twice on its way. Workers outlive a killed driver by a second or two and must not come to the end."""
    batch_size: int = 8
    """Samples per worker and step of that run."""
    num_workers: int = 1
    """Training workers of that run."""
    timeout_s: float = 600.0
    """How long a start, a restart and the rest of the run may each take."""
    width: int = 2048
    """Width of the wide model's language model; the other widths follow in PI0.5's proportions."""
    depth: int = 3
    """Layers of its language model and of its action expert; the published PI0.5 has 18."""
    vision_depth: int = 4
    """Layers of its vision tower; the published PI0.5 has 27 to the language model's 18."""
    rounds: int = 3
    """How often the wide model is saved each way."""
    seed: int = 0
    """Decides dataset, weights and the order of samples."""


@dataclass(frozen=True)
class TrainBench(BenchOptions):
    policy: PolicyBench = field(default_factory=PolicyBench)
    config: str | None = None
    """What is trained; demo (PI0.5) or video when left out. demo: what `vlatune demo` trains, small pictures; video: a small model on large pictures, decoding decides; expert-balanced: a frozen prefix, step and decoding cost about the same; expert-step: the same, the step decides; full-video: everything, large pictures; step (Diffusion Policy): the step decides."""
    root: str | None = None
    """Dataset to train on; the configuration's own is made when left out."""
    folder: str | None = None
    """Folder for dataset, base model and runs; what is there already is used again. A temporary one when left out."""
    steps: int | None = None
    """Optimizer steps of a run; the configuration's own when left out. A run must consume several times what the store holds."""
    batch_size: int | None = None
    """Samples per step; the configuration's own when left out."""
    store_bytes: int | None = None
    """Object store of our run; the configuration's own when left out."""
    width: int | None = None
    """Width of the language model that is made (PI0.5, PI0; SmolVLA in multiples of 192); the configuration's own when left out."""
    depth: int | None = None
    """Its layers; the configuration's own when left out."""
    pin: bool = False
    """From the first log line on, the thread that trains has one core to itself, and everything else the other cores; the step alone has the same core. Shows the step as it is on a machine with free cores."""
    eval_split: float = 0.1
    """Share of the episodes that are held out."""
    rounds: int = 3
    """How often every way is run."""
    alone_s: float = 8.0
    """How long the step and reading are each measured alone, after a warm-up of a quarter of it."""
    peers: tuple[str, ...] = ("lerobot", "template")
    """What is run beside ours: lerobot, template (it knows PI0.5 alone), augmented, which is ours with --dataset.image_transforms.enable, and kept, which is ours with --policy.keep_features (SmolVLA, --config=expert-step); give the flag again for several, [] for ours alone."""
    num_workers: int = 2
    """Processes of LeRobot's DataLoader; it recommends 4, at most one per core."""
    quality: bool = False
    """Also measure seconds to a held-out error: one run of LeRobot's and of each of ours more, with checkpoints on the way. Where a part of the model is frozen, the base is first trained as a whole on another recording, so that the part has something to show."""
    flow_samples: tuple[int, ...] = (1, 4, 8)
    """Draws per observation of our runs whose seconds to an error are measured; a policy that takes no draws runs once."""
    checkpoints: int = 16
    """Checkpoints of a run, evenly spaced as `lerobot-train` saves them; the error is measured at the 1st, 2nd, 3rd, 4th, 6th, 8th, 11th, 16th, ... and the last."""
    error: float | None = None
    """The error whose seconds are measured; 1.1 x LeRobot's last one when left out."""
    eval_samples: int = 256
    """Held-out samples that an error is measured on."""
    timeout_s: float = 3600.0
    """How long one run may take."""
    seed: int = 1000
    """Decides the order of samples and what is held out."""
