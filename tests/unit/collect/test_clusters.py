"""Ranks at one place are one cluster; who is elsewhere is told by name."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.collect.clusters import Frame, Rank, clustered, told

GATHER = (
    Frame("Spoke.all_gather", "collective.py", 120),
    Frame("forward", "follower.py", 88),
    Frame("event_loop", "follower.py", 60),
)
SERVING = (
    Frame("Hub.all_gather", "collective.py", 77),
    Frame("LockstepModel.step", "lockstep.py", 150),
    Frame("Scheduler._forward", "scheduler.py", 200),
)
SPINS = (Frame("forward", "follower.py", 79), Frame("event_loop", "follower.py", 60))

frames = st.lists(
    st.builds(Frame, st.sampled_from("abc"), st.sampled_from(["x.py", "y.py"]), st.integers(1, 9)),
    max_size=4,
).map(tuple)


def test_who_waits_elsewhere_is_named():
    """The serving rank waits with its fellows though other callers brought it there."""
    ranks = [Rank("TP0", SERVING, serves=True), Rank("TP1", SPINS), Rank("TP2", GATHER)]

    assert told(clustered(ranks)) == (
        "2 of 3 ranks (TP0, TP2) are in Spoke.all_gather (collective.py:120) < forward "
        "(follower.py:88) < event_loop (follower.py:60); TP1 is elsewhere: in forward "
        "(follower.py:79) < event_loop (follower.py:60)"
    )


def test_the_same_call_from_another_place_is_elsewhere():
    """Ranks of one program that gather from different callers do not meet."""
    other = (GATHER[0], Frame("broadcast", "tokenizer.py", 5), GATHER[2])
    found = clustered([Rank("TP0", GATHER), Rank("TP1", other), Rank("TP2", GATHER)])

    assert [one.ranks for one in found] == [("TP0", "TP2"), ("TP1",)]


def test_lines_are_no_part_of_a_place():
    """A dump that catches two ranks an instruction apart finds them together."""
    later = tuple(one._replace(line=one.line + 1) for one in GATHER)
    (one,) = clustered([Rank("TP0", GATHER), Rank("TP1", later)])

    assert told([one]).startswith("all 2 ranks (TP0, TP1) are in Spoke.all_gather")


def test_who_could_not_be_seen_is_named():
    """A rank without a dump is in no place, and that is told."""
    assert told(clustered([Rank("TP0", GATHER)]), ["TP1"]).endswith("; TP1 could not be seen")
    assert told((), ["TP0", "TP1"]) == "TP0, TP1 could not be seen"


@given(st.lists(frames, min_size=1, max_size=8), st.integers(0, 7))
def test_every_rank_is_in_one_place_and_the_fullest_is_first(stacks, serving):
    """No rank is lost or told twice, whatever the stacks, in whatever order."""
    ranks = [
        Rank(f"TP{number}", stack, serves=number == serving) for number, stack in enumerate(stacks)
    ]
    found = clustered(ranks)

    assert sorted(name for one in found for name in one.ranks) == sorted(one.name for one in ranks)
    assert [len(one.ranks) for one in found] == sorted(
        (len(one.ranks) for one in found), reverse=True
    )
    assert [one.ranks for one in found] == [one.ranks for one in clustered(ranks[::-1])]
