"""The settings of the benchmarks, one class each; light, since `--help` reads them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReaderBench:
    root: str | None = None
    """Dataset to read; one is made when left out."""
    episodes: int = 6
    """Episodes of the dataset that is made."""
    frames: int = 150
    """Frames per episode."""
    cameras: int = 3
    """Cameras."""
    height: int = 480
    """Recorded height."""
    width: int = 640
    """Recorded width."""
    codec: str = "av1"
    """av1, h264 or hevc."""
    rounds: int = 3
    """How often every way is run."""
    peers: bool = True
    """Also run the peers' ways; false measures the limit and ours alone."""
    object_store_bytes: int = 2_000_000_000
    """Object store of the cluster; generous, so that the peers need not spill."""
