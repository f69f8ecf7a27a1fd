"""Define the settings of the benchmarks; without heavy imports, because `--help` reads them."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class BenchOptions:
    """Settings of all benchmarks."""

    output: str | None = None
    """Write the JSON result to this file; those in benchmarks/results fill the tables of
    docs/performance.md."""

    def __post_init__(self) -> None:
        """Reject an unwritable path before minutes of measuring."""
        if self.output is not None and (Path(self.output).is_dir() or not Path(self.output).parent.is_dir()):
            raise ValueError(f"--output={self.output}: must be a file in a folder that exists; make the folder first")


@dataclass(frozen=True)
class ReaderBench(BenchOptions):
    root: str | None = None
    """Trusted dataset to read; other readers do not validate it (default: create one per codec)."""
    codec: tuple[str, ...] = ("av1", "h264")
    """Codecs of the created datasets: av1, h264 or hevc; repeat the flag for several."""
    episodes: int = 6
    """Episodes of the created dataset, half of them per file."""
    frames: int = 150
    """Frames per episode."""
    cameras: int = 3
    """Number of cameras."""
    height: int = 480
    """Recorded image height in pixels."""
    width: int = 640
    """Recorded image width in pixels."""
    noise: float = 4.0
    """Strength of the camera noise; without it, video decodes several times faster than real
    recordings."""
    passes: int = 4
    """Passes per round for PyAV and vlatune; other readers read two thirds of the dataset once."""
    rounds: int = 3
    """Rounds; each runs every reader once."""
    peers: bool = True
    """Also run other readers; false measures only PyAV and vlatune."""
    object_store_bytes: int = 2_000_000_000
    """Object store in bytes; large enough that other readers do not spill."""


@dataclass(frozen=True)
class PolicyBench:
    type: str = "pi05"
    """Policy type: pi05, pi0, smolvla, act or diffusion."""


@dataclass(frozen=True)
class StepBench(BenchOptions):
    policy: PolicyBench = field(default_factory=PolicyBench)
    width: int | None = None
    """Width of the language model (ACT: transformers, Diffusion Policy: first U-Net stage); the
    other widths follow (default: 2048 for PI0.5 and PI0, 960 for SmolVLA, 512 for others)."""
    depth: int = 3
    """Layers of the language model and action expert (published: 18, SmolVLA 16); ignored by ACT
    and Diffusion Policy."""
    vision_depth: int = 4
    """Layers of the vision tower (published: 27, SmolVLA 12)."""
    batch_size: int = 1
    """Samples per micro-step."""
    train: tuple[str, ...] = ()
    """Fine-tuning modes to measure; repeat the flag for several (default: all)."""
    rounds: int = 3
    """Rounds; each runs every implementation once."""
    cameras: int = 3
    """Images per sample."""
    image_size: int | None = None
    """Image height and width in pixels (default: 512 for SmolVLA, 224 for others)."""
    tokens: int = 200
    """Prompt tokens including padding."""
    horizon: int | None = None
    """Actions per sample (default: 100 for ACT, 64 for Diffusion Policy, 50 for others)."""
    seed: int = 0
    """Seed of weights and batches."""


@dataclass(frozen=True)
class FeedBench(BenchOptions):
    root: str | None = None
    """Trusted dataset to read; other readers do not validate it (default: create one)."""
    codec: str = "h264"
    """Codec of the created dataset: av1, h264 or hevc."""
    episodes: int = 12
    """Episodes of the created dataset."""
    frames: int = 100
    """Frames per episode."""
    cameras: int = 3
    """Number of cameras."""
    height: int = 480
    """Recorded image height in pixels."""
    width: int = 640
    """Recorded image width in pixels."""
    noise: float = 4.0
    """Strength of the camera noise."""
    store_bytes: int = 500_000_000
    """Object store in bytes."""
    small_store_bytes: int = 150_000_000
    """Second, smaller object store in bytes."""
    batch_size: int = 8
    """Samples per batch."""
    step_s: float = 1.0
    """Seconds per batch of the slow consumer."""
    rows: int = 400
    """Samples that the slow consumer takes."""
    rounds: int = 3
    """Rounds that compare reader and feed at full speed."""
    peers: bool = True
    """Also run the template's pipeline."""


@dataclass(frozen=True)
class ResumeBench(BenchOptions):
    interval: int = 30
    """Optimizer steps between checkpoints of the tiny model's run."""
    steps: int = 600
    """Optimizer steps of the tiny model's run, at least 4 x interval: it is killed twice, and
    workers outlive a killed driver briefly."""
    batch_size: int = 8
    """Samples per worker and step of the tiny model's run."""
    num_workers: int = 1
    """Training workers of the tiny model's run."""
    timeout_s: float = 600.0
    """Timeout in seconds for each start, each restart, and the rest of the run."""
    seed: int = 0
    """Seed of dataset, weights and sample order."""


@dataclass(frozen=True)
class TrainBench(BenchOptions):
    policy: PolicyBench = field(default_factory=PolicyBench)
    config: str | None = None
    """Configuration (default: demo for PI0.5, else video). demo: as `vlatune demo`; video: tiny
    model, decoding-bound; expert-balanced: frozen prefix, step and decoding cost the same;
    expert-step: the same, step-bound; full-video: full fine-tuning on large images; step: Diffusion
    Policy, step-bound."""
    root: str | None = None
    """Trusted dataset to train on; other readers do not validate it (default: create one)."""
    base: str | None = None
    """Folder of a base model (default: create one with random weights)."""
    folder: str | None = None
    """Folder for dataset, base model and runs; existing ones are reused (default: temporary)."""
    steps: int | None = None
    """Optimizer steps per run (default: by configuration); must consume far more than the store."""
    batch_size: int | None = None
    """Samples per step (default: by configuration)."""
    store_bytes: int | None = None
    """Object store of vlatune's run in bytes (default: by configuration)."""
    width: int | None = None
    """Width of the created language model; SmolVLA: multiple of 192 (default: by configuration)."""
    depth: int | None = None
    """Layers of the created language model (default: by configuration)."""
    eval_split: float = 0.1
    """Share of episodes that are held out."""
    rounds: int = 3
    """Rounds; each runs every program once."""
    cache_epochs: int | None = None
    """Epochs of a further run of vlatune that fills and reads a frame cache; 0 for none (default:
    3 for video, else 0)."""
    alone_s: float = 8.0
    """Seconds to measure the step and reading in isolation, after a quarter of that for warm-up."""
    peers: tuple[str, ...] = ("lerobot", "template")
    """Programs to compare with: lerobot, template (PI0.5 only); repeat the flag for several, [] for
    none."""
    num_workers: int = 2
    """Worker processes of LeRobot's DataLoader (LeRobot recommends 4, at most one per core)."""
    quality: bool = False
    """Also measure seconds to a held-out error, with one more run per program and number of noise
    samples; for configurations that train the complete model."""
    flow_samples: tuple[int, ...] = (1, 4, 8)
    """Noise samples per observation of vlatune's runs in the quality measurement; policies without
    noise samples run once."""
    checkpoints: int = 16
    """Evenly spaced checkpoints per run; errors are measured at the 1st, 2nd, 3rd, 4th, 6th, 8th,
    11th, 16th, ... and last."""
    error: float | None = None
    """Target error of the quality measurement (default: 1.1 x LeRobot's last error)."""
    eval_samples: int = 256
    """Held-out samples per error measurement."""
    timeout_s: float = 3600.0
    """Timeout of a run in seconds."""
    seed: int = 1000
    """Seed of sample order and held-out episodes."""


@dataclass(frozen=True)
class TableBench(BenchOptions):
    programs: tuple[str, ...] = ("template", "template + #705", "lerobot-train", "vlatune")
    """Programs to run; repeat the flag for several."""
    root: str | None = None
    """Trusted dataset to train on; other readers do not validate it (default: create one)."""
    base: str | None = None
    """Folder of a PI0.5 base model (default: create a small one with random weights)."""
    folder: str | None = None
    """Folder for dataset, base model and runs; existing ones are reused (default: temporary)."""
    train: str = "full"
    """Fine-tuning mode; a created base is random, so that frozen parts would learn nothing."""
    steps: int = 50
    """Optimizer steps per run."""
    batch_size: int = 16
    """Samples per worker and step."""
    store_bytes: int = 500_000_000
    """Object store in bytes of every program that uses Ray."""
    device: str = "cpu"
    """Device of LeRobot and the template: cpu or cuda; vlatune uses GPUs if there are any."""
    num_workers: int = 1
    """Training workers."""
    loader_workers: int = 2
    """Worker processes of LeRobot's DataLoader."""
    eval_split: float = 0.1
    """Share of episodes that are held out."""
    eval_samples: int = 128
    """Held-out samples per error measurement."""
    timeout_s: float = 3600.0
    """Timeout of a run in seconds."""
    seed: int = 1000
    """Seed of sample order and held-out episodes."""


@dataclass(frozen=True)
class CostBench(BenchOptions):
    rounds: int = 7
    """Measured steps per configuration; the median counts."""


@dataclass(frozen=True)
class PlanBench(BenchOptions):
    episodes: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    """Numbers of episodes, smallest first; repeat the flag for several."""
    frames: int = 1000
    """Mean frames per episode."""
    num_workers: int = 512
    """Training workers."""
    batch_size: int = 2
    """Samples per worker and micro-step."""
    lanes: int = 1024
    """Lanes of the order, a divisor of num_workers * batch_size and a multiple of num_workers."""
    plot: str | None = None
    """Draw seconds and memory in this SVG file."""
