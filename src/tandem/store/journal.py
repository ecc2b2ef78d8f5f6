"""The journal of one repair: intents before, outcomes after, on the disk before anyone acts.

For: what a resumed repair needs to know. Not for: telling a story; those are events.
"""

import time
from pathlib import Path

import msgspec

from tandem.records import Record
from tandem.store import paper, redact
from tandem.store.state import State, told


class StoreJournal:
    """Appends to the rolling state, and to the incident's folder when it has one."""

    def __init__(self, state: State, incident_id: str, folder: Path) -> None:
        """Journal of one incident, or of a plan without one (`up`, `down`)."""
        self._state = state
        self._incident_id = incident_id
        self._folder = folder

    def append(self, record: Record) -> None:
        """Append one record durably; raises `WorldError` when the disk refuses: then do not act."""
        kept = redact.record(record)
        with told(self._state.path, "writing the journal"), self._state.durable():
            (number,) = self._state.ids(1)
            body = msgspec.json.encode(kept).decode()
            self._state.put_journal(number, self._incident_id, time.time(), body)
        if (self._folder / paper.FILE_NAME).exists():
            paper.append(self._folder, [kept])

    def records(self) -> list[Record]:
        """Everything appended so far, by any process, oldest first."""
        with told(self._state.path, "reading the journal"):
            return [paper.decoded(body) for body in self._state.journal(self._incident_id)]
