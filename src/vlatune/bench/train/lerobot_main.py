"""LeRobot's own `lerobot-train`, on a base of any size: `python -m vlatune.bench.train.lerobot_main BASE [its flags]`.

LeRobot builds PI0.5 at two sizes only. Here its classes are told the size that lies in the base's folder; then its
own `main` runs, unchanged, with the flags as they are.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from vlatune.policies.pi05.size import building_at, read_size


def main(base: str, flags: list[str]) -> None:
    """Run LeRobot's program; it reads its flags from `sys.argv`, as ever."""
    from lerobot.scripts import lerobot_train

    size = read_size(Path(base))
    sys.argv = ["lerobot-train", f"--policy.path={base}", *flags]
    with nullcontext() if size is None else building_at(size):
        lerobot_train.main()


if __name__ == "__main__":  # its DataLoader's workers import this module, too
    main(sys.argv[1], sys.argv[2:])
