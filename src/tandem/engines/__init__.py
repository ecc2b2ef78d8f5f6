"""Engine families, one file each: what they call things, how to ask them, what is known of them.

For: turning what an engine says into observations and traits. Not for: judging any of it.
"""
