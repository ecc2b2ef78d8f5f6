"""The failure modes: one file each, found by looking; adding one edits no other file.

For: `discover`, which the wiring calls once. Not for: any knowledge: that is in the files.
"""

import dataclasses
import hashlib
import importlib
import pkgutil

from tandem.ports import Mode

__all__ = ["discover"]

REASONING = (("tandem", "signs.py"), ("tandem", "facts.py"))
"""Code outside this folder that modes reason with."""


def discover() -> tuple[Mode, ...]:
    """Every mode in this folder, by slug; its version is a hash of the code it is made of.

    A file without `MODE` is shared by the others, so its text is part of each one's version.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    modes = {name: getattr(module, "MODE", None) for name, module in modules.items()}
    shared = [(__name__, f"{name}.py") for name in names if not isinstance(modes[name], Mode)]
    ground = b"".join(pkgutil.get_data(*place) or b"" for place in (*REASONING, *shared))
    found = []
    for name, mode in modes.items():
        if isinstance(mode, Mode):
            text = pkgutil.get_data(__name__, f"{name}.py") or b""
            version = hashlib.sha256(ground + text).hexdigest()[:12]
            found.append(dataclasses.replace(mode, version=version))
    return tuple(sorted(found, key=lambda mode: mode.slug))
