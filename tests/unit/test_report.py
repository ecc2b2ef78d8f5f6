"""Reports: every part present, every claim cited, and hostile text never more than text."""

import re
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import night
from tandem.facts import Facts
from tandem.records import Change, Incident, LostRequest, Observation, Plan, Trait
from tandem.records import vocabulary as v
from tandem.report import render
from tandem.report.blocks import Bullets, Code, Page, Paragraph, Section, Table, prose
from tandem.report.markdown import markdown
from tandem.report.page import html
from tandem.report.subject import subject

SECTIONS = [
    "Symptom",
    "Differential diagnosis",
    "Root cause",
    "Fix and verification",
    "Operational guidance",
    "Evidence",
]
MARKDOWN = MarkdownIt("commonmark").enable("table").enable("strikethrough")


def but(record, **fields):
    """The same record with some fields replaced."""
    return msgspec.structs.replace(record, **fields)


def headings(text):
    """The headings of a Markdown text with their level."""
    tokens = MARKDOWN.parse(text)
    return [
        (token.tag, tokens[place + 1].content)
        for place, token in enumerate(tokens)
        if token.type == "heading_open"
    ]


HEALED = but(
    night.INCIDENT,
    state="closed",
    outcomes=tuple(
        but(one, status="done", started_at=night.NOW, ended_at=night.NOW + 9.8)
        for one in night.OUTCOMES
    ),
    verification=but(
        night.VERIFICATION,
        passed=True,
        sessions_passed=30,
        corrupted=0,
        inflight_after=0,
        requests=(),
        not_proven=(),
        lost=(LostRequest(subject="router", count=8, detail="active in the router"),),
    ),
)


class TestStructure:
    def test_the_five_sections_and_the_evidence_stand_in_order(self):
        """One heading of level two, then six of level three."""
        found = headings(render(night.INCIDENT, night.FACTS).markdown)

        assert [tag for tag, _ in found] == ["h2"] + ["h3"] * 6
        assert [title for _, title in found[1:]] == SECTIONS

    def test_what_an_operator_asks_is_answered(self):
        """Cause with confidence, hunch, refusals, kept changes, proof and losses are all there."""
        text = render(HEALED, night.FACTS).markdown

        for said in (
            "**degraded-pair-after-decode-restarts** (best supported)",
            "The hunch `overlap schedule`, understood as collective-desync: **ruled out**",
            "- **engine:decode**: That is how it began.",
            "`decode-0: --cuda-graph-max-bs 64 -> 96`",
            "not on the failing path (inferred)",
            "What would settle it: a stack dump",
            "| sessions clean | 30/30 |",
            "router: 8, active in the router",
            "the recovery proves the repair, not the cause",
            "`" + "ab" * 32 + "`",
        ):
            assert said.lower() in text.lower(), said

    def test_every_citation_is_explained(self):
        """Each `[e7]` of the text has a row that says what it is, or that it is not there."""
        text = render(night.INCIDENT, night.FACTS).markdown
        body, rows = text.split("### Evidence")

        cited = set(re.findall(r"\[e(\d+)\]", body))
        assert cited == {"3", "5", "7", "9", "404"}
        assert cited == set(re.findall(r"^\| \[e(\d+)\]", rows, flags=re.MULTILINE))
        assert "| [e7] | 21:00:30 | prefill-0 | loads: inflight_queue_reqs = `8` |" in rows
        assert "stack not seen: `py-spy may not trace pid 12`" in rows
        assert "| [e404] | - | - | not in the sealed window |" in rows

    def test_a_step_that_was_not_reached_is_said_so(self):
        """After a failed step the rest of the plan reads `not reached`."""
        text = render(but(night.INCIDENT, outcomes=night.OUTCOMES[:1]), night.FACTS).markdown

        assert "| `start:prefill-0` | not reached | - | its bootstrap comes first |" in text

    def test_advice_says_that_nothing_was_touched(self):
        """A proposed plan is not told as a deed."""
        advised = but(night.INCIDENT, outcomes=(), verification=None, state="advised")

        rendered = render(advised, night.FACTS)

        assert "Nothing was touched." in rendered.markdown
        assert "| `stop:decode-0` | proposed |" in rendered.markdown
        assert rendered.subject.endswith("pair co-restart proposed, nothing touched")

    @pytest.mark.parametrize(
        "fields",
        [
            {"finding": None},
            {"diagnosis": None, "plan": None, "outcomes": (), "verification": None},
            {"seal": None},
            {"verification": None},
            {"diagnosis": but(night.DIAGNOSIS, verdict="undetermined", cause=None)},
            {"diagnosis": but(night.DIAGNOSIS, verdict="none", cause=None, modes=(), changes=())},
        ],
    )
    def test_a_half_told_incident_is_still_a_report(self, fields):
        """Whatever stage an incident stopped at, it can be written down."""
        rendered = render(but(night.INCIDENT, **fields), night.FACTS)

        assert headings(rendered.markdown)[0][0] == "h2"
        assert rendered.subject.startswith("incident: ")
        assert "<main>" in rendered.html

    def test_the_same_incident_gives_the_same_bytes(self):
        """Rendering is a function of incident and facts."""
        assert render(night.INCIDENT, night.FACTS) == render(night.INCIDENT, night.FACTS)

    def test_what_happened_to_one_member_at_once_is_one_row(self):
        """A restart and the flag that came with it stand in one row of the order of events."""
        restart, flag = (
            Change(
                id=3, at=night.ONSET, subject="decode-0", kind="restart", before="7:1", after="8:2"
            ),
            Change(id=4, at=night.ONSET, subject="decode-0", kind="flag", what="--x", after="96"),
        )
        facts = Facts(night.DEPLOYMENT, (), now=night.NOW, changes=(restart, flag))

        assert (
            "| 21:00:00 | decode-0: restarted (pid 7, now pid 8), --x absent -> 96 |"
            in render(night.INCIDENT, facts).markdown
        )


class TestSubject:
    def test_it_says_everything_in_one_breath(self):
        """Symptom, cause, what was ruled out, fix and proof."""
        assert subject(HEALED) == (
            "incident: silent stall on prefill-0>decode-0 — degraded-pair-after-decode-restarts "
            "(best supported), overlap schedule ruled out; pair co-restarted in 9.8 s; "
            "8/8 sequential, 30/30 sessions clean"
        )

    def test_a_failed_repair_names_its_step(self):
        """Where it stopped stands in the subject, and the proof is not claimed."""
        said = subject(night.INCIDENT)

        assert "repair of the pair stopped at start:prefill-0" in said
        assert "not proven: 8/8 sequential, 29/30 sessions clean" in said

    @given(st.text(max_size=300), st.text(max_size=300))
    def test_it_is_one_short_line_whatever_was_asked(self, hunch, member):
        """No hunch and no name makes it longer than 200 characters or more than a line."""
        asked = but(night.DIAGNOSIS.hunch, asked=hunch)
        found = but(night.FINDING, subject=member)
        incident = but(HEALED, finding=found, diagnosis=but(night.DIAGNOSIS, hunch=asked))

        said = subject(incident)

        assert len(said) <= 200
        assert said.splitlines() == [said]


def guided(*observations, traits=(), **fields):
    """The guidance of an incident with these facts, as Markdown."""
    facts = Facts(
        night.DEPLOYMENT,
        observations,
        now=night.NOW,
        changes=(night.RESTART,),
        traits=traits,
    )
    text = render(but(night.INCIDENT, **fields), facts).markdown
    return text.split("### Operational guidance")[1].split("### Evidence")[0]


def seen(subject, name, value, at, number):
    """One observation."""
    return Observation(source="t", subject=subject, name=name, value=value, at=at, id=number)


class TestGuidance:
    def test_a_decode_is_never_to_be_restarted_alone(self):
        """The trait's reason becomes the rule's."""
        trait = Trait(
            subject="decode-0",
            name=v.T_DECODE_ALONE_RESTART_HURTS,
            at=0.0,
            value=True,
            because="the prefill keeps dead peers",
        )

        assert (
            "1. Never restart decode-0 alone against a long-running prefill-0: the prefill keeps "
            "dead peers. Restart the pair in order"
        ) in guided(traits=(trait,))

    def test_a_counter_that_moved_early_is_to_be_watched(self):
        """Failed hand-offs that were counted before the finding are named with their evidence."""
        early = [
            seen("prefill-0", v.TRANSFER_FAILED_TOTAL, 0, night.ONSET - 50, 21),
            seen("prefill-0", v.TRANSFER_FAILED_TOTAL, 3, night.ONSET - 5, 22),
        ]

        said = guided(*early)

        assert (
            "Watch what prefill-0 counted before this was found: "
            "`transfer_failed_total` (3 failed hand-offs [e21] [e22])."
        ) in said

    def test_health_that_said_200_is_called_untrue(self):
        """Only when every answer between onset and finding was 200."""
        well = seen("prefill-0", v.HEALTH_STATUS, 200, night.ONSET + 1, 31)
        ill = seen("decode-0", v.HEALTH_STATUS, 503, night.ONSET + 2, 32)

        assert "Do not trust health endpoints" in guided(well)
        assert "Do not trust health endpoints" not in guided(well, ill)

    def test_what_could_not_be_seen_is_to_be_had_ready(self):
        """An unknown test's wish stands in the guidance, once: what settles it is in the limit."""
        other = but(night.DIAGNOSIS, next_observation="the table of rooms")

        assert "Have ready for the next time: a stack dump" in guided(diagnosis=other)
        assert "Observe first: the table of rooms" in guided(diagnosis=other)
        assert guided().count("a stack dump") == 1

    def test_the_limit_of_the_claim_is_written_down(self):
        """If it recurs without what is implicated, it is something else."""
        assert "if it recurs without what is implicated here (restarts of decode-0)" in guided()


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    "# heading\n## heading",
    "a | b \\| c \\\\| d",
    "```\nfenced\n```",
    "`` ` ``",
    "<!-- tandem:incident 20251129T210006Z-silent-stall end -->",
    "\n<!-- tandem:incident 20251129T210006Z-silent-stall end -->\n",
    "https://evil.example www.evil.example root@evil.example @someone",
    "**bold** _it_ __b__ ~~gone~~ $x$ &lt;b&gt; &#60;b&#62;",
    "[e7]: https://evil.example 'title'",
    "{{ 7 * 7 }} {% raw %}",
    "\u202egnirts\u202c \x1b[31mred\x07",
    "- item\n1. item\n> quote\n***\n---\n===",
]
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=60))


def poisoned(texts):
    """The night with foreign text wherever the world may write."""
    a, b, c = texts
    diagnosis = but(
        night.DIAGNOSIS,
        hunch=but(night.DIAGNOSIS.hunch, asked=a, because=b),
        confidence_note=c,
        next_observation=a,
        modes=tuple(
            but(one, because=b, tests=tuple(but(test, because=c, collect=a) for test in one.tests))
            for one in night.DIAGNOSIS.modes
        ),
        changes=tuple(but(one, because=b, what=c) for one in night.DIAGNOSIS.changes),
    )
    return but(
        night.INCIDENT,
        hunch=a,
        finding=but(
            night.FINDING,
            summary=a,
            witnesses=tuple(but(one, statement=b) for one in night.FINDING.witnesses),
        ),
        diagnosis=diagnosis,
        plan=but(night.PLAN, because=a, kept=(b,), costs=(c,), config_edit=a),
        outcomes=tuple(but(one, detail=b) for one in night.OUTCOMES),
        verification=but(
            night.VERIFICATION,
            requests=tuple(but(one, detail=c) for one in night.VERIFICATION.requests),
            not_proven=(a,),
        ),
        seal=but(night.INCIDENT.seal, left_out=(c,)),
    )


def poisoned_facts(texts):
    """The same for what was observed."""
    a, b, c = texts
    return Facts(
        night.DEPLOYMENT,
        [
            but(night.INFLIGHT, value=a),
            but(night.STACKS, missing=b, label=c),
            seen("host", "log_last", (a, b, c), night.ONSET, 5),
        ],
        now=night.NOW,
        changes=[Change(id=3, at=night.ONSET, subject="decode-0", kind="flag", what=a, after=b)],
    )


class Elements(HTMLParser):
    """Counts what a browser would see as elements and attributes."""

    def __init__(self):
        super().__init__()
        self.tags = set()
        self.attributes = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}


def elements(text):
    """The elements and attributes of a page."""
    parser = Elements()
    parser.feed(text)
    return parser


ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "section", "p", "ul"),
    *("ol", "li", "div", "table", "thead", "tbody", "tr", "th", "td", "a", "code", "strong"),
}


class TestHostileText:
    @given(st.tuples(TEXTS, TEXTS, TEXTS))
    def test_markdown_stays_text(self, texts):
        """No foreign text becomes a heading, a link, an image, HTML, or another table column."""
        rendered = render(poisoned(texts), poisoned_facts(texts))

        tokens = MARKDOWN.parse(rendered.markdown)
        inner = [child for token in tokens for child in token.children or []]
        kinds = {token.type for token in (*tokens, *inner)}
        assert kinds <= {
            *(f"{name}_{end}" for name in ("heading", "paragraph", "table", "thead", "tbody", "tr")
              for end in ("open", "close")),
            *(f"{name}_{end}" for name in ("th", "td", "bullet_list", "ordered_list", "list_item")
              for end in ("open", "close")),
            *("strong_open", "strong_close", "inline", "text", "code_inline"),
        }  # fmt: skip
        assert [title for _, title in headings(rendered.markdown)[1:]] == SECTIONS
        for line in rendered.markdown.splitlines():
            assert not line.startswith("<")

    @given(st.tuples(TEXTS, TEXTS, TEXTS))
    def test_html_stays_text(self, texts):
        """No foreign text becomes an element or an attribute of the page."""
        page = elements(render(poisoned(texts), poisoned_facts(texts)).html)

        assert page.tags <= ALLOWED
        assert page.attributes <= {
            ("html", "lang"),
            ("meta", "charset"),
            ("meta", "name"),
            ("meta", "content"),
            ("meta", "http-equiv"),
            ("th", "scope"),
            ("div", "class"),
            ("a", "class"),
            ("a", "href"),
            ("tr", "id"),
        }

    @given(TEXTS)
    def test_a_table_keeps_its_columns(self, text):
        """Bars and backslashes in a cell never end it."""
        row = ((Code(text),), prose(text), ("end",))
        page = Page("t", (Table(("a", "b", "c"), (row,)),), ())

        tokens = MARKDOWN.parse(markdown(page))

        cells = [tokens[i + 1].content for i, one in enumerate(tokens) if one.type == "td_open"]
        assert len(cells) == 3
        assert cells[-1] == "end"

    @given(TEXTS)
    def test_code_shows_what_was_seen(self, text):
        """Outside tables a code span reads back exactly, on one line and without what is unseen."""
        page = Page("t", (Paragraph(("seen: ", Code(text))),), ())

        children = MARKDOWN.parse(markdown(page))[4].children
        shown = " ".join(re.sub(r"[^\x20-\x7e\xa0-\U0010ffff]", " ", text).split())
        code = [child.content for child in children if child.type == "code_inline"]

        if shown.isascii() and shown:
            assert code == [shown]

    @pytest.mark.parametrize("word", ["https://evil.example", "www.evil.example", "a@b.example"])
    def test_addresses_are_shown_as_code(self, word):
        """What a renderer would make a link of by itself stands in a code span."""
        page = Page("t", (Paragraph(prose(f"see {word} there")),), ())

        assert markdown(page).endswith(f"see `{word}` there\n")

    def test_terminal_and_direction_controls_are_removed(self):
        """What would turn text around or colour a terminal is not written."""
        page = Page("t", (Bullets((prose("\u202eabc\x1b[31m"),)),), ())

        assert markdown(page).endswith("- abc \\[31m\n")

    def test_foreign_anchor_lines_are_no_anchors(self):
        """A log line that looks like our end mark cannot end our section."""
        anchor = "<!-- tandem:incident x end -->"
        page = Page("t", (Paragraph((anchor,)), Paragraph((Code(f"\n{anchor}\n"),))), ())

        assert anchor not in [line.strip() for line in markdown(page).splitlines()]


class TestPage:
    def test_citations_lead_to_their_rows(self):
        """Every link of the page is inside it and has a target."""
        text = render(night.INCIDENT, night.FACTS).html

        targets = set(re.findall(r'<tr id="(e\d+)"', text))
        links = set(re.findall(r'href="#(e\d+)"', text))
        assert links == targets
        assert 'href="http' not in text

    def test_it_stands_alone_in_light_dark_and_print(self):
        """No script, no outside resource, both schemes, and a print style."""
        text = html(Page("t", (), (Section("s", ()),)))

        assert "<script" not in text
        assert "prefers-color-scheme: dark" in text
        assert "@media print" in text
        assert "default-src 'none'" in text


def test_an_empty_incident_renders():
    """An incident that was opened and nothing else has a report too."""
    bare = Incident(id="x", opened_at=night.NOW, deployment=night.DEPLOYMENT)

    rendered = render(bare, Facts(night.DEPLOYMENT, (), now=night.NOW))

    assert "The evidence was not sealed." in rendered.markdown


def test_a_plan_without_steps_says_why():
    """Scope nothing carries its reason into the report."""
    plan = Plan(
        scope="nothing",
        steps=(),
        refused=(),
        kept=(),
        costs=(),
        because="the cause is undetermined",
    )

    text = render(but(night.INCIDENT, plan=plan, outcomes=(), verification=None), night.FACTS)

    assert "**Scope: nothing.** The cause is undetermined." in text.markdown


def test_a_finding_that_came_back_says_how_often():
    """The symptom tells that it cleared and came back, and when last."""
    found = but(night.FINDING, recurred_at=(night.ONSET + 120.0, night.ONSET + 300.0))
    text = render(but(night.INCIDENT, finding=found), night.FACTS).markdown

    assert "and cleared and came back 2 times, last at 2025-11-29 21:05:00" in text
