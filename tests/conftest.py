"""Rules every test runs under: the `needs` marker and one seed for order, data and Hypothesis.

`@pytest.mark.needs("router", "model")` skips a test where the machine lacks one of them, and says
why. Where `TANDEM_REQUIRE=router,model` promises them, the same lack fails the test.
"""

import os
import random

import pytest
from hypothesis import settings

import machine

# A run that is slow because the machine is busy is no failure; the seed is printed, and a failing
# example comes with the line that replays it.
settings.register_profile("tandem", deadline=None, print_blob=True, max_examples=100)
settings.load_profile("tandem")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Refuse a wrong `TANDEM_REQUIRE`, and give Hypothesis the seed that the order has."""
    try:
        machine.promised(os.environ.get("TANDEM_REQUIRE", ""))
    except ValueError as wrong:
        raise pytest.UsageError(str(wrong)) from wrong
    if getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = random.SystemRandom().getrandbits(32)
    seed = getattr(config.option, "randomly_seed", None)
    if config.option.hypothesis_seed is None and isinstance(seed, int):
        config.option.hypothesis_seed = seed


def pytest_report_header(config):
    """Print what the run is held to; pytest-randomly prints the one seed."""
    required = os.environ.get("TANDEM_REQUIRE", "") or "nothing"
    return f"that seed is Hypothesis's too; required of this machine: {required}"


def pytest_runtest_setup(item):
    """Skip, or fail where it is promised, a test that needs what this machine lacks."""
    required = machine.promised(os.environ.get("TANDEM_REQUIRE", ""))
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        if name not in machine.PROBES:
            pytest.fail(f"needs({name!r}): known names are {sorted(machine.PROBES)}", pytrace=False)
        if reason := machine.lacks(name):
            if name in required:
                pytest.fail(f"TANDEM_REQUIRE promises {name}, but {reason}", pytrace=False)
            pytest.skip(f"needs {name}: {reason}")
