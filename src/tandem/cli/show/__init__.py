"""How each record looks on a screen: one file per record, Rich renderables, no I/O.

For: what a tired operator wants to read, compact and aligned, with colour never alone.
Not for: reports (`tandem.report`), or JSON (`cli/screen.py` prints the record itself).
"""
