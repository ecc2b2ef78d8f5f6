"""The selective scanner reads what the official parser reads, and survives what it does not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from tandem.scan import Sample, Scanner, quantile, total

WANTED = ("a:reqs", "a:reqs_total", "b_seconds_sum", "b_seconds_count", "b_seconds_bucket", "c")
NAMES = (*WANTED, "a:req", "a:reqs_totals", "b_seconds", "cc", "d", "a")

names = st.sampled_from(NAMES)
label_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("__")
)
label_values = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
    max_size=12,
) | st.sampled_from(["}", "{", '"', "\\", "\n", " # {", 'a="b",', "\\n", '\\"', "le"])
values = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**70), 2**70)
spaces = st.text(" \t", max_size=2)
gaps = st.text(" \t", min_size=1, max_size=1)


def escaped(value):
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def shown(value):
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


@st.composite
def lines(draw):
    labels = draw(st.dictionaries(label_names, label_values, max_size=3))
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    trailing = draw(st.sampled_from(["", ","])) if inside else ""
    braces = f"{{{inside}{trailing}}}" if inside or draw(st.booleans()) else ""
    stamp = draw(st.sampled_from(["", " 1700000000000"]))
    lead, gap = draw(spaces), draw(gaps)
    return f"{lead}{draw(names)}{braces}{gap}{shown(draw(values))}{stamp}"


noise = st.sampled_from(["", "# a comment", "# HELP c what c is", "# EOF", "#c 1"])
pages = st.lists(lines() | noise, max_size=12).map(lambda rows: "".join(f"{r}\n" for r in rows))


def same(samples):
    """Samples as comparable tuples: NaN equals NaN."""
    return sorted((one.name, sorted(one.labels.items()), repr(float(one.value))) for one in samples)


def official(page):
    families = text_string_to_metric_families(page)
    every = [one for family in families for one in family.samples]
    return [one for one in every if one.name in WANTED]


class TestScanner:
    """The scanner against the official parser."""

    @given(pages)
    def test_it_reads_what_the_official_parser_reads(self, page):
        """Every wanted sample of a legal page is found with its labels and value, and no other."""
        assert same(official(page)) == same(Scanner(WANTED).scan(page.encode()))

    @given(pages, st.data())
    def test_a_truncated_page_gives_its_whole_lines(self, page, data):
        """A page cut anywhere gives exactly the samples of the lines that end before the cut."""
        raw = page.encode()
        cut = raw[: data.draw(st.integers(0, len(raw)))]
        whole = cut[: cut.rfind(b"\n") + 1]

        assert same(official(whole.decode())) == same(Scanner(WANTED).scan(cut))

    @given(st.binary(max_size=300) | pages.map(str.encode), st.binary(max_size=8), st.data())
    def test_a_hostile_page_never_raises(self, page, splinter, data):
        """Any bytes at all give a list of samples with wanted names."""
        at = data.draw(st.integers(0, len(page)))
        found = Scanner(WANTED).scan(page[:at] + splinter + page[at:])

        assert {one.name for one in found} <= set(WANTED)

    def test_a_second_page_is_read_as_well_as_the_first(self):
        """Label sets remembered from one page serve the next one with its own values."""
        scanner = Scanner(["x"])
        scanner.scan(b'x{a="1"} 1\n')

        assert [Sample("x", {"a": "1"}, 2.0)] == scanner.scan(b'x{a="1"} 2\n')

    def test_openmetrics_with_exemplars_reads_the_same(self):
        """An exemplar after a value is no part of it; the OpenMetrics parser agrees."""
        page = (
            "# TYPE b_seconds histogram\n"
            'b_seconds_bucket{le="1.0"} 3 # {trace_id="a}b"} 0.5 1700000000.0\n'
            'b_seconds_bucket{le="+Inf"} 4\n'
            "b_seconds_count 4\n"
            "b_seconds_sum 2.5\n"
            "# TYPE c gauge\n"
            "c NaN\n"
            "# EOF\n"
        )
        families = openmetrics_families(page)
        expected = [one for family in families for one in family.samples if one.name in WANTED]

        assert same(expected) == same(Scanner(WANTED).scan(page.encode()))

    def test_without_wanted_names_nothing_is_found(self):
        """A scanner of no names finds no samples."""
        assert Scanner([]).scan(b"x 1\n") == []

    def test_carriage_returns_do_not_hide_a_line(self):
        """A page with Windows line ends reads like any other."""
        assert [Sample("x", {}, 1.0)] == Scanner(["x"]).scan(b"x 1\r\ny 2\r\n")


class TestTotal:
    """One number for a whole engine."""

    def test_tensor_parallel_ranks_do_not_add_up_and_groups_do(self):
        """Ranks of one data-parallel group show the same requests; groups show different ones."""
        samples = [
            Sample("q", {"tp_rank": "0", "dp_rank": "0"}, 3.0),
            Sample("q", {"tp_rank": "1", "dp_rank": "0"}, 4.0),
            Sample("q", {"tp_rank": "0", "dp_rank": "1"}, 2.0),
        ]

        assert total(samples, "q") == 6.0

    def test_the_empty_priority_is_the_total(self):
        """A gauge split by priority is not counted twice."""
        samples = [
            Sample("q", {"priority": ""}, 3.0),
            Sample("q", {"priority": "1"}, 2.0),
            Sample("q", {"priority": "2"}, 1.0),
        ]

        assert total(samples, "q") == 3.0

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_no_number_counts_nothing(self, value):
        """NaN and infinity are left out; alone they are no total."""
        assert None is total([Sample("q", {}, value)], "q")


class TestQuantile:
    """A quantile from buckets."""

    def test_it_lies_within_the_bucket_that_holds_it(self):
        """Nine of ten below 1 s and all below 2 s put the 95th percentile at 1.5 s."""
        samples = [
            Sample("t_bucket", {"le": "1.0"}, 9.0),
            Sample("t_bucket", {"le": "2.0"}, 10.0),
            Sample("t_bucket", {"le": "+Inf"}, 10.0),
        ]

        assert quantile(samples, "t", 0.95) == 1.5

    def test_above_every_bound_it_is_the_last_bound(self):
        """What lies beyond the last finite bucket is at least its bound."""
        samples = [
            Sample("t_bucket", {"le": "1.0"}, 1.0),
            Sample("t_bucket", {"le": "+Inf"}, 10.0),
        ]

        assert quantile(samples, "t", 0.99) == 1.0

    def test_without_observations_there_is_none(self):
        """A histogram that never counted has no quantile, nor has an absent one."""
        assert None is quantile([Sample("t_bucket", {"le": "+Inf"}, 0.0)], "t", 0.5)
        assert None is quantile([], "t", 0.5)
