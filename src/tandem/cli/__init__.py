"""The words a person types, one file per group.

For: parsing, showing, and saying what to do next. Not for: deciding anything; that is the stages'.
Nothing heavy is imported before a word runs, so that `tandem --help` is immediate.
"""
