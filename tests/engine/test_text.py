"""Text out of tokens: half characters, and stop strings wherever they fall."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.text import TextStream


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at some places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(st.text(), st.lists(st.integers(min_value=0, max_value=500)))
def test_pieces_join_to_the_text(text, cuts):
    """However the bytes are cut, the pieces of text join to the whole."""
    stream = TextStream()
    parts = pieces(text.encode(), cuts)
    said = "".join(stream.push(part) for part in parts) + stream.push(b"", last=True)

    assert said == text


@given(st.text("ab"), st.lists(st.text("ab", min_size=1), max_size=3), st.lists(st.integers(0, 99)))
def test_a_stop_string_ends_the_text_before_it(text, stops, cuts):
    """The text ends before the stop string that is complete first, and shows nothing of it."""
    stream = TextStream(tuple(stops))
    said = ""
    for part in pieces(text.encode(), cuts):
        said += stream.push(part)
        if stream.stopped_by is not None:
            break
        assert not any(stop in said for stop in stops)
    else:
        said += stream.push(b"", last=True)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first = min(ends, default=(0, len(text)))[1]

    assert said == text[:first]
    assert (stream.stopped_by is not None) == any(stop in text for stop in stops)


def test_broken_bytes_become_replacement_characters():
    """Bytes that are no UTF-8 are shown as U+FFFD, never raised."""
    stream = TextStream()

    assert stream.push(b"a\xff") + stream.push(b"\xc3", last=True) == "a\ufffd\ufffd"
