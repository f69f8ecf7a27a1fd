"""The driver of a run imports neither torch nor transformers, whose import takes seconds and half a gigabyte."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from vlatune import cli
code = cli.main(sys.argv[1:])
print("\\nheavy:", *sorted({"torch", "transformers", "lerobot"} & set(sys.modules)))
sys.exit(code)
"""


def test_a_run(dataset_v3, small_base, tmp_path) -> None:
    flags = [f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]
    small = ["--steps=1", "--batch_size=2", "--ray.num_cpus=2", "--ray.object_store_bytes=100000000"]
    command = [sys.executable, "-P", "-c", PROGRAM, "train", *flags, *small]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "heavy:"), done.stderr
