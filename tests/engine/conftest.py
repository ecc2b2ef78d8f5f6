"""Every test of the engine that says it shows or heals a fault is held to it (`witness.py`)."""

import pytest

from engine import processes
from engine.witness import KINDS, Witness, marked


@pytest.fixture(autouse=True)
def witness(request, monkeypatch):
    """Watch the switches of a marked test, and fail it when it did not do what it says."""
    marks = list(request.node.iter_markers())
    if not any(mark.name in KINDS for mark in marks):
        yield None
        return
    callspec = getattr(request.node, "callspec", None)
    seen = Witness(monkeypatch)
    monkeypatch.setattr(processes, "OBSERVERS", [seen.spawned])
    yield seen
    said = marked(marks, callspec.params if callspec is not None else {})
    wrong = [why for kind, by, fault in said if (why := seen.contradicts(kind, by, fault))]
    if wrong:
        pytest.fail("; ".join(wrong))
