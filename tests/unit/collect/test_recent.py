"""Real traffic stands in for a probe only where it proves the path and nothing is held."""

import pytest

from tandem.collect.recent import Recent
from tandem.ports import Harvest
from tandem.records import Deployment, Member, Observation, Role, Trait
from tandem.records import vocabulary as v

CELL = "p0>d0"


def deployment(prefills=1, decodes=1):
    members = [("r", Role.ROUTER, "smg")]
    members += [(f"p{number}", Role.PREFILL, "sglang") for number in range(prefills)]
    members += [(f"d{number}", Role.DECODE, "sglang") for number in range(decodes)]
    return Deployment(
        name="x",
        members=tuple(
            Member(name=name, role=role, url=f"http://127.0.0.1:{at}", engine=engine)
            for at, (name, role, engine) in enumerate(members, 1)
        ),
    )


class Bench:
    """Harvests painted second by second."""

    def __init__(self, **size):
        self.at = 100.0
        self.deployment = deployment(**size)
        self.recent = Recent(self.deployment, lambda: self.at)
        self.queues = {}
        self.done = 0
        self.tokens = 0

    def second(self, completed=0, probes=(), tokens=0):
        """One second in which requests completed everywhere and probes ended."""
        self.at += 1.0
        self.done += completed + len(probes)
        self.tokens += tokens
        rows = [("probe", subject, v.PROBE, "", "completed") for subject in probes]
        rows.append(("router", "r", v.ROUTER_RESPONSES_TOTAL, "200", self.done))
        for member in self.deployment.members:
            if member.role is Role.PREFILL:
                rows.append(("metrics", member.name, v.TRANSFERS_TOTAL, "", self.done))
                queues = (v.BOOTSTRAP_QUEUE_REQS, v.INFLIGHT_QUEUE_REQS)
            elif member.role is Role.DECODE:
                rows.append(("metrics", member.name, v.REQUESTS_TOTAL, "", self.done))
                queues = (v.PREALLOC_QUEUE_REQS, v.TRANSFER_QUEUE_REQS)
            else:
                continue
            rows.append(("metrics", member.name, v.PROGRESS_TOKENS_TOTAL, "", self.tokens))
            rows += [("loads", member.name, one, "", self.queues.get(one, 0)) for one in queues]
        self.recent.read(
            Harvest(
                tuple(
                    Observation(
                        source=source,
                        subject=subject,
                        name=name,
                        label=label,
                        value=value,
                        at=self.at,
                    )
                    for source, subject, name, label, value in rows
                )
            )
        )

    def seconds(self, count, **each):
        for _ in range(count):
            self.second(**each)


class TestStandIn:
    """When a probe is not needed."""

    def test_flowing_traffic_stands_in_for_the_cell_and_the_router(self):
        """Several completions a second with empty queues prove both."""
        bench = Bench()
        bench.seconds(5, completed=3)

        assert bench.recent.recently_completed(CELL)
        assert bench.recent.recently_completed("r")

    def test_traffic_that_stopped_proves_nothing(self):
        """Seconds after the last completion the path is probed again."""
        bench = Bench()
        bench.seconds(5, completed=3)
        bench.seconds(3)

        assert not bench.recent.recently_completed(CELL)

    def test_our_own_probes_are_not_traffic(self):
        """What only probes complete does not stand in for them."""
        bench = Bench()
        bench.seconds(5, probes=(CELL, "r"))

        assert not bench.recent.recently_completed(CELL)

    @pytest.mark.parametrize("queue", [v.INFLIGHT_QUEUE_REQS, v.TRANSFER_QUEUE_REQS])
    def test_a_queue_that_stays_above_zero_says_no(self, queue):
        """Requests that flow past stuck ones do not hide them."""
        bench = Bench()
        bench.queues[queue] = 1
        bench.seconds(5, completed=9)

        assert not bench.recent.recently_completed(CELL)
        assert not bench.recent.recently_completed("r")

    def test_a_restarted_counter_is_no_traffic(self):
        """A counter that fell began anew."""
        bench = Bench()
        bench.seconds(3, completed=9)
        bench.done = 0
        bench.second(completed=3)

        assert not bench.recent.recently_completed(CELL)

    def test_with_one_prefill_each_decode_speaks_for_its_cell(self):
        """With one partner on a side the other side's counters tell the cells apart."""
        bench = Bench(decodes=2)
        bench.seconds(5, completed=3)

        assert bench.recent.recently_completed("p0>d1")

    def test_in_a_full_matrix_no_counter_speaks_of_one_cell(self):
        """Two prefills and two decodes: completions cannot be told apart, so cells are probed."""
        bench = Bench(prefills=2, decodes=2)
        bench.seconds(5, completed=9)

        assert not bench.recent.recently_completed(CELL)

    def test_nothing_is_claimed_of_what_is_unknown(self):
        """A subject that is no path, and a path of which nothing was seen, are probed."""
        bench = Bench()

        assert not bench.recent.recently_completed("x>y")
        assert not bench.recent.recently_completed(CELL)


def test_the_newest_word_on_safety_counts():
    """Each member's own trait is kept as last told; one for all serves the others."""
    recent = Recent(deployment(), lambda: 0.0)
    for value in (True, False):
        trait = Trait(subject="p0", name=v.T_ACTIVE_PROBE_SAFE, at=1.0, value=value)
        recent.read(Harvest(traits=(trait,)))

    assert recent.safety("p0").value is False
    assert recent.safety("d0") is None


class TestLoad:
    """What a path computes for others, which is what its probes are paid from."""

    def test_a_path_at_work_tells_what_it_computes(self):
        """Of a pair the decode's tokens beyond health checks; behind the router those of both."""
        bench = Bench()
        bench.seconds(12, tokens=102.5, completed=1)

        assert bench.recent.tokens_per_s(CELL) == pytest.approx(100.0)
        assert bench.recent.tokens_per_s("r") == pytest.approx(200.0)

    @pytest.mark.parametrize("after", [{"tokens": 2}, {"tokens": 0}])
    def test_a_path_that_stands_still_is_not_at_work(self, after):
        """Three seconds without tokens but those of health checks, and probes are free again."""
        bench = Bench()
        bench.seconds(9, tokens=100, completed=1)
        bench.seconds(4, **after)

        assert bench.recent.tokens_per_s(CELL) == 0.0

    def test_tokens_that_complete_nothing_pay_for_nothing(self):
        """Who computes and is never done may be what a probe has to show; so may our own."""
        bench = Bench()
        bench.seconds(15, tokens=100)
        bench.second(tokens=100, probes=(CELL,))

        assert bench.recent.tokens_per_s(CELL) == 0.0

    def test_cells_that_cannot_be_told_apart_are_probed(self):
        """In a matrix nobody knows whose tokens they were."""
        bench = Bench(prefills=2, decodes=2)
        bench.seconds(9, tokens=100, completed=1)

        assert bench.recent.tokens_per_s(CELL) == 0.0
