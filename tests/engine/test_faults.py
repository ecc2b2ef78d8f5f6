"""The switchboard itself: what is on is shown, kept and described, and nothing else is."""

import json

import msgspec
import pytest

from tandem_engine.config import ConfigError
from tandem_engine.faults import FAMILIES, Switchboard, catalogue_gaps, listing


class TestCatalogue:
    def test_every_fault_is_described_and_nothing_else_is(self):
        """The catalogue is the switches."""
        assert catalogue_gaps() == set()

    def test_names_are_unique_over_the_families(self):
        """A name belongs to one family: `PUT /faults` is flat."""
        names = [field for family in FAMILIES for field in family.kind.__struct_fields__]

        assert sorted(set(names)) == sorted(names)

    def test_the_listing_says_looks_and_cure_of_every_fault(self):
        """Every key, with what heals it."""
        shown = listing()
        keys = [key for family in FAMILIES for key in family.catalogue]

        assert [key for key in keys if f"  {key}\n" not in shown] == []
        assert shown.count("Heals: ") == len(keys)


class TestSwitchboard:
    def test_nothing_is_on_at_first(self):
        """Defaults are harmless, and not shown."""
        assert Switchboard(None).on() == {}

    def test_a_change_is_kept_in_the_file_and_goes_with_its_default(self, tmp_path):
        """What is on is written; what is off again is not."""
        path = tmp_path / "faults.json"
        board = Switchboard(str(path))
        board.change(b'{"peer_memory": "stale"}')

        assert {"peer_memory": "stale"} == board.on() == json.loads(path.read_text())
        assert Switchboard(str(path)).peers.memory() == "stale"
        board.change(b'{"peer_memory": "leases"}')
        assert {} == board.on() == json.loads(path.read_text())

    @pytest.mark.parametrize("body", [b'{"peer_memory": 1}', b'{"nothing": 1}', b"[]", b"{"])
    def test_what_is_unknown_changes_nothing(self, tmp_path, body):
        """Neither the switches nor the file."""
        path = tmp_path / "faults.json"
        board = Switchboard(str(path))
        with pytest.raises(msgspec.MsgspecError):
            board.change(body)

        assert (board.on(), path.exists()) == ({}, False)

    def test_a_file_that_says_something_unknown_is_refused(self, tmp_path):
        """By its name, before anything is served."""
        path = tmp_path / "faults.json"
        path.write_text('{"amnesia": true}')
        with pytest.raises(ConfigError, match="amnesia"):
            Switchboard(str(path))
