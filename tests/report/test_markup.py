from hypothesis import given
from hypothesis import strategies as st

from vlatune.report.markup import Html, join, shorten, tag


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
