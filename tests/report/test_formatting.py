import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.report.formatting import (
    Html,
    format_bytes,
    format_number,
    format_rate,
    format_seconds,
    format_share,
    join,
    plural,
    shorten,
    tag,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (536_870_912, "537 MB"),
        (999_700, "1 MB"),  # not '1e+03 kB'
        (262e9, "262 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1e-5, "under 0.1 %"), (0.0123, "1.2 %"), (0.0996, "10 %"), (0.41, "41 %"), (1, "100 %")],
)
def test_share(share, text):
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.041234, "0.04123"),
        (12345.6, "12,346"),
        (2.5e-5, "2.5e-5"),
        (0, "0"),
        (-3.5, "-3.5"),
        (float("nan"), "not a number"),
    ],
)
def test_number(value, text):
    assert format_number(value) == text


@given(st.floats(min_value=0, max_value=1e18))
def test_no_byte_count_is_written_in_powers(num_bytes):
    assert "e" not in format_bytes(num_bytes).replace("byte", "").replace("bytes", "")


def test_rates_and_plurals():
    assert format_rate(31.24, "samples") == "31.2 samples/s"
    assert [plural(1, "step"), plural(0, "step"), plural(12000, "step")] == ["1 step", "0 steps", "12,000 steps"]


def test_children_and_attributes_are_escaped():
    made = tag("p", "<script>", tag("b", "a & b"), title='"><script>', class_="note", aria_label=None)
    assert made == '<p title="&quot;&gt;&lt;script&gt;" class="note">&lt;script&gt;<b>a &amp; b</b></p>'


def test_void_tags_do_not_close():
    assert tag("img", src="data:,", alt="") == '<img src="data:," alt="">'


@given(st.text())
def test_no_text_opens_a_tag_or_leaves_an_attribute(text):
    made = tag("p", text, title=text)
    assert made.count("<") == made.count(">") == 2
    assert made.count('"') == 2
    assert isinstance(join([made, text]), Html)


def test_shorten_says_that_something_is_missing():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
