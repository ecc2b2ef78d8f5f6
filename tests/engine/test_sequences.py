"""Sequences, prefixes and promises over a toy model."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.model import Feed
from tandem_engine.sequences import Sequences
from tandem_engine.toy import ToyModel

SYSTEM = list(range(40))


def filled(model: ToyModel, sequences: Sequences, prompt: list[int]) -> int:
    """Acquire a sequence and compute the rest of its prompt; the sequence."""
    held = sequences.acquire(prompt, len(prompt), len(prompt) - 1)
    assert held is not None
    model.step([Feed(held.sequence, prompt[held.reused :], held.reused)])
    return held.sequence


def small(count: int = 3, cells: int = 256) -> tuple[ToyModel, Sequences]:
    """A toy of a few sequences, and its bookkeeping."""
    model = ToyModel(context_length=128, sequences_max=count, cells=cells)
    return model, Sequences(model, keep=count)


class TestReuse:
    def test_the_next_turn_takes_the_whole_prefix_over(self):
        """A prompt that continues a kept one computes only what is new, in the same sequence."""
        model, sequences = small()
        first = filled(model, sequences, SYSTEM)
        sequences.release(first, SYSTEM)
        held = sequences.acquire([*SYSTEM, 1, 2, 3], 43, 42)

        assert (held.sequence, held.reused) == (first, 40)
        assert sequences.kept == 0

    def test_a_shared_beginning_is_copied(self):
        """Two conversations with one system prompt share its cells, and both stay."""
        model, sequences = small()
        first = [*SYSTEM, *[50] * 20]
        sequences.release(filled(model, sequences, first), first)
        second = [*SYSTEM, *[60] * 20]
        held = sequences.acquire(second, len(second), len(second) - 1)

        assert held.reused == 40
        assert sequences.kept == 1
        assert model.cells_used() == 60

    def test_the_last_token_is_never_reused(self):
        """The same prompt again leaves one token to compute: its logits are wanted."""
        model, sequences = small()
        sequences.release(filled(model, sequences, SYSTEM), SYSTEM)
        held = sequences.acquire(SYSTEM, 40, 39)

        assert held.reused == 39

    def test_a_bound_on_reuse_is_kept(self):
        """Positions that are to be scored are computed anew."""
        model, sequences = small()
        sequences.release(filled(model, sequences, SYSTEM), SYSTEM)

        assert sequences.acquire(SYSTEM, 40, 20).reused == 20

    def test_short_prefixes_are_not_worth_it(self):
        """Fewer than 16 common tokens are computed again."""
        model, sequences = small()
        sequences.release(filled(model, sequences, SYSTEM), SYSTEM)

        assert sequences.acquire([*SYSTEM[:15], 99], 16, 15).reused == 0


class TestPromises:
    def test_the_lowest_free_sequence_is_taken(self):
        """What runs together stays side by side, whatever order things ended in."""
        model = ToyModel(context_length=128, sequences_max=4, cells=256)
        sequences = Sequences(model, keep=0)
        taken = [sequences.acquire((), 4).sequence for _ in range(4)]
        for gone in (1, 3, 0):
            sequences.release(gone)

        assert taken == [0, 1, 2, 3]
        assert [sequences.acquire((), 4).sequence for _ in range(3)] == [0, 1, 3]

    def test_what_does_not_fit_is_not_admitted(self):
        """Promises are kept against each other, not against what is computed so far."""
        _, sequences = small(count=4, cells=100)
        assert sequences.acquire([1], 60) is not None

        assert sequences.acquire([1], 60) is None
        assert sequences.acquire([1], 40) is not None

    def test_kept_prefixes_give_way(self):
        """The least recently used prefix goes when cells are promised to somebody."""
        model, sequences = small(count=3, cells=100)
        for token in (1, 2):
            prompt = [token] * 40
            sequences.release(filled(model, sequences, prompt), prompt)
        held = sequences.acquire([3] * 50, 50)

        assert held is not None
        assert sequences.kept == 1
        assert sequences.acquire([2] * 41, 41, 40).reused == 40

    def test_a_longer_promise_needs_its_cells(self):
        """A promise grows while there are cells for it."""
        _, sequences = small(count=2, cells=100)
        first = sequences.acquire([1], 50).sequence
        sequences.acquire([1], 40)

        assert sequences.promise(first, 60)
        assert not sequences.promise(first, 61)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "keep", "drop", "flush"]),
            st.integers(0, 5),
            st.integers(1, 60),
        ),
        max_size=40,
    )
)
def test_cells_and_sequences_are_never_lost(steps):
    """Whatever is taken, kept, dropped and flushed: it fits, and in the end all is free again."""
    model, sequences = small(count=4, cells=150)
    held: list[tuple[int, list[int]]] = []
    for what, who, size in steps:
        prompt = [who] * size
        if what == "take" and sequences.free_for(size):
            held.append((filled(model, sequences, prompt), prompt))
        elif what == "flush":
            sequences.flush()
        elif held and what in ("keep", "drop"):
            sequence, tokens = held.pop(who % len(held))
            sequences.release(sequence, tokens if what == "keep" else ())
        assert sequences.cells_held <= model.cells
        assert sequences.held == len(held)
    for sequence, _ in held:
        sequences.release(sequence)
    sequences.flush()

    assert (sequences.held, sequences.kept, model.cells_used()) == (0, 0, 0)
    assert all(sequences.acquire([1], 1) is not None for _ in range(4))
