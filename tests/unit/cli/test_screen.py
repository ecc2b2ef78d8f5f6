"""The screen keeps answers and progress apart, so that a word can be piped."""

import json

from rich.padding import Padding
from rich.text import Text

import night
from tandem.cli.screen import Screen, json_text


class TestScreen:
    """Answers go to stdout, progress to stderr."""

    def test_an_answer_goes_to_stdout(self, capsys):
        """A view is printed on stdout without trailing blanks or colour."""
        Screen().answer(night.PLAN, Padding(Text("a [b] c", style="red"), (0, 9, 0, 2)))

        assert capsys.readouterr() == ("  a [b] c\n", "")

    def test_under_json_the_record_is_alone(self, capsys):
        """Under `--json` stdout holds the record, whatever else is shown or told."""
        screen = Screen(json=True)
        with screen.working("thinking"):
            screen.tell("half way")
            screen.show("a view")
            screen.answer(night.DIAGNOSIS, "another view")
        out, err = capsys.readouterr()

        assert json.loads(out)["cause"] == night.DIAGNOSIS.cause
        assert err.splitlines() == ["thinking", "half way"]

    def test_progress_is_never_wrapped(self, capsys):
        """A sentence of progress stays one line, however long, with brackets as they are."""
        Screen().tell("x " * 150 + "[red]")

        assert capsys.readouterr().err == "x " * 150 + "[red]\n"

    def test_text_from_outside_commands_no_terminal(self, capsys):
        """Only Tandem's own styles colour a terminal: escapes in a record are not passed on."""
        screen = Screen()
        hostile = "a\x1b[31m\x1b]0;title\x1b\\b\rc"
        screen.tell(hostile)
        screen.line(hostile)
        screen.show(Padding(Text(hostile), 0), hostile)

        assert capsys.readouterr() == ("abc\n" * 3, "abc\n")

    def test_a_line_is_one_line(self, capsys):
        """A line of a log is never wrapped."""
        Screen().line("y" * 300)

        assert capsys.readouterr().out == "y" * 300 + "\n"

    def test_a_terminal_keeps_the_sentences(self, capsys, monkeypatch):
        """On a terminal told sentences stay on the screen above the spinner."""
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        screen = Screen()
        with screen.working("thinking"):
            screen.tell("stopped decode-0")

        assert "stopped decode-0" in capsys.readouterr().err


class TestJson:
    """The JSON of a record is for programs."""

    def test_the_same_record_gives_the_same_text(self):
        """A record has one JSON text."""
        assert json_text(night.DIAGNOSIS) == json_text(night.DIAGNOSIS)

    def test_a_diagnosis_has_the_promised_keys(self):
        """`diagnose --json` carries verdict, cause, what was ruled out, hunch and next look."""
        said = json.loads(json_text(night.DIAGNOSIS))

        assert {
            "verdict",
            "cause",
            "incident_class",
            "ruled_out",
            "hunch",
            "next_observation",
        } <= said.keys()
        assert said["ruled_out"][0].keys() >= {"mode", "because", "evidence"}
        assert said["hunch"].keys() >= {"asked", "matched", "answer"}

    def test_several_records_are_a_list(self):
        """Outcomes come as a list, in order."""
        assert [one["step"] for one in json.loads(json_text(night.OUTCOMES))] == [
            "stop:decode-0",
            "start:prefill-0",
        ]
