"""The router that disagrees with its engines, and when it is cleared."""

import faults
from answers import answers, results
from judged import facts_of, judged
from scenes import DECODE, PREFILL, ROUTER
from tandem.failures.router_state_divergence import MODE, implicates
from tandem.records import vocabulary as v


class TestDiverges:
    """The failure itself."""

    def test_direct_completes_and_routed_does_not(self):
        """Probe, books and breaker all speak of the router."""
        assert answers(MODE, facts_of(faults.router_diverges)) == {
            "direct-completes-routed-does-not": "supports strong",
            "engines-idle-router-waits": "supports strong",
            "breaker-open": "supports moderate",
        }

    def test_a_worker_called_unhealthy_that_answers_supports_it(self):
        """The router's picture of a worker is wrong."""
        scene = faults.serving()
        scene.see("router", ROUTER, v.WORKER_HEALTHY, value=False, label=DECODE)
        said = results(MODE, scene)["breaker-open"]

        assert said.answer == "supports"
        assert DECODE in said.because

    def test_its_repair_is_the_router_alone(self):
        """The scope is the router, and engine restarts are cleared."""
        scene = faults.serving().restart(PREFILL)
        [change] = scene.facts().changes_of(PREFILL)
        said = implicates(scene.facts(), change)

        assert judged(faults.router_diverges()).modes[0].scope == "router"
        assert said is not None
        assert said.answer == "contradicts"


class TestCleared:
    """What rules it out."""

    def test_a_direct_probe_that_hangs_too_excludes_it(self):
        """What hangs without the router does not hang because of it."""
        found = answers(MODE, facts_of(faults.stale_peers))

        assert found["direct-completes-routed-does-not"] == "contradicts decisive"
        assert found["engines-idle-router-waits"] == "contradicts strong"

    def test_routed_probes_that_complete_clear_it(self):
        """A router that serves now is well."""
        found = answers(MODE, facts_of(faults.serving))

        assert found["direct-completes-routed-does-not"] == "contradicts strong"

    def test_luck_in_a_partial_stall_does_not_confirm_it(self):
        """A direct probe that had luck is outweighed by hand-offs held in the engines."""
        scene = faults.serving().restart(DECODE)
        scene.prefill.queues, scene.decode.queues = {"inflight": 2.0}, {"transfer": 1.0}
        scene.active = 2.0
        scene.probes[ROUTER] = "stuck"
        said = judged(scene.run(20))

        assert said.cause == "degraded-pair-after-decode-restarts"

    def test_without_probes_it_cannot_be_named(self):
        """Where nobody probed, the disagreement of the books alone names no cause."""
        facts = facts_of(faults.router_diverges).without(v.PROBE)

        assert answers(MODE, facts)["direct-completes-routed-does-not"] == "unknown"
