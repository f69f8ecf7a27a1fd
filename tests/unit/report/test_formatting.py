import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.formatting import (
    Html,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    join,
    plural,
    shorten,
    tag,
)


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (format_bytes, 0, "0 bytes"),
        (format_bytes, 1, "1 byte"),
        (format_bytes, 999, "999 bytes"),
        (format_bytes, 12_345_678, "12.3 MB"),
        (format_bytes, 999_700, "1 MB"),  # not '1e+03 kB'
        (format_bytes, 5e15, "5000 TB"),
        (format_seconds, 0, "0 s"),
        (format_seconds, 0.0123, "12 ms"),
        (format_seconds, 0.9999, "1.0 s"),
        (format_seconds, 59.97, "1 min 00 s"),
        (format_seconds, 3599.9, "1 h 00 min"),
        (format_share, 0, "0 %"),
        (format_share, 1e-5, "under 0.1 %"),
        (format_share, 0.0996, "10 %"),
        (format_share, 0.41, "41 %"),
        (format_number, 0.041234, "0.04123"),
        (format_number, 12345.6, "12,346"),
        (format_number, 2.5e-5, "2.5e-5"),
        (format_number, -3.5, "-3.5"),
        (format_number, float("nan"), "not a number"),
    ],
)
def test_numbers_are_short_with_their_unit(form, value, text):
    assert form(value) == text


@given(st.floats(min_value=0, max_value=1e18))
def test_no_byte_count_is_written_in_powers(num_bytes):
    assert "e" not in format_bytes(num_bytes).replace("byte", "").replace("bytes", "")


def test_plurals():
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
