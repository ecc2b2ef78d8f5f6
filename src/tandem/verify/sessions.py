"""The second proof: many multi-turn sessions at once, as agents send them.

For: load with a transcript that grows turn by turn, and a marker in every session that no other
session may show. Not for: deciding what the result is worth (`verify/__init__.py`).

A transcript is plain text, so that a clean prefill can re-score exactly what was read.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.ports import Clock, Progress, say
from tandem.records import Profile, RequestRecord
from tandem.verify.sequential import accounted
from tandem.verify.ways import Ways

CHARACTERS_PER_TOKEN = 3
"""Fewer than any tokenizer we know needs for these words: an estimate on the safe side."""
TELL_EVERY = 5
"""Sessions between two sentences of progress."""

TASKS = (
    "count the boxes in the north hall and name the heaviest",
    "list what the second shift left open on the bench",
    "read the log of the pump and say when it stopped",
    "compare both offers and pick the one with fewer parts",
    "find the page that names the owner of the key",
    "check the three doors and tell which one is closed",
    "sort the letters by town and keep the last one",
)
RESULTS = (
    "two of seven items match and one is missing",
    "the search found four pages in the old folder",
    "the test passed on the second try after a wait",
    "the table has nine rows and the last is empty",
    "the message was read but nobody has replied",
)


@dataclass(frozen=True, slots=True)
class Transcript:
    """The last turn of a session that may be re-scored: what was read and what came out."""

    session: str
    turn: int
    prompt: str
    output_ids: tuple[int, ...]


@dataclass(slots=True)
class Sessions:
    """A run of sessions: its requests, how each session ended, and the transcripts."""

    profile: Profile
    ways: Ways
    clock: Clock
    tell: Progress
    own: Sequence[str]
    """One marker per session."""
    markers: Sequence[str]
    """Every marker of this verification."""
    requests: list[RequestRecord] = field(default_factory=list)
    sound: set[str] = field(default_factory=set)
    """Sessions whose every turn was clean."""
    corrupted: set[str] = field(default_factory=set)
    transcripts: dict[str, Transcript] = field(default_factory=dict)
    hung: int = 0
    given_up: bool = False
    """Whether the run ended early because nothing but hanging sessions was seen."""

    async def run(self) -> None:
        """Run all sessions, `profile.concurrency` at a time."""
        waiting = iter(range(len(self.own)))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.profile.concurrency, len(self.own))):
                group.create_task(self._work(waiting))

    async def _work(self, waiting: Iterator[int]) -> None:
        for number in waiting:
            # Hanging sessions cost a timeout each: a full house of them and no other proves it.
            if self.hung >= self.profile.concurrency and not self.sound:
                self.given_up = True
                return
            await self._session(number)

    async def _session(self, number: int) -> None:
        session = name_of(number)
        marker = self.own[number]
        prompt = ""
        for turn in range(1, self.profile.turns + 1):
            prompt += turn_text(marker, turn, self.profile.prompt_tokens_max)
            sent_at = self.clock.now()
            answer = await self.ways.send(
                prompt,
                output_tokens=self.profile.output_tokens,
                timeout_s=self.profile.request_timeout_s,
                chat=False,
            )
            record = accounted(answer, session, turn, sent_at, self.clock, (marker, self.markers))
            self.requests.append(record)
            if record.status == "corrupted":
                self.corrupted.add(session)
            if record.status != "clean":
                self.hung += record.status == "timed_out"
                await say(
                    self.tell,
                    f"{session}, turn {turn}: {record.status.replace('_', ' ')}: {record.detail}",
                )
                return
            self.transcripts[session] = Transcript(session, turn, prompt, answer.token_ids)
            prompt += answer.text
        self.sound.add(session)
        if len(self.sound) % TELL_EVERY == 0:
            await say(self.tell, f"{len(self.sound)} of {len(self.own)} sessions are through")


def name_of(number: int) -> str:
    """How a session is named in the records."""
    return f"session-{number + 1}"


def turn_text(marker: str, turn: int, tokens_max: int) -> str:
    """What one turn adds to the transcript: at most `tokens_max` tokens, the marker in front."""
    if turn == 1:
        said = f"The code word is {marker}. Your task: {secrets.choice(TASKS)}. Begin:"
    else:
        said = f"\nThe code word is {marker}. Tool: {secrets.choice(RESULTS)}. Go on:"
    return said[: tokens_max * CHARACTERS_PER_TOKEN]
