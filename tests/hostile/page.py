"""Prints docs/hostile_inputs.md, the table of hostile cases: `PYTHONPATH=src python tests/hostile/page.py > docs/hostile_inputs.md`."""

import sys
from pathlib import Path

HEAD = """# Hostile and broken files, and what happens

Every row is a case of `tests/hostile/test_hostile.py`: a copy of an honest dataset, base model or run with one thing changed, and a
command. Each ends with this message and exit code, and after each no payload has run, nothing outside was read out or changed, and no
traceback or terminal escape was printed. `read_lerobot` is the Python function, whose ValueError counts as exit code 2. The rows
stand in `tests/hostile/cases.py` and `rows.py`; this page is printed by `tests/hostile/page.py`.

`make fuzz` changes one file at random and reads it: no change may end in a crash, a hang of more than 10 s (without the seconds in which
the machine had no core for it), 1 GB more memory, or a traceback, and with `meta/checksums.json` no changed row may come out. Without it,
these still come through, as nothing in the dataset contradicts them:

- a value of a state or an action that a robot may have had, and such a column in another order. `inspect` and `doctor` speak of values far
  outside of the statistics, and of statistics that the rows do not have;
- a picture whose bytes still decode, as h264 has no checksum of its own: changes of `mdat` and of the parameter sets in `avcC`. What the other
  boxes of an mp4 tell is held against `info.json` and the rows: size, rate, number of frames, and a frame at the time of every row;
- the words of a sentence: it may have been put better. `inspect` shows the one that the episodes name as "not in meta/tasks". Sentences that
  changed places are refused, as the episodes name theirs;
- a number of `stats.json` in its range.

The last unbroken run of 20 minutes (`FUZZ_MINUTES=20 make fuzz ARGS=--seed=1300000`): 8,269 inputs, 6,075 refused, 0 crashes, hangs, allocations
over 1 GB or tracebacks, the slowest 4.3 s; 0 changed rows with checksums. Of 89 that changed without them `inspect` had spoken of 29; the other 60 were
words of a sentence (37), bytes of pictures (12), cells of actions and states (7), numbers of `stats.json` (2) and an mp4 file that had lost its edit list
(2), which `inspect` finds by now.

| what is wrong | command | says | exit |
|---|---|---|---|
"""


def page() -> str:
    from cases import CASES

    rows = [f"| {case.name} | `{_shown(case.command)}` | {_shown(case.says)} | {case.code} |" for case in CASES]
    return HEAD + "\n".join(rows) + "\n"


def _shown(text: str) -> str:
    """The command with its first operand; what a terminal would obey, as '?'."""
    words = text.split(" --dataset.root=")[0] if text.startswith("train") else text
    return "".join(one if one.isprintable() else "?" for one in words).replace("|", "\\|")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.stdout.write(page())
