"""`make test` shares the tests out to two processes: a file stays whole, and all that starts Ray is in one of them."""

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


@pytest.fixture
def processes(tmp_path) -> dict[str, set[str]]:
    """File -> the processes that ran its tests, shared out by the scheduler of these tests."""
    tests = tmp_path / "tests"
    for name, text in {
        "a/conftest.py": CONFTEST,
        "conftest.py": (TESTS / "conftest.py").read_text(),
        "a/test_plain_one.py": PLAIN,
        "a/test_plain_two.py": PLAIN,
        "a/test_fixture.py": PLAIN.replace("(number)", "(number, ray_local)"),
        "b/test_marked.py": f"{PLAIN}pytestmark = pytest.mark.ray\n",
    }.items():
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text(text)
    flags = ["-n", "2", "--no-loadscope-reorder", "-v", "-p", "no:cacheprovider", "-o", "markers=ray: x"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "36 passed" in done.stdout, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("[gw"):
            found.setdefault(Path(line.split("::")[0].split()[-1]).stem, set()).add(line[:5])
    return found


def test_a_file_stays_whole_and_ray_is_in_one_process(processes):
    assert {file: len(where) for file, where in processes.items()} == dict.fromkeys(processes, 1)
    assert processes["test_fixture"] == processes["test_marked"]
    assert len(set.union(*processes.values())) == 2
