"""Run LeRobot's `lerobot-train` on a base of any size: `python -m benchmarks.train.lerobot_main
BASE`.

LeRobot builds PI0.5 and PI0 in two sizes only, and downloads the size of SmolVLA's vision-language
model. Here its classes get the size from the base's folder; then its unchanged `main` runs.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from vlatune.policies.model_size import building_at
from vlatune.policies.pi05 import size as pi_size
from vlatune.policies.smolvla import size as smolvla_size


def main(base: str, flags: list[str]) -> None:
    """Run LeRobot's program, which reads its flags from `sys.argv`."""
    from lerobot.scripts import lerobot_train

    sys.argv = ["lerobot-train", f"--policy.path={base}", *flags]
    with building(Path(base)):
        lerobot_train.main()


def building(base: Path) -> AbstractContextManager[None]:
    """Build LeRobot's classes at the base's size, unless they read it from config.json."""
    config = json.loads((base / "config.json").read_bytes())
    if config["type"] == "smolvla":
        return building_at(smolvla_size.read_size(base, config).vlm)
    size = pi_size.read_size(base)
    return nullcontext() if size is None else building_at(size)


if __name__ == "__main__":  # DataLoader workers import this module, too
    main(sys.argv[1], sys.argv[2:])
