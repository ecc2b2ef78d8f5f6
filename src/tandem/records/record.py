"""The one parent of all records."""

import msgspec


class Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="record",
    tag=str.lower,
):
    """A frozen, keyword-only struct; its JSON carries its class name under `record`."""
