"""llama.cpp behind the protocol, with the real model: KV moves between instances to the bit."""

import resource
from statistics import median

import jinja2
import numpy as np
import pytest

from tandem_engine.fetch import DEFAULT, locate_model
from tandem_engine.handoff.header import HEADER_BYTES, Header, open_blob
from tandem_engine.handoff.shm import Attachment, Segment
from tandem_engine.llama import LlamaModel
from tandem_engine.loading import load_model
from tandem_engine.model import (
    Feed,
    KvExhaustedError,
    KvMismatchError,
    ModelError,
    SetupError,
)
from tandem_engine.sampling import gap_of

pytestmark = [pytest.mark.needs("model"), pytest.mark.timeout(60)]

SIZES = {"context_length": 512, "sequences_max": 4, "cells": 514}
CHUNK = 256
PROMPT = (
    "<|im_start|>user\nA lighthouse keeper writes a long letter about the sea, the weather, the "
    "ships that passed and the birds that stayed. Continue the letter.<|im_end|>\n"
    "<|im_start|>assistant\nDear friend, the third week of the storm has ended at last. "
) * 8


@pytest.fixture(scope="module")
def prefill():
    """The model of a prefill worker."""
    model = load_model("smollm2", **SIZES)
    yield model
    model.close()


@pytest.fixture(scope="module")
def decode():
    """The model of a decode worker: another instance."""
    model = load_model("smollm2", **SIZES)
    yield model
    model.close()


@pytest.fixture(autouse=True)
def empty(prefill, decode):
    """Every test begins without KV."""
    for model in (prefill, decode):
        for sequence in range(model.sequences_max):
            model.drop(sequence)
        assert model.cells_used() == 0


@pytest.fixture(scope="module")
def prompt(prefill):
    """Some 330 tokens: two chunks, the second no full one."""
    tokens = prefill.tokenize(PROMPT, special=True)[:330]
    assert len(tokens) == 330
    return tokens


def feed(model, sequence, tokens, want="last"):
    """Append tokens in chunks as a prefill does; the logits of the last chunk."""
    logits = np.empty((0, model.vocabulary))
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        (logits,) = model.step([Feed(sequence, chunk, model.length(sequence), want)])
    return logits


def greedy(model, sequence, token, count, beside=()):
    """Continue greedily from a first token, in one batch with other sequences; the tokens."""
    tokens = [token]
    for _ in range(count):
        feeds = [Feed(s, [tokens[-1]], model.length(s)) for s in (sequence, *beside)]
        tokens.append(int(model.step(feeds)[0][-1].argmax()))
    return tokens


def moved(source, sequence, target, into):
    """Hand KV from one instance to another; the bytes moved."""
    buffer = bytearray(source.kv_size(sequence))
    assert source.export_kv(sequence, memoryview(buffer)) == len(buffer)
    target.import_kv(into, memoryview(buffer))
    return len(buffer)


class TestHandOff:
    """A pair says what a single process says."""

    def test_the_pair_is_token_identical(self, prefill, decode, prompt, tmp_path):
        """Prefill in chunks here, over shared memory, greedy in a batch of four there."""
        first = int(feed(prefill, 0, prompt)[-1].argmax())
        alone = greedy(prefill, 0, first, 16)
        prefill.truncate(0, len(prompt))

        slot_bytes = HEADER_BYTES + prefill.kv_bytes_max
        landing = Segment.create("a", slots=1, slot_bytes=slot_bytes, folder=tmp_path)
        sender = Attachment.open(tmp_path / "tandem-kv-a", folder=tmp_path)
        ticket = landing.reserve(77)
        facts = Header(prefill.identity, room=77, tokens=len(prompt), first_token=first)
        size = prefill.kv_size(0)
        sender.write(ticket, facts, size, lambda into: prefill.export_kv(0, into))
        feed(decode, 1, prompt[5:60])
        decode.copy_prefix(1, 2, 30)
        feed(decode, 3, prompt[9:20])
        found, payload = open_blob(
            landing.view(ticket), identity=decode.identity, room=77, tokens=len(prompt)
        )
        decode.import_kv(0, payload)
        landing.acknowledge(ticket)
        payload.release()

        assert sender.acknowledged(ticket) is True
        assert decode.length(0) == len(prompt)
        assert alone == greedy(decode, 0, found.first_token, 16, beside=(1, 2, 3))
        sender.close()
        landing.close()

    def test_an_import_replaces_what_was_there(self, prefill, decode, prompt):
        """Importing over a longer sequence leaves nothing of it, to the bit."""
        feed(prefill, 1, prompt[:40])
        feed(decode, 2, prompt[100:200])
        moved(prefill, 1, decode, 2)

        assert decode.length(2) == decode.cells_used() == 40
        expected = prefill.step([Feed(1, [11], 40)])[0]
        np.testing.assert_array_equal(expected, decode.step([Feed(2, [11], 40)])[0])

    def test_kv_of_another_text_shows(self, prefill, decode, prompt):
        """Cross-wired KV changes what comes next, far beyond the noise of chunking."""
        feed(prefill, 0, prompt[:60])
        feed(prefill, 1, prompt[100:160])
        moved(prefill, 1, decode, 0)
        wrong = int(decode.step([Feed(0, [prompt[60]], 60)])[0][-1].argmax())
        clean = prefill.step([Feed(0, [prompt[60]], 60)])[0][-1]

        assert gap_of(clean, wrong) > 1.0

    def test_a_damaged_blob_is_refused(self, prefill, decode, prompt):
        """Half a blob or a foreign one is a mismatch, leaves nothing, and harms no neighbour."""
        feed(prefill, 0, prompt[:30])
        moved(prefill, 0, decode, 1)
        buffer = bytearray(prefill.kv_size(0))
        prefill.export_kv(0, memoryview(buffer))
        for blob in (buffer[: len(buffer) // 2], bytes(500), buffer + bytes(8)):
            with pytest.raises(KvMismatchError, match=f"of {len(blob)} bytes"):
                decode.import_kv(0, memoryview(blob))
            assert decode.length(0) == 0
            assert decode.cells_used() == 30
        moved(prefill, 0, decode, 0)
        first, second = decode.step([Feed(0, [4], 30), Feed(1, [4], 30)])
        np.testing.assert_array_equal(first, second)

    def test_an_empty_sequence_moves(self, prefill, decode):
        """No tokens are no bytes, and importing none empties a sequence."""
        feed(decode, 0, [1, 2, 3])

        assert moved(prefill, 0, decode, 0) == 0
        assert decode.length(0) == 0

    def test_both_sides_may_differ_in_size(self, prefill, decode, prompt):
        """KV moves to the bit between models of other counts of sequences, and fits the slots."""
        small = load_model("smollm2", context_length=CHUNK, sequences_max=1, cells=CHUNK)
        feed(prefill, 3, prompt[:CHUNK])

        assert moved(prefill, 3, small, 0) < small.kv_bytes_max < small.kv_size(0) + 2048
        with pytest.raises(ModelError, match="needs"):
            small.export_kv(0, memoryview(bytearray(small.kv_size(0) - 1)))
        moved(small, 0, decode, 2)
        small.truncate(0, CHUNK - 1)
        for model, sequence in ((prefill, 3), (decode, 2)):
            model.truncate(sequence, CHUNK - 1)
        expected = prefill.step([Feed(3, [11], CHUNK - 1)])[0]
        np.testing.assert_array_equal(expected, small.step([Feed(0, [11], CHUNK - 1)])[0])
        np.testing.assert_array_equal(expected, decode.step([Feed(2, [11], CHUNK - 1)])[0])
        small.close()


class TestPrefixes:
    """Copies and cuts are as if the tokens had been computed there."""

    def test_a_copied_prefix_continues_to_the_bit(self, prefill, prompt):
        """A prefix shared at a chunk boundary gives the logits of a whole prefill."""
        whole = feed(prefill, 0, prompt)
        prefill.copy_prefix(0, 3, CHUNK)
        assert prefill.cells_used() == len(prompt)
        prefill.drop(0)
        feed(prefill, 0, prompt[7:50])

        np.testing.assert_array_equal(whole, feed(prefill, 3, prompt[CHUNK:]))

    def test_a_cut_sequence_continues_to_the_bit(self, prefill, prompt):
        """Tokens cut off leave no trace."""
        clean = feed(prefill, 0, prompt[:50])
        feed(prefill, 1, prompt[:49])
        feed(prefill, 1, prompt[200:240])
        prefill.truncate(1, 49)
        (after,) = prefill.step([Feed(1, [prompt[49]], 49)])

        assert prefill.length(1) == 50
        np.testing.assert_array_equal(clean.argmax(), after.argmax())
        feed(prefill, 2, prompt[:49])
        np.testing.assert_array_equal(after, prefill.step([Feed(2, [prompt[49]], 49)])[0])

    def test_what_cannot_be_shared_is_refused(self, prefill):
        """A full target, or more tokens than the source has, is refused and changes nothing."""
        feed(prefill, 0, [5, 6, 7])
        with pytest.raises(ModelError, match="holds 3 tokens, not the 4"):
            prefill.copy_prefix(0, 1, 4)
        feed(prefill, 1, [5])
        with pytest.raises(ModelError, match="not empty"):
            prefill.copy_prefix(0, 1, 2)
        with pytest.raises(ModelError, match="cannot be cut to 4"):
            prefill.truncate(0, 4)

        assert (prefill.length(0), prefill.length(1), prefill.cells_used()) == (3, 1, 4)


def page_faults():
    """Fresh pages that this thread has asked for so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class TestStep:
    """Batches, bounds and logits."""

    def test_neighbours_do_not_change_logits(self, prefill, prompt):
        """A prefill chunk gives the same logits whatever else is in cells and in the batch."""
        alone = feed(prefill, 0, prompt[:100])
        feed(prefill, 1, prompt[3:40])
        prefill.drop(0)
        beside, _ = prefill.step([Feed(0, prompt[:100], 0), Feed(1, [9], 37)])

        np.testing.assert_array_equal(alone, beside)

    def test_the_order_of_a_batch_is_the_callers(self, prefill, prompt):
        """Feeds come in any order of sequences and lengths, and each gets its own rows back."""
        feeds = [
            Feed(2, prompt[:7], 0, "last"),
            Feed(0, prompt[7:29], 0, "all"),
            Feed(3, prompt[30:31], 0, "none"),
            Feed(1, prompt[31:60], 0, "last"),
        ]
        mixed = prefill.step(feeds)
        lengths = [prefill.length(sequence) for sequence in range(4)]
        for sequence in range(4):
            prefill.drop(sequence)
        alone = [prefill.step([one])[0] for one in feeds]

        assert lengths == [22, 29, 7, 1]
        for together, separate in zip(mixed, alone, strict=True):
            np.testing.assert_array_equal(together, separate)

    def test_logits_come_where_asked(self, prefill, prompt):
        """None, the last or all rows come back; they agree and belong to the caller."""
        nothing, last, every = prefill.step(
            [
                Feed(0, prompt[:20], 0, "none"),
                Feed(1, prompt[:20], 0, "last"),
                Feed(2, prompt[:20], 0, "all"),
            ]
        )
        before = last.copy()
        feed(prefill, 3, prompt[50:60], "all")

        assert [len(rows) for rows in (nothing, last, every)] == [0, 1, 20]
        np.testing.assert_array_equal(every[-1], last[0])
        np.testing.assert_array_equal(before, last)
        assert every.shape == (20, prefill.vocabulary)

    def test_rows_need_no_fresh_pages(self):
        """The memory of 16 rows is used again: a page fault for each page costs a percent."""
        model = load_model("smollm2", context_length=64, sequences_max=16, cells=1024)
        faults = []
        for position in range(8):
            before = page_faults()
            model.step([Feed(sequence, [5], position) for sequence in range(16)])
            faults.append(page_faults() - before)
        model.close()

        assert median(faults) < 16

    def test_a_full_chunk_of_logits_fits(self, prefill, prompt):
        """The input log-probabilities of a whole chunk come in one step."""
        assert feed(prefill, 0, prompt[:CHUNK], "all").shape == (CHUNK, prefill.vocabulary)

    def test_exhausted_cells_apply_nothing(self, prefill, prompt):
        """A step, a prefix or an import that needs more cells than are free changes nothing."""
        feed(prefill, 0, prompt[:CHUNK])
        moved(prefill, 0, prefill, 1)
        with pytest.raises(KvExhaustedError, match="3 KV cells are needed and 2 of 514"):
            prefill.step([Feed(0, [1], CHUNK), Feed(2, [1, 2], 0)])

        assert (prefill.length(0), prefill.length(2)) == (CHUNK, 0)
        first, second = prefill.step([Feed(0, [1], CHUNK), Feed(1, [1], CHUNK)])
        np.testing.assert_array_equal(first, second)

    def test_an_import_without_cells_leaves_nothing(self, prefill, decode, prompt):
        """An import that finds too few free cells is refused, and the sequence is empty."""
        feed(prefill, 0, prompt[:60])
        feed(prefill, 1, prompt[:CHUNK])
        for sequence in (0, 1):
            moved(prefill, 1, decode, sequence)
        with pytest.raises(KvExhaustedError):
            moved(prefill, 0, decode, 2)

        assert decode.length(2) == 0
        decode.drop(0)
        moved(prefill, 0, decode, 2)
        assert decode.length(2) == 60

    @pytest.mark.parametrize(
        ("feeds", "says"),
        [
            ([Feed(0, [1], 1)], "at position 1 but holds 0"),
            ([Feed(4, [1], 0)], "outside 0..3"),
            ([Feed(0, [49152], 0)], "token outside"),
            ([Feed(0, [1] * 257, 0)], "exceeds 256"),
        ],
    )
    def test_a_broken_rule_is_named(self, prefill, feeds, says):
        """A feed that breaks a rule never reaches the library."""
        with pytest.raises(ModelError, match=says):
            prefill.step(feeds)

        assert prefill.step([]) == []
        assert prefill.cells_used() == 0


class TestText:
    """The model's own vocabulary and template."""

    @pytest.mark.parametrize("text", ["", " ", "Hello, world", "größer, 数\n\t", "a" * 5000])
    def test_text_round_trips(self, prefill, text):
        """The pieces of a text's tokens are its bytes."""
        tokens = prefill.tokenize(text, special=False)

        assert text.encode() == b"".join(prefill.piece(token) for token in tokens)

    def test_control_tokens_end_a_turn(self, prefill):
        """The chat's control tokens are single tokens without text; the turn's end is an end."""
        (end,) = prefill.tokenize("<|im_end|>", special=True)

        assert end in prefill.end_ids
        assert prefill.piece(end) == b""
        assert len(prefill.tokenize("<|im_end|>", special=False)) > 1
        with pytest.raises(ModelError, match="outside"):
            prefill.piece(prefill.vocabulary)

    def test_it_answers(self, prefill):
        """A question through the template gets the answer a person would expect."""
        text = (
            jinja2.Environment(autoescape=False)  # noqa: S701 - a prompt is no page
            .from_string(prefill.chat_template)
            .render(
                messages=[{"role": "user", "content": "What is 2+2?"}],
                add_generation_prompt=True,
            )
        )
        tokens = prefill.tokenize(text, special=True)
        first = int(feed(prefill, 0, tokens)[-1].argmax())
        answer = b"".join(map(prefill.piece, greedy(prefill, 0, first, 11)))

        assert b"4" in answer


class TestLoad:
    """What a worker is told at its start."""

    def test_the_identity_is_the_files(self, prefill, decode):
        """Two instances of one file agree on everything a hand-off checks."""
        assert prefill.identity == decode.identity
        assert prefill.identity.model_hash == DEFAULT.sha256[:16]
        assert prefill.identity.kv_dtype == "f16"
        assert prefill.identity.name == "SmolLM2-135M-Instruct.Q4_1"

    def test_too_long_a_context_is_refused(self):
        """More context than the model was trained for is refused with its limit."""
        with pytest.raises(SetupError, match="trained for 8192 tokens, not 9000"):
            LlamaModel(locate_model(), context_length=9000, sequences_max=1)
