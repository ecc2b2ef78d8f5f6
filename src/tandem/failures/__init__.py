"""The failure modes: one file each, found by looking; adding one edits no other file.

For: `discover`, which the wiring calls once. Not for: any knowledge: that is in the files.
"""

import dataclasses
import hashlib
import importlib
import pkgutil

from tandem.ports import Mode

__all__ = ["discover"]

SHARED = (("tandem", "signs.py"), ("tandem", "facts.py"), (__name__, "answers.py"))
"""Code that every mode reasons with; its text is part of each mode's version."""


def discover() -> tuple[Mode, ...]:
    """Every mode in this folder, by slug, each with the hash of its code as its version."""
    shared = b"".join(pkgutil.get_data(package, name) or b"" for package, name in SHARED)
    found = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        mode = getattr(importlib.import_module(f"{__name__}.{module.name}"), "MODE", None)
        if isinstance(mode, Mode):
            text = pkgutil.get_data(__name__, f"{module.name}.py") or b""
            version = hashlib.sha256(shared + text).hexdigest()[:12]
            found.append(dataclasses.replace(mode, version=version))
    return tuple(sorted(found, key=lambda mode: mode.slug))
