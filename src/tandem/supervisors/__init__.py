"""Who starts and stops members on a host: one file per kind, each implements `ports.Supervisor`.

For: plug-ins, built in `wiring.py` alone. Not for: deciding when to start or stop anything.
"""
