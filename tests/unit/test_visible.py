"""Text from outside: what a terminal would obey is gone, and everything else stays."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.visible import one_line, visible


class TestVisible:
    """What is shown of a text."""

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("\x1b[31mred\x1b[0m", "red"),
            ("\x1b]0;a title\x07text", "text"),
            ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
            ("\x1b[2J\x1b[Hgone", "gone"),
            ("good\rbad", "goodbad"),
            ("a\x08b\x00c\x9b31m", "abc31m"),
            ("user\u202egnp.exe", "usergnp.exe"),
            ("tab\tand\nline", "tab\tand\nline"),
            ("“ü” 雪 🙂", "“ü” 雪 🙂"),
            ("\udcff", "\ufffd"),
        ],
    )
    def test_only_commands_are_taken_out(self, text, shown):
        """Colours, cursors, titles, links and hiding characters go; words, tabs and lines stay."""
        assert visible(text) == shown

    @given(st.text(st.characters(codec=None)))
    def test_whatever_comes_can_be_shown(self, text):
        """No control character but tab and newline is left, and UTF-8 can write it."""
        shown = visible(text)

        shown.encode()
        kinds = {unicodedata.category(each) for each in shown if each not in "\t\n"}
        assert "Cc" not in kinds

    @given(st.text())
    def test_a_second_time_changes_nothing(self, text):
        """What was made visible is visible."""
        assert one_line(one_line(text)) == one_line(text)

    def test_one_line_is_one_line(self):
        """Line breaks of every kind become one blank."""
        assert one_line(" a\n\r\n\tb\u2028c ") == "a bc"
