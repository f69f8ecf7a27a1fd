"""The shuffle meter's figures on the page: what they mean, and beside what."""

from dataclasses import replace

import pytest
from summaries import summary

from vlatune.dataset.order.shuffle_meter import Figure, Shuffle
from vlatune.report.html import write_report
from vlatune.report.section_data import shuffle_meaning, shuffle_table
from vlatune.report.summary import write_summary

GOOD = Shuffle(32, 1800, Figure(29.9, 29.65), Figure(0.0001, 0.0005), Figure(10.0, 548.0), 0.92)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (GOOD, "as varied as if all frames had been shuffled singly"),
        (replace(GOOD, distinct_episodes=Figure(20.0, 29.65)), "A batch holds fewer episodes than"),
        (replace(GOOD, neighbour_rate=Figure(0.002, 0.0005)), "A batch holds more neighbouring frames than"),
        (
            replace(GOOD, distinct_episodes=Figure(20.0, 29.65), neighbour_rate=Figure(0.002, 0.0005)),
            "A batch holds fewer episodes and more neighbouring frames than",
        ),
        (replace(GOOD, neighbour_rate=Figure(0.0, 0.0)), "as varied as if all frames had been shuffled singly"),
    ],
)
def test_one_sentence_says_what_the_figures_mean(found, said):
    meaning = shuffle_meaning(found.to_json())
    assert said in meaning
    assert ("--dataset.window_rows" in meaning) == ("as varied" not in said)


def test_the_table_has_this_run_beside_a_permutation():
    table = str(shuffle_table(GOOD.to_json()))
    for cell in ("batches of 32", "29.9", "29.6", "under 0.1 %", "0.1 %", "10", "548", "0.92"):
        assert f"{cell}</" in table


def test_the_page_shows_them_or_says_that_they_are_missing(tmp_path):
    missing = 'How the samples were mixed</h3><p class="missing">Not recorded'
    write_summary(tmp_path, summary(shuffle=GOOD.to_json()))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert shuffle_meaning(GOOD.to_json()) in page
    assert missing not in page
    write_summary(tmp_path, summary())
    assert missing in write_report(tmp_path).read_text(encoding="utf-8")
