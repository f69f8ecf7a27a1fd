"""Write the tables of docs/performance.md and README.md from benchmarks/results: `python -m benchmarks.tables`.
Each file holds the final JSON line of a benchmark (`--output=benchmarks/results/NAME.json`). The table benchmark
also writes the plot and the table that the README shows."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
Result = Mapping[str, Any]

COLUMNS: Mapping[str, tuple[str, Sequence[tuple[str, str]]]] = {
    "train": (
        "End to end",
        (
            ("samples_per_s", "samples/s"),
            ("over_lerobot", "x `lerobot-train`"),
            ("over_template", "x template"),
            ("share_of_ideal", "share of ideal"),
            ("time_to_first_step_s", "first step, s"),
            ("time_to_quality_over_lerobot", "x sooner to LeRobot's error"),
            ("spilled_bytes", "bytes spilled"),
            ("cached_over_uncached", "later epochs with cache or kept prefix, x without"),
            ("cached_over_lerobot", "later epochs, x `lerobot-train`"),
            ("first_epoch_over_uncached", "first epoch with cache, x without"),
        ),
    ),
    "table": (
        "The template, pull request #705, LeRobot and vlatune",
        (
            ("template_over_ours", "template's step, x ours"),
            ("template_705_over_ours", "template + #705, x ours"),
            ("lerobot_over_ours", "`lerobot-train`, x ours"),
            ("template_spilled_bytes", "template: bytes spilled"),
            ("spilled_bytes", "bytes spilled"),
        ),
    ),
    "reader": (
        "Reading",
        (
            ("ours_warm_over_limit", "of the decoder's limit"),
            ("ours_cached_over_limit", "warm frame cache, x the limit"),
            ("cached_cpu_ms_per_row", "CPU per row from it, ms"),
            ("ours_over_template", "x template"),
            ("ours_over_ray", "x `ray.data.read_lerobot`"),
            ("ours_over_lerobot", "x LeRobot"),
            ("time_to_first_row_s", "first row, s"),
            ("bytes_per_row", "bytes per row"),
        ),
    ),
    "feed": (
        "Feeding",
        (
            ("fast_over_reader", "of the reader's rate"),
            ("wait_share", "wait share"),
            ("peak_store_share", "peak share of the store"),
            ("spilled_bytes", "bytes spilled"),
            ("template_spilled_bytes", "template: bytes spilled"),
        ),
    ),
    "step": (
        "Step",
        (
            ("heads_speedup", "heads, x LeRobot"),
            ("expert_speedup", "expert, x LeRobot"),
            ("heads_kept_speedup", "heads, kept prefix, x LeRobot"),
            ("expert_kept_speedup", "expert, kept prefix, x LeRobot"),
            ("lora_speedup", "lora, x LeRobot"),
            ("full_speedup", "full, x LeRobot"),
            ("host_syncs_per_micro_step", "host syncs"),
            ("lerobot_host_syncs_per_micro_step", "LeRobot's host syncs"),
        ),
    ),
    "resume": (
        "Checkpoints and restarts",
        (
            ("checkpoint_bytes", "checkpoint, bytes"),
            ("stall_share", "share of time spent saving"),
            ("restart_s", "restart, s"),
            ("redone_steps", "steps repeated"),
        ),
    ),
    "plan": (
        "Planning a run with 512 workers",
        (
            ("episodes", "episodes"),
            ("frames", "frames"),
            ("seconds", "seconds"),
            ("cpu_seconds", "CPU seconds"),
            ("peak_bytes", "peak memory, bytes"),
            ("sent_bytes", "plan, bytes"),
        ),
    ),
}
"""Benchmark -> title of its table, and (figure, heading) of its columns."""


def read_results(folder: Path = RESULTS) -> list[Result]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def render(results: Iterable[Result]) -> str:
    """Return one Markdown table per benchmark with results; empty columns are left out."""
    results = list(results)
    parts = []
    for bench, (title, columns) in COLUMNS.items():
        own = [one for one in results if one["bench"] == bench]
        shown = [(key, heading) for key, heading in columns if any(one.get(key) is not None for one in own)]
        if own:
            rows = [[_label(one), *(_number(one.get(key)) for key, _ in shown), _hardware(one)] for one in own]
            parts.append(f"### {title}\n\n{markdown_table(['', *(heading for _, heading in shown), 'hardware'], rows)}")
    return "\n\n".join(parts)


def update(page: str, tables: str) -> str:
    """Replace the text between the page's markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}"


def render_headline(folder: Path = RESULTS) -> str:
    """Return plot and table of the table benchmark; empty if it was not measured."""
    table = folder / "table.md"
    if not table.exists():
        return ""
    plot = "![Seconds per step, bytes spilled and held-out error of each program](benchmarks/results/table.svg)"
    return f"{plot}\n\n{table.read_text(encoding='utf-8').strip()}\n\nReproduce with `make bench NAME=table`."


def make_pages() -> dict[Path, str]:
    """Return page -> what belongs between its markers."""
    return {PAGE: render(read_results()), README: render_headline()}


def _label(result: Result) -> str:
    settings = result["settings"]
    parts = [settings.get("policy", {}).get("type"), settings.get("config"), settings.get("codec")]
    return ", ".join(" and ".join(one) if isinstance(one, list) else one for one in parts if one)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _hardware(result: Result) -> str:
    machine = result["hardware"]
    return f"{machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for page, tables in make_pages().items():
        page.write_text(update(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
