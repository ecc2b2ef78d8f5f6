"""The toy model: its KV is real, so every way to the same tokens gives the same logits."""

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem_engine.loading import load_model
from tandem_engine.model import (
    Feed,
    KvExhaustedError,
    KvMismatchError,
    ModelError,
    SetupError,
)
from tandem_engine.toy import ROW_BYTES, VOCABULARY, ToyModel

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
SEQUENCES = 4
CELLS = 40
CONTEXT = 24


def logits_after(tokens, **sizes):
    """What a fresh model says after `tokens`, shape (vocabulary,)."""
    return ToyModel(**sizes).step([Feed(0, tokens, 0)])[0][-1]


def exported(model, sequence):
    """The KV of a sequence in a buffer of exactly its size."""
    buffer = bytearray(model.kv_size(sequence))
    assert len(buffer) == model.export_kv(sequence, memoryview(buffer))
    return memoryview(buffer)


class ToyMachine(RuleBasedStateMachine):
    """Any order of steps, copies, cuts, drops and hand-offs against plain lists of tokens."""

    def __init__(self):
        super().__init__()
        sizes = {"context_length": CONTEXT, "sequences_max": SEQUENCES, "cells": CELLS}
        self.models = [ToyModel(**sizes), ToyModel(**sizes)]
        # (model, sequence) -> tokens and the cells that hold them, a cell being an own object
        self.held = {(m, s): [] for m in range(2) for s in range(SEQUENCES)}

    def used(self, model):
        """Cells in use: a shared one counts once."""
        return {id(c) for (m, _), held in self.held.items() if m == model for c in held}

    @rule(model=st.integers(0, 1), feeds=st.dictionaries(st.integers(0, 3), TOKENS, min_size=1))
    def step(self, model, feeds):
        """A step applies whole or not at all, and says what a fresh model says."""
        starts = {s: len(self.held[model, s]) for s in feeds}
        batch = [Feed(s, tokens, starts[s]) for s, tokens in feeds.items()]
        total = sum(map(len, feeds.values()))
        if any(starts[s] + len(tokens) > CONTEXT for s, tokens in feeds.items()):
            with pytest.raises(ModelError, match="context length"):
                self.models[model].step(batch)
            return
        if len(self.used(model)) + total > CELLS:
            with pytest.raises(KvExhaustedError):
                self.models[model].step(batch)
            return
        results = self.models[model].step(batch)
        for (s, tokens), logits in zip(feeds.items(), results, strict=True):
            self.held[model, s] += [[token] for token in tokens]
            expected = logits_after([cell[0] for cell in self.held[model, s]])
            np.testing.assert_array_equal(expected, logits[-1])

    @rule(model=st.integers(0, 1), source=st.integers(0, 3), into=st.integers(0, 3))
    def copy(self, model, source, into):
        """Half a sequence is shared with an empty one, and refused by a full one."""
        held = self.held[model, source]
        if self.held[model, into]:
            with pytest.raises(ModelError, match="not empty"):
                self.models[model].copy_prefix(source, into, len(held) // 2)
            return
        self.models[model].copy_prefix(source, into, len(held) // 2)
        self.held[model, into] = held[: len(held) // 2]

    @rule(model=st.integers(0, 1), sequence=st.integers(0, 3), keep=st.integers(0, CONTEXT))
    def cut(self, model, sequence, keep):
        """A sequence is cut to a length it has, and to no other."""
        held = self.held[model, sequence]
        if keep > len(held):
            with pytest.raises(ModelError, match="cannot be cut"):
                self.models[model].truncate(sequence, keep)
            return
        self.models[model].truncate(sequence, keep)
        self.held[model, sequence] = held[:keep]

    @rule(model=st.integers(0, 1), source=st.integers(0, 3), into=st.integers(0, 3))
    def hand_over(self, model, source, into):
        """KV exported here and imported there is the same sequence there."""
        other = 1 - model
        self.held[other, into] = []
        blob = exported(self.models[model], source)
        if len(self.used(other)) + len(self.held[model, source]) > CELLS:
            with pytest.raises(KvExhaustedError):
                self.models[other].import_kv(into, blob)
            return
        self.models[other].import_kv(into, blob)
        self.held[other, into] = [list(cell) for cell in self.held[model, source]]

    @precondition(lambda self: any(self.held.values()))
    @rule(model=st.integers(0, 1), sequence=st.integers(0, 3))
    def drop(self, model, sequence):
        """A dropped sequence is empty."""
        self.models[model].drop(sequence)
        self.held[model, sequence] = []

    @invariant()
    def nothing_leaks(self):
        """Lengths and cells in use are those of the plain lists."""
        for (model, sequence), held in self.held.items():
            assert len(held) == self.models[model].length(sequence)
        for model in range(2):
            assert len(self.used(model)) == self.models[model].cells_used()


TestToyMachine = pytest.mark.timeout(60)(ToyMachine.TestCase)
TestToyMachine.settings = settings(max_examples=40, stateful_step_count=25)


class TestKv:
    """KV that is wrong shows in what comes next."""

    @given(TOKENS.filter(lambda tokens: len(tokens) > 1), st.integers(1, 11))
    def test_chunks_do_not_matter(self, tokens, cut):
        """A prefill in two chunks says what a prefill in one says."""
        cut = min(cut, len(tokens) - 1)
        model = ToyModel()
        first, second = (
            model.step([Feed(0, tokens[:cut], 0, "all")])[0],
            model.step([Feed(0, tokens[cut:], cut, "all")])[0],
        )
        whole = ToyModel().step([Feed(0, tokens, 0, "all")])[0]

        np.testing.assert_array_equal(whole, np.concatenate([first, second]))

    @given(TOKENS, st.data())
    def test_any_changed_byte_is_felt(self, tokens, data):
        """One flipped byte anywhere in the KV changes the logits that follow."""
        model = ToyModel()
        model.step([Feed(0, tokens, 0)])
        blob = exported(model, 0)
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 + data.draw(st.integers(0, 254))
        model.import_kv(1, blob)
        clean, wrong = model.step([Feed(0, [5], len(tokens)), Feed(1, [5], len(tokens))])

        assert not np.array_equal(clean, wrong)

    def test_seeds_differ(self):
        """Toys of two seeds have other identities and other logits."""
        assert ToyModel(1).identity.model_hash != ToyModel(2).identity.model_hash
        assert not np.array_equal(logits_after([1, 2], seed=1), logits_after([1, 2], seed=2))
        np.testing.assert_array_equal(logits_after([1, 2], seed=1), logits_after([1, 2], seed=1))

    def test_half_a_row_is_refused(self):
        """A blob that is not whole rows, or too long, is a mismatch and leaves nothing."""
        model = ToyModel(context_length=4)
        model.step([Feed(0, [1], 0)])
        for size in (ROW_BYTES - 1, 5 * ROW_BYTES):
            with pytest.raises(KvMismatchError, match=str(size)):
                model.import_kv(0, memoryview(bytes(size)))
        assert model.length(0) == 0
        assert model.cells_used() == 0

    def test_a_small_buffer_is_refused(self):
        """An export names the bytes it needs."""
        model = ToyModel()
        model.step([Feed(0, [1, 2], 0)])
        with pytest.raises(ModelError, match="needs 128"):
            model.export_kv(0, memoryview(bytearray(127)))


class TestStep:
    """The rules of a step are held to before anything is applied."""

    @pytest.mark.parametrize(
        ("feeds", "says"),
        [
            ([Feed(0, [1], 1)], "at position 1 but holds 0"),
            ([Feed(0, [], 0)], "no tokens"),
            ([Feed(0, [1], 0), Feed(0, [1], 0)], "twice"),
            ([Feed(9, [1], 0)], "outside 0..7"),
            ([Feed(-1, [1], 0)], "outside 0..7"),
            ([Feed(0, [VOCABULARY], 0)], "token outside"),
            ([Feed(0, [-1], 0)], "token outside"),
            ([Feed(0, [1] * 257, 0)], "exceeds 256"),
            ([Feed(1, [1], 0), Feed(0, [1] * 40, 0)], "context length"),
        ],
    )
    def test_a_broken_rule_is_named(self, feeds, says):
        """A feed that breaks a rule is refused by its numbers and changes nothing."""
        model = ToyModel(context_length=32)
        with pytest.raises(ModelError, match=says):
            model.step(feeds)

        assert model.cells_used() == 0

    def test_logits_come_where_asked(self):
        """None, the last or all rows of logits come back, and agree."""
        model = ToyModel()
        nothing, last, every = model.step(
            [Feed(0, [1, 2, 3], 0, "none"), Feed(1, [1, 2, 3], 0), Feed(2, [1, 2, 3], 0, "all")]
        )

        assert nothing.shape == (0, VOCABULARY)
        assert last.shape == (1, VOCABULARY)
        assert every.shape == (3, VOCABULARY)
        np.testing.assert_array_equal(every[-1], last[0])


class TestText:
    """Bytes are tokens, apart from the three of a chat."""

    @given(st.text())
    def test_text_round_trips(self, text):
        """The pieces of a text's tokens are its bytes."""
        model = ToyModel()

        tokens = model.tokenize(text, special=False)
        assert text.encode() == b"".join(model.piece(token) for token in tokens)

    def test_control_tokens_are_parsed_on_request(self):
        """A control token's name is one token when asked for, and plain text otherwise."""
        model = ToyModel()

        assert model.tokenize("<|im_start|>h<|im_end|>", special=True) == [257, 104, 258]
        assert model.tokenize("<|im_end|>", special=False) == list(b"<|im_end|>")
        assert model.piece(258) == b""
        assert model.end_ids == {256, 258}
        with pytest.raises(ModelError, match="token 259"):
            model.piece(259)

    def test_the_chat_template_renders(self):
        """The template is Jinja and asks the assistant to speak."""
        text = (
            jinja2.Environment(autoescape=False)  # noqa: S701 - a prompt is no page
            .from_string(ToyModel().chat_template)
            .render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
        )

        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_it_ends_by_itself(self):
        """Greedy text reaches an end token before long, for most seeds."""
        ended = 0
        for seed in range(10):
            model = ToyModel(seed)
            logits = model.step([Feed(0, [104, 105], 0)])[0]
            for position in range(2, 400):
                token = int(logits[-1].argmax())
                if token in model.end_ids:
                    ended += 1
                    break
                logits = model.step([Feed(0, [token], position)])[0]

        assert ended >= 6


class TestLoadModel:
    """A model by name."""

    def test_toys_by_seed(self):
        """`toy` is seed 0 and `toy:7` is seed 7."""
        assert load_model("toy").identity == ToyModel(0).identity
        assert load_model("toy:7", cells=10).identity == ToyModel(7).identity
        assert load_model("toy", cells=10).cells == 10

    def test_a_bad_seed_is_refused(self):
        """A seed that is no number is refused with an example."""
        with pytest.raises(SetupError, match="toy:7"):
            load_model("toy:x")

    def test_a_missing_file_says_what_to_run(self, tmp_path):
        """A path to nothing names the path and the command that fetches a model."""
        with pytest.raises(SetupError, match="fetch-model"):
            load_model(str(tmp_path / "no.gguf"))
