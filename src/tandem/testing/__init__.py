"""Shipped for tests of plug-ins and for rehearsal: virtual time, a simulated fleet, conformance.

For: `VirtualClock` and `run`; `Fleet` with its clients, mechanisms and a `Watch` over it;
`virtual_days`; `check_engine` and `check_supervisor` for whoever writes an adapter.
Not for: anything that serves.
"""

from tandem.testing.conformance import check_engine, check_engine_unreachable, check_supervisor
from tandem.testing.demand import Clients, Demand
from tandem.testing.fleet import Fleet
from tandem.testing.mechanisms import MECHANISMS, break_, heal
from tandem.testing.rooms import Machine
from tandem.testing.soak import virtual_days
from tandem.testing.virtual_time import VirtualClock, run
from tandem.testing.watching import Watch

__all__ = [
    "MECHANISMS",
    "Clients",
    "Demand",
    "Fleet",
    "Machine",
    "VirtualClock",
    "Watch",
    "break_",
    "check_engine",
    "check_engine_unreachable",
    "check_supervisor",
    "heal",
    "run",
    "virtual_days",
]
