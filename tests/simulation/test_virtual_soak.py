"""A short soak in virtual time: hours of calm and of faults, nothing false and nothing missed."""

import math

import pytest

from tandem.testing.soak import bound, virtual_days

HOURS = 0.12
SEEDS = (1, 2, 3, 7)


@pytest.mark.timeout(120)
def test_calm_hours_give_nothing_to_act_on():
    """Over several seeds, machines and disturbances no finding asks for an act."""
    found = virtual_days(HOURS * len(SEEDS) / 24, SEEDS, stalls=False)

    assert found["false"] == []
    assert found["days"] == pytest.approx(HOURS * len(SEEDS) / 24, rel=0.2)


@pytest.mark.parametrize(("events", "days", "most"), [(0, 30.0, 0.0999), (1, 1.0, 4.744)])
def test_the_bound_is_poissons(events, days, most):
    """None in thirty days proves less than one in ten days; the rule of three, exactly."""
    assert math.isclose(bound(events, days), most, rel_tol=1e-3)
