"""The switchboard itself: what is on is shown, kept and described, and nothing else is."""

import json

import msgspec
import pytest

from engine.witness import CATALOGUE, KINDS, claims
from tandem_engine.config import ConfigError
from tandem_engine.faults import FAMILIES, Switchboard, catalogue_gaps, listing

RESTARTS = ("Restarting", "A restart", "Starting it again")


class TestCatalogue:
    def test_every_fault_is_described_and_nothing_else_is(self):
        """The catalogue is the switches."""
        assert catalogue_gaps() == set()

    def test_every_fault_is_shown_and_healed_by_a_test(self):
        """Each by its switch or a restart, and by the restart that its text promises."""
        said = claims()
        lacking = {
            (kind, key)
            for key in CATALOGUE
            for kind in KINDS
            if not any((one, fault) == (kind, key) for one, _, fault in said)
        }
        promised = {key for key, text in CATALOGUE.items() if text.heals.startswith(RESTARTS)}
        restarted = {fault for _, by, fault in said if by == "restart"}

        assert lacking == set()
        assert promised - restarted == set()
        assert {fault for _, _, fault in said} <= set(CATALOGUE)

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

    @pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
    def test_every_switch_at_its_default_is_off(self, family):
        """Given by name, of whatever type: it is neither shown nor written."""
        board = Switchboard(None)
        off = msgspec.to_builtins(family.kind())

        assert off
        assert board.change(msgspec.json.encode(off)) == {}

    @pytest.mark.parametrize(
        "body", [b'{"peer_memory": 1}', b'{"nothing": 1}', b'{"self": 1}', b"[]", b"{"]
    )
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
