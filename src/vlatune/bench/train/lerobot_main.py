"""LeRobot's own `lerobot-train`, on a base of any size: `python -m vlatune.bench.train.lerobot_main BASE [its flags]`.

LeRobot builds PI0.5 and PI0 at two sizes only, and asks a hub how large SmolVLA's vision-language model is. Here its classes
are told the size that lies in the base's folder; then its own `main` runs, unchanged, with the flags as they are.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from vlatune.policies.pi05 import size as pi_size
from vlatune.policies.smolvla import smolvla_size


def main(base: str, flags: list[str]) -> None:
    """Run LeRobot's program; it reads its flags from `sys.argv`, as ever."""
    from lerobot.scripts import lerobot_train

    sys.argv = ["lerobot-train", f"--policy.path={base}", *flags]
    with building(Path(base)):
        lerobot_train.main()


def building(base: Path) -> AbstractContextManager[None]:
    """Inside, LeRobot's classes have the size of the base; ACT's and Diffusion Policy's read theirs in its config.json."""
    config = json.loads((base / "config.json").read_bytes())
    if config["type"] == "smolvla":
        return smolvla_size.building_at(smolvla_size.read_size(base, config).vlm)
    size = pi_size.read_size(base)
    return nullcontext() if size is None else pi_size.building_at(size)


if __name__ == "__main__":  # its DataLoader's workers import this module, too
    main(sys.argv[1], sys.argv[2:])
