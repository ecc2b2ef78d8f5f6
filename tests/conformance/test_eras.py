"""The SGLang adapter on pages of both generations, as the embedded engine writes them."""

import pytest

from engine.pairs import pair
from tandem import fetch
from tandem.engines.sglang import SglangEngine
from tandem.records import Member, Role
from tandem.records import vocabulary as v

ERAS = ("0.5.6", "0.5.23")
QUEUES = {
    Role.PREFILL: (v.BOOTSTRAP_QUEUE_REQS, v.INFLIGHT_QUEUE_REQS),
    Role.DECODE: (v.PREALLOC_QUEUE_REQS, v.TRANSFER_QUEUE_REQS),
}
COUNTED = {
    v.REQUESTS_TOTAL: 1,
    v.PROMPT_TOKENS_TOTAL: 11,
    v.TRANSFER_FAILED_TOTAL: 0,
    v.BOOTSTRAP_FAILED_TOTAL: 0,
    v.ABORTED_TOTAL: 0,
}


async def looked_at(era):
    """A completion, and what the adapter saw of both members afterwards."""
    sides = {"metrics_era": era, "decode_log_steps": 1}
    async with pair(prefill=sides, decode=sides) as two, fetch.session() as session:
        engine = SglangEngine(session)
        members = {
            role: Member(
                name=role.value,
                role=role,
                url=worker.url,
                engine="sglang",
                bootstrap_port=two.prefill.settings.disaggregation_bootstrap_port,
            )
            for role, worker in ((Role.PREFILL, two.prefill), (Role.DECODE, two.decode))
        }
        ended = await engine.complete_direct(
            *members.values(), prompt="eleven char", output_tokens=3, timeout_s=10.0
        )
        return ended, {role: await engine.observe(one, 5.0) for role, one in members.items()}


@pytest.fixture(params=ERAS)
async def era(request):
    """One generation: its version, the completion, the harvests by role."""
    return request.param, *(await looked_at(request.param))


async def test_both_generations_read_in_our_words(era):
    """Counters and queues of either generation come out under the same names."""
    _, ended, harvests = era

    assert (ended.status, len(ended.token_ids)) == ("completed", 3)
    for role, harvest in harvests.items():
        seen = {one.name: one.value for one in harvest.observations if not one.label}
        assert COUNTED.items() <= seen.items()
        assert seen[v.GENERATION_TOKENS_TOTAL] == (1 if role is Role.PREFILL else 3)
        # The page of 0.5.6 may still show the room of the last batch.
        assert {seen[name] for name in QUEUES[role]} <= {0, 1}


async def test_what_the_old_generation_lacks_is_said_to_be_missing(era):
    """0.5.6 counts neither steps nor hand-offs: missing, not nought; and KV moved is unknown."""
    version, ended, harvests = era
    seen = {one.name: one for one in harvests[Role.PREFILL].observations if not one.label}
    old = version == "0.5.6"

    assert ended.kv_moved is (None if old else True)
    assert (seen[v.TRANSFERS_TOTAL].value, seen[v.PROGRESS_TOKENS_TOTAL].value is None) == (
        None if old else 1,
        old,
    )


async def test_queues_of_the_old_generation_are_known_to_freeze(era):
    """Without `/v1/loads` they come from the page, and a trait says that they freeze there."""
    version, _, harvests = era
    old = version == "0.5.6"
    for role, harvest in harvests.items():
        sources = {one.name: one.source for one in harvest.observations}
        freezes = {
            one.label: one.value for one in harvest.traits if one.name == v.T_FREEZES_IN_STALL
        }
        told = [one.value for one in harvest.traits if one.name == v.T_ENGINE_VERSION]

        assert {sources[name] for name in QUEUES[role]} == {"metrics" if old else "loads"}
        assert {freezes[name] for name in QUEUES[role]} == {old}
        assert [one.startswith(version) for one in told] == [True]
