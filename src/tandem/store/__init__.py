"""What Tandem remembers: the rolling state, sealed incidents, journals and locks.

For: `Store`, shared by every process of one deployment, and `load_incident`, which needs nothing
but a folder. Not for: judging what is remembered.
"""

from tandem.store.incidents import load_incident, load_records
from tandem.store.journal import StoreJournal
from tandem.store.rolling import Store

__all__ = ["Store", "StoreJournal", "load_incident", "load_records"]
