"""The selective scanner reads what the official parser reads, and survives what it does not."""

import contextlib
import gzip
import math
import time
import tracemalloc
import zlib

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from tandem import fetch
from tandem.scan import LABEL_SET_BYTES_MAX, Sample, Scanner, quantile, total

WANTED = ("a:reqs", "a:reqs_total", "b_seconds_sum", "b_seconds_count", "b_seconds_bucket", "c")
NAMES = (*WANTED, "a:req", "a:reqs_totals", "b_seconds", "cc", "d", "a")

names = st.sampled_from(NAMES)
label_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("__")
)
hostile = st.sampled_from(
    [
        "}",
        "{",
        '"',
        "\\",
        "\n",
        " # {",
        'a="b",',
        "\\n",
        '\\"',
        "le",
        "}} 1",
        "\n# EOF\n",
        "\u00e9\U0001f525",
    ]
)
label_values = (
    st.text(
        st.characters(codec="utf-8", exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
        max_size=12,
    )
    | hostile
    | st.lists(hostile, max_size=4).map("".join)
)
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


@st.composite
def metrics_lines(draw):
    """One family of the OpenMetrics format, as its parser accepts it: exemplars and timestamps."""
    labels = draw(st.dictionaries(label_names.filter(lambda name: name != "le"), label_values,
                                  max_size=2))  # fmt: skip
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    braces = f"{{{inside}}}" if inside else ""
    kind, name = draw(st.sampled_from([("gauge", "c"), ("counter", "a:reqs"), ("gauge", "d")]))
    amount = draw(st.integers(0, 2**40))
    stamp = draw(st.sampled_from(["", " 1700000000.5"]))
    if kind == "gauge":
        number = draw(st.sampled_from(["NaN", "+Inf", "-Inf", str(amount)]))
        return name, f"# TYPE {name} gauge\n{name}{braces} {number}{stamp}\n"
    # The official parser cannot read quotes within an exemplar.
    traced = draw(st.text("ab{}#,= \u00e9", max_size=8))
    exemplar = draw(st.sampled_from(["", f' # {{trace_id="{traced}"}} 0.5', " # {} 1 1700000000"]))
    return name, f"# TYPE {name} counter\n{name}_total{braces} {amount}{stamp}{exemplar}\n"


metrics_pages = st.lists(metrics_lines(), max_size=3, unique_by=lambda pair: pair[0]).map(
    lambda families: "".join(text for _, text in families) + "# EOF\n"
)

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

    @given(metrics_pages)
    def test_it_reads_what_the_official_openmetrics_parser_reads(self, page):
        """Exemplars, timestamps and `# EOF` change nothing of a sample."""
        found = [one for family in openmetrics_families(page) for one in family.samples]

        assert same([one for one in found if one.name in WANTED]) == same(
            Scanner(WANTED).scan(page.encode())
        )

    @given(pages, st.integers(2, 5))
    def test_a_series_that_stands_twice_is_found_twice_and_counts_once(self, page, times):
        """Duplicates are what the official parser makes of them; a total is that of one page."""
        twice = Scanner(WANTED).scan((page * times).encode())
        once = Scanner(WANTED).scan(page.encode())

        assert same(official(page * times)) == same(twice)
        assert [total(once, name) for name in WANTED] == [total(twice, name) for name in WANTED]

    @given(pages, st.data())
    def test_of_a_page_that_goes_on_no_family_is_read_in_part(self, page, data):
        """Whatever is found for a name before the cut is all that the whole page has of it."""
        families = sorted(
            page.splitlines(keepends=True), key=lambda line: line.split("{")[0].split()
        )
        raw = "".join(families).encode()
        cut = Scanner(WANTED).scan_cut(raw[: data.draw(st.integers(0, len(raw)))])
        found = {one.name for one in cut}
        whole = [one for one in Scanner(WANTED).scan(raw) if one.name in found]

        assert same(whole) == same(cut)

    @pytest.mark.parametrize("value", ["x" * 1_000_000, '\\\\\\"\\n' * 170_000, "}" * 1_000_000])
    def test_a_label_value_of_a_megabyte_is_read_and_not_remembered(self, value):
        """It costs its own length once, and nothing stays of it."""
        scanner = Scanner(["x"])
        page = f'x{{a="{value}"}} 1\nx{{a="2"}} 2\n'
        found = scanner.scan(page.encode())

        assert same(found) == same(
            [one for family in text_string_to_metric_families(page) for one in family.samples]
        )
        assert max(map(len, scanner._known)) <= LABEL_SET_BYTES_MAX

    @pytest.mark.parametrize(
        "line",
        ['x{a="' + "\\\\" * 300_000, 'x{a="' + '\\"' * 300_000 + "} 1", "x" + " " * 600_000 + "{"],
    )
    def test_a_hostile_line_costs_its_length(self, line):
        """A label that never ends is given up once, not once for each of its characters."""
        began = time.process_time()
        found = Scanner(["x"]).scan(f"{line}\nx 1\n".encode())

        assert [one for one in found if not one.labels] == [Sample("x", {}, 1.0)]
        assert time.process_time() - began < 5.0

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


@contextlib.asynccontextmanager
async def served(body, **headers):
    """An HTTP server with one page; its URL."""

    async def answer(_request):
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


class TestWire:
    """Pages as they come."""

    @pytest.mark.parametrize(
        ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
    )
    async def test_a_compressed_page_reads_like_a_plain_one(self, encoding, pack):
        """Servers may compress what they are asked for."""
        page = b'x{a="1"} 1\n' * 5000
        async with (
            served(pack(page), **{"Content-Encoding": encoding}) as url,
            fetch.session() as http,
        ):
            got = await fetch.fetch(http, url, timeout_s=5.0)

        assert (got.ok, got.body) == (True, page)

    async def test_a_page_that_unpacks_without_end_is_read_to_the_bound(self):
        """A small body that would fill the memory costs the bound, and says that it was cut."""
        bomb = gzip.compress(b'x{a="1"} 1\n' * 20_000_000, compresslevel=1)
        bound = 1_000_000
        async with served(bomb, **{"Content-Encoding": "gzip"}) as url, fetch.session() as http:
            tracemalloc.start()
            try:
                got = await fetch.fetch(http, url, timeout_s=10.0, body_bytes_max=bound, cut=True)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()

        assert (got.ok, got.cut, len(got.body)) == (True, True, bound)
        assert peak < 16_000_000


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
