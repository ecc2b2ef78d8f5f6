"""What every failure mode declares, whoever wrote it."""

import importlib
import inspect
import re

import pytest

from tandem.diagnose.weigh import WEIGHTS
from tandem.failures import discover

MODES = discover()
EVERY = pytest.mark.parametrize("mode", MODES, ids=[mode.slug for mode in MODES])
HEADINGS = (
    "What you see",
    "Why it is silent",
    "What rules it in",
    "What rules it out",
    "Repair and its safety",
    "References",
)
SCOPES = {"nothing", "router", "engine", "pair", "role", "all", "config"}
COMPONENTS = {"kv-transfer", "scheduler", "compute", "admission", "memory", "logging", "routing"}
CLASSES = {
    "stale-peer-after-one-sided-restart",
    "transfer-fault",
    "unpropagated-failure-or-abort-cascade",
    "collective-desync",
    "scheduler-blocked-on-peer-io",
    "gpu-kernel-deadlock",
    "kv-exhaustion-deadlock",
    "output-corruption",
    "router-state-divergence",
    "handshake-metadata-mismatch",
    "config-mismatch",
    "process-crash",
    "health-signal-misleading",
    "resource-leak",
    "http-layer-lost-response",
    "control-plane-lease",
    "overload-not-stall",
    "cold-start",
}


def module_of(slug: str):
    """The module of a mode: its slug with underscores."""
    return importlib.import_module(f"tandem.failures.{slug.replace('-', '_')}")


@EVERY
def test_its_file_is_named_for_it(mode):
    """A mode lives in a file of its own name."""
    assert module_of(mode.slug).MODE.slug == mode.slug


@EVERY
def test_its_page_has_every_heading(mode):
    """The docstring has the six headings, in order, each with text under it."""
    text = inspect.getdoc(module_of(mode.slug)) or ""
    places = [re.search(rf"^{heading}$", text, re.MULTILINE) for heading in HEADINGS]

    assert all(places)
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)
    bodies = re.split("|".join(f"^{heading}$" for heading in HEADINGS), text, flags=re.MULTILINE)
    assert all(len(body.split()) >= 5 for body in bodies)


@EVERY
def test_its_declaration_is_complete(mode):
    """Class, scope, safety and components are words that the rest of Tandem knows."""
    assert mode.incident_class in CLASSES
    assert mode.scope in SCOPES
    assert len(mode.safety.split()) >= 5
    assert set(mode.components) <= COMPONENTS
    assert re.fullmatch(r"[a-z0-9]{12}", mode.version)


@EVERY
def test_its_names_refer_to_its_tests(mode):
    """What it needs and what speaks of its mechanisms are tests it has."""
    source = inspect.getsource(module_of(mode.slug))
    names = set(re.findall(r'test = "([a-z0-9-]+)"', source))

    assert set(mode.needs) <= names
    assert set(mode.mechanisms.values()) <= names
    assert set(mode.mechanisms) <= set(mode.aliases)


@EVERY
def test_every_strength_is_justified(mode):
    """Each strong or decisive answer has a comment that says why it is worth that."""
    source = inspect.getsource(module_of(mode.slug))
    # Whether a change belongs to the cause is answered, not weighed.
    lines = re.sub(r"(?s)def implicates.*?\n\n\n", "", source).splitlines()
    for number, line in enumerate(lines):
        if re.search(r'(supports|contradicts)\(.*"(decisive|strong)"', line):
            above = "\n".join(lines[max(0, number - 12) : number + 1]).lower()
            assert re.search(r"# .*(decisive|strong)", above), line


def test_names_are_unique():
    """No slug or alias means two things."""
    names = [name for mode in MODES for name in (mode.slug, *mode.aliases)]

    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_they_are_found_in_order():
    """Discovery is sorted and finds the modes that tell the incident from its look-alikes."""
    slugs = [mode.slug for mode in MODES]

    assert slugs == sorted(slugs)
    assert set(slugs) >= {
        "abort-cascade-wedge",
        "collective-desync",
        "dead-worker",
        "degraded-pair-after-decode-restarts",
        "overload-not-stall",
        "router-state-divergence",
    }


def test_strengths_are_ordered():
    """A stronger word is worth more, and decisive outweighs two strong answers."""
    assert WEIGHTS["decisive"] > 2 * WEIGHTS["strong"]
    assert WEIGHTS["strong"] > WEIGHTS["moderate"] > WEIGHTS["weak"] > 0
