"""Fixtures that several unit tests share."""

import asyncio

import pytest

import faults
from sites import Site, inline


@pytest.fixture
def site_of(tmp_path, monkeypatch):
    """Give watched deployments, each in a folder of its own; their stores are closed afterwards."""
    monkeypatch.setattr(asyncio, "to_thread", inline)
    made = []

    def make(paint=faults.stale_peers, **how):
        root = tmp_path / str(len(made))
        root.mkdir()
        made.append(Site(root, paint, **how))
        return made[-1]

    yield make
    for site in made:
        site.close()
