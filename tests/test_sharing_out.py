"""`make test` shares the tests out to two processes: a file stays whole, and all that share a cluster or a run are in one of them."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CONFTEST = '''
import pytest
@pytest.fixture(scope="module")
def ray_local():
    """Stands in for a cluster."""
'''
PLAIN = "import pytest\n@pytest.mark.parametrize('number', range(9))\ndef test_one(number): ...\n"


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[str, list[str]]:
    """Process -> the files whose tests it ran, in order, shared out by the scheduler of these tests."""
    folder = tmp_path_factory.mktemp("shared out")
    for name, text in {
        "a/conftest.py": CONFTEST,
        "conftest.py": (TESTS / "conftest.py").read_text(),
        "a/test_plain_one.py": PLAIN,
        "a/test_plain_two.py": PLAIN,
        "a/test_fixture.py": PLAIN.replace("(number)", "(number, ray_local)"),
        "a/test_run_one.py": f"{PLAIN}# two_workers_run\n",
        "b/test_run_two.py": f"{PLAIN}# two_workers_run\n",
        "b/test_marked.py": f"{PLAIN}pytestmark = pytest.mark.ray\n",
        "b/test_long.py": f"{PLAIN}pytestmark = pytest.mark.early\n",
    }.items():
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name).write_text(text)
    flags = ["-n", "2", "--no-loadscope-reorder", "-v", "-p", "no:cacheprovider", "-o", "markers=ray: x\nearly: x"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "63 passed" in done.stdout, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("[gw"):
            found.setdefault(line[:5], []).append(Path(line.split("::")[0].split()[-1]).stem)
    return found


def test_a_file_stays_whole_and_what_shares_the_cluster_is_in_one_process(processes):
    first, second = map(set, processes.values())
    assert not first & second
    assert {"test_fixture", "test_marked"} <= first or {"test_fixture", "test_marked"} <= second
    assert {"test_run_one", "test_run_two"} <= first or {"test_run_one", "test_run_two"} <= second


def test_what_takes_long_without_it_is_begun_first_in_the_other(processes):
    assert {files[0] for files in processes.values()} == {"test_fixture", "test_long"}
