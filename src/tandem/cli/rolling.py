"""Judging what was collected last: the store's rolling window, without looking anew.

For: `detect` by hand. Not for: sealed incidents (`sealed.py`).
"""

import time
from pathlib import Path

from tandem.detect import detect
from tandem.facts import Facts
from tandem.parts import DETECT_WINDOW_S
from tandem.records import Finding
from tandem.records import vocabulary as v
from tandem.store import Store
from tandem.wiring import find_settings


def findings_now(config: Path | None) -> tuple[tuple[Finding, ...], float | None, float]:
    """Detect over the rolling window: the open findings, the newest observation's time, and now."""
    settings = find_settings(config)
    now = time.time()
    store = Store.open(Path(settings.root), settings)
    try:
        facts = store.facts(now=now, window_s=DETECT_WINDOW_S)
        findings = detect(facts, tuple(store.open_findings()), settings.detect)
    finally:
        store.close()
    standing = tuple(finding for finding in findings if finding.closed_at is None)
    return standing, _newest_at(facts), now


def _newest_at(facts: Facts) -> float | None:
    """When anything was last seen of any member: every sweep looks at process and health."""
    looks = [
        facts.last(subject, name)
        for name in (v.ALIVE, v.HEALTH_STATUS)
        for subject in facts.subjects(name)
    ]
    return max((look.at for look in looks if look is not None), default=None)
