"""Shipped for tests of plug-ins and for rehearsal: virtual time, a simulated fleet, conformance.

For: `VirtualClock`, `run`, `Fleet` with its faces and mechanisms, `check_engine` and
`check_supervisor` for whoever writes an adapter. Not for: anything that serves.
"""
