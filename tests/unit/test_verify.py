"""The proof: every request accounted for, nothing leaked, nothing claimed that was not shown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeEngine, Listener, World, deployment
from tandem.errors import RefusedError
from tandem.ports import Completion
from tandem.records import LostRequest, Profile
from tandem.records import vocabulary as v
from tandem.verify import verify
from tandem.verify.oracle import draw_markers, leaked, sampled
from tandem.verify.sessions import turn_text

PROFILE = Profile(sequential=4, sessions=6, turns=3, concurrency=3, rescored_sessions=2)
MARKER = re.compile(r"code word is (\w+)")


def serving(**fields):
    """A deployment that runs and serves, with failure counters that have moved before."""
    world = World(fields.pop("deployed", deployment()), **fields)
    world.run()
    for name in world.lives:
        world.counters[name, v.TRANSFER_FAILED_TOTAL] = 1
    return world


async def proof(world, profile=PROFILE, **further):
    """Verify a world."""
    return await verify(profile, world.hands(), world.clock, tell=Listener(), **further)


class TestProof:
    async def test_a_serving_pair_is_proven(self):
        """All sequential, all sessions, all sampled tokens, and nothing left unproven."""
        result = await proof(serving())

        assert result.passed is True
        assert (result.sequential_passed, result.sequential_total) == (4, 4)
        assert (result.sessions_passed, result.sessions_total) == (6, 6)
        assert (result.corrupted, result.transfer_failed_delta, result.inflight_after) == (0, 0, 0)
        assert (result.rescored_tokens, result.rescored_gap_max) == (24, 0.0)
        assert result.not_proven == ()
        assert result.sequential_latency_s == pytest.approx(0.05)
        assert result.ended_at > result.started_at

    async def test_every_request_sent_is_recorded(self):
        """Requests seen by the router equal the requests in the record, re-scorings aside."""
        world = serving()

        result = await proof(world)

        rescored = [one for one in result.requests if one.session.startswith("re-score of")]
        assert world.history.count("routed router") == 4 + 6 * 3
        assert len(result.requests) == 4 + 6 * 3 + len(rescored)
        assert len(rescored) == 2

    async def test_without_a_router_requests_go_directly(self):
        """The cells of the matrix are used in turn."""
        world = serving(deployed=deployment(prefills=2, decodes=1, routers=0))

        result = await proof(world)

        assert result.passed is True
        assert any("prefill-0>decode-0" in line for line in world.history)
        assert any("prefill-1>decode-0" in line for line in world.history)

    async def test_a_deployment_without_a_pair_is_refused(self):
        """There is nothing to prove without a prefill and a decode."""
        with pytest.raises(RefusedError, match="no prefill and decode"):
            await proof(World(deployment(decodes=0)))

    async def test_lost_requests_are_carried_into_the_record(self):
        """What the repair killed stands beside the proof."""
        lost = (LostRequest(subject="router", count=8, detail="active"),)

        result = await proof(serving(), lost=lost)

        assert result.lost == lost


class TestCorruption:
    async def test_a_foreign_marker_is_corruption(self):
        """An answer that shows another session's word fails its session, however it scores."""
        heard = []

        def speak(prompt):
            heard.append(MARKER.findall(prompt)[-1])
            return f" it is {heard[-2]}" if len(heard) == 12 else " blue"

        world = serving(speak=speak)

        result = await proof(world)

        assert result.passed is False
        assert result.corrupted == 1
        assert result.sessions_passed == 5
        assert [one.status for one in result.requests].count("corrupted") == 1

    async def test_a_token_no_clean_prefill_would_choose_is_corruption(self):
        """A gap above the profile's bound marks the re-scored sessions."""
        result = await proof(serving(gaps=[0.0, 8.8]))

        assert result.passed is False
        assert result.corrupted == 2
        assert result.rescored_gap_max == pytest.approx(8.8)

    async def test_near_ties_are_not_corruption(self):
        """Small gaps are what batching does."""
        result = await proof(serving(gaps=[0.0, 0.3]))

        assert result.passed is True
        assert result.rescored_gap_max == pytest.approx(0.3)

    async def test_an_empty_answer_is_not_clean(self):
        """HTTP 200 with nothing in it proves nothing."""
        answer = Completion(status="completed", text=" ")

        result = await proof(serving(answers={"router": answer}))

        assert (result.passed, result.sequential_passed) == (False, 0)
        assert result.requests[0].detail == "it completed with an empty answer"


class TestNotProven:
    async def test_an_engine_that_gives_no_scores(self):
        """The proof holds on what was shown, and says what was not."""
        result = await proof(serving(gaps=None))

        assert result.passed is True
        assert result.rescored_gap_max is None
        assert len(result.not_proven) == 2
        assert "sglang gives no scores" in result.not_proven[0]

    async def test_a_counter_never_seen_to_move(self):
        """Zero failures of a counter that may be unwired are told as such."""
        world = serving()
        for name in world.lives:
            world.counters[name, v.TRANSFER_FAILED_TOTAL] = 0

        doubted = await proof(world)
        trusted = await proof(world, seen_moving=("prefill-0", "decode-0"))

        assert (doubted.passed, doubted.transfer_failed_delta) == (True, 0)
        assert "never seen to move (22 hand-offs" in doubted.not_proven[0]
        assert trusted.not_proven == ()

    async def test_counters_that_cannot_be_read(self):
        """What could not be seen is None and named."""
        world = serving(unseen={v.TRANSFER_FAILED_TOTAL, v.INFLIGHT_QUEUE_REQS})

        result = await proof(world)

        assert (result.transfer_failed_delta, result.inflight_after) == (None, None)
        assert result.passed is True
        assert len(result.not_proven) == 3

    async def test_scores_that_lack_tokens(self):
        """A score over some of the tokens proves nothing of the others."""

        class Short(FakeEngine):
            async def score(self, prefill, decode, *, prompt, output_ids, timeout_s):
                return [0.0]

        world = serving()
        hands = world.hands()
        hands.engines["sglang"] = Short(world)

        result = await verify(PROFILE, hands, world.clock, tell=Listener())

        assert result.rescored_tokens == 0
        assert "only 1 of 12 tokens scored" in result.not_proven[0]


class TestFailure:
    async def test_failed_hand_offs_fail_the_proof(self):
        """A failure counter that moved during the proof is held against it."""
        world = serving()

        def speak(prompt):
            world.counters["prefill-0", v.TRANSFER_FAILED_TOTAL] += 0.25
            return " blue"

        world.speak = speak

        result = await proof(world)

        assert (result.passed, result.transfer_failed_delta) == (False, 5)

    async def test_hand_offs_left_in_flight_fail_the_proof(self):
        """The prefill's queue gets ten seconds to empty, not more."""
        world = serving()
        world.counters["prefill-0", v.INFLIGHT_QUEUE_REQS] = 3
        began = world.clock.now()

        result = await proof(world)

        assert (result.passed, result.inflight_after) == (False, 3)
        assert world.clock.now() - began < 30

    async def test_sessions_are_not_run_when_nothing_came_through(self):
        """When every sequential request hung there is nothing to load."""
        world = serving(answers={"router": Completion(status="timed_out")})

        result = await proof(world)

        assert (result.passed, result.sequential_passed, result.sessions_passed) == (False, 0, 0)
        assert "sessions were not run" in result.not_proven[0]
        assert len(result.requests) == 4

    async def test_sessions_that_all_hang_are_given_up(self):
        """A full house of hanging sessions ends the run instead of costing every timeout."""
        world = serving()
        hands = world.hands()
        router = hands.routers["smg"]

        class Hanging:
            name = "smg"

            async def complete(self, member, *, prompt, output_tokens, timeout_s, chat):
                if chat:
                    return await router.complete(
                        member, prompt=prompt, output_tokens=1, timeout_s=timeout_s, chat=chat
                    )
                return Completion(status="timed_out")

        hands.routers["smg"] = Hanging()

        result = await verify(PROFILE, hands, world.clock, tell=Listener())

        assert result.passed is False
        assert "sessions were given up" in result.not_proven[0]
        assert len(result.requests) == 4 + PROFILE.concurrency

    async def test_an_adapter_that_breaks_is_a_failed_request(self):
        """Whatever a plug-in raises becomes one request's record."""
        world = serving()

        def speak(prompt):
            raise ValueError("bad json")

        world.speak = speak

        result = await proof(world)

        assert result.requests[0].status == "failed"
        assert result.requests[0].detail == "ValueError: bad json"


class TestOracle:
    def test_markers_are_different_words(self):
        """No two sessions share a marker, and each is one lower-case word."""
        markers = draw_markers(200)

        assert len(set(markers)) == 200
        assert all(re.fullmatch(r"[a-z]{10}", marker) for marker in markers)

    @given(st.text(max_size=40))
    def test_only_a_foreign_marker_leaks(self, around):
        """A session may say its own word; another's is found in any case and place."""
        own, other = "bababababa", "zuzuzuzuzu"
        clean = around.lower().replace(other, "")

        assert leaked(f"{clean}{own}", own, (own,)) is None
        assert leaked(f"{around} {other.upper()} {around}", own, (own, other)) == other

    def test_a_sample_is_never_larger_than_what_there_is(self):
        """Three of two are two."""
        assert sampled(2, 3) == (0, 1)
        assert len(sampled(30, 3)) == 3

    @given(st.integers(1, 5), st.integers(20, 200))
    def test_a_turn_stays_within_its_tokens(self, turn, tokens_max):
        """A turn adds at most the profile's tokens, with the session's word in it."""
        said = turn_text("bababababa", turn, tokens_max)

        assert len(said) <= tokens_max * 3
        assert "bababababa" in said
        assert len(said.split()) <= 40
