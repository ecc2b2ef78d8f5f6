"""Router families, one file each: their workers, breakers and counters, in our vocabulary.

For: turning what a router says into observations. Not for: judging any of it.
"""
