"""Our own page, read by the official parsers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tandem.service.exposition import Family, Point, one, page, several, wants_openmetrics

PARSERS = [(False, plain), (True, openmetrics)]
FAMILIES = [
    Family("x", "info", "What it is.", (Point("_info", {"version": "1"}, 1),)),
    one("x_turns", "counter", "Turns.", 12),
    one("x_seconds", "gauge", 'With \\ and "quotes"\nand lines.', 0.25),
    several("x_open", "gauge", "Open.", "kind", {"b": 2, "a": 0}),
    Family(
        "x_took_seconds",
        "histogram",
        "How long.",
        (
            Point("_bucket", {"le": "0.5"}, 3),
            Point("_bucket", {"le": "+Inf"}, 4),
            Point("_sum", {}, 1.5),
            Point("_count", {}, 4),
        ),
    ),
]


def samples(parse, text):
    """Give every sample of a page as (name, labels, value)."""
    return [
        (sample.name, sample.labels, sample.value)
        for family in parse(text.decode())
        for sample in family.samples
    ]


@pytest.mark.parametrize(("modern", "parse"), PARSERS)
class TestPage:
    """Both formats."""

    def test_the_official_parser_reads_what_was_counted(self, modern, parse):
        """Every sample comes back with its name, labels and value."""
        assert samples(parse, page(FAMILIES, openmetrics=modern)) == [
            (family.name + point.suffix, point.labels, point.value)
            for family in FAMILIES
            for point in family.points
        ]

    def test_kinds_and_help_are_told(self, modern, parse):
        """The parser knows each family's kind and what it is about."""
        text = page(FAMILIES, openmetrics=modern)
        read = {one.name: one for one in parse(text.decode())}
        info = read["x"] if modern else read["x_info"]

        assert info.type == ("info" if modern else "gauge")
        assert [read[name].type for name in ("x_turns", "x_open", "x_took_seconds")] == [
            *("counter", "gauge", "histogram")
        ]
        assert read["x_seconds"].documentation == 'With \\ and "quotes"\nand lines.'

    @given(value=st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_label_value_survives(self, modern, parse, value):
        """Quotes, backslashes and line feeds in a label come back as they were."""
        text = page([several("x", "gauge", "X.", "kind", {value: 1})], openmetrics=modern)

        assert samples(parse, text.replace(b"\r", b"")) == [
            ("x", {"kind": value.replace("\r", "")}, 1.0)
        ]

    @given(value=st.floats())
    def test_any_number_survives(self, modern, parse, value):
        """Every float comes back exactly, infinities and NaN included."""
        ((_, _, read),) = samples(parse, page([one("x", "gauge", "X.", value)], openmetrics=modern))

        assert read == value or (math.isnan(read) and math.isnan(value))


class TestNegotiation:
    """What a scraper asked for."""

    @pytest.mark.parametrize(
        ("accept", "modern"),
        [
            ("", False),
            ("*/*", False),
            ("text/plain;version=0.0.4", False),
            ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", True),
            (
                "application/openmetrics-text;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.6",
                False,
            ),
            ("application/openmetrics-text;q=0", False),
            ("application/openmetrics-text;q=many", False),
        ],
    )
    def test_openmetrics_is_given_to_who_prefers_it(self, accept, modern):
        """Named without a lower weight than the plain format, as Prometheus asks."""
        assert wants_openmetrics(accept) is modern
