"""Users' own traffic from the exact token counts of a server's slots, without probing.

Two polls of GET /slots bound an interval. It counts only when the same requests generated at both of its ends and no
other slot worked or changed its request meanwhile: then every stream's count grew by exactly the steps taken, and no
prompt was read. Such intervals are joined to runs; a run is off by at most one step (the counts are whole) and by half
the round trips of its first and last poll, so its relative error falls as it grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt
from typing import Final

from exporter.roofline.ceiling import Roof
from exporter.roofline.decode import IMPLAUSIBLE_RATIO
from exporter.roofline.footprint import Footprint
from exporter.roofline.slots import Slot

MAX_ERROR: Final = 0.03
"""Nothing is published whose relative error may be larger."""
WINDOW_SECONDS: Final = 10.0
"""A sample is the mean of the newest runs that fill this time, or of more where the error asks for more."""
MEMORY_SECONDS: Final = 120.0
"""Runs that ended longer ago than this are forgotten."""
RUN_SECONDS: Final = 5.0
"""A run that is this long and exact enough is closed, so that a long request does not become one long mean."""
MOST_APART: Final = 2
"""Streams that share their steps differ by at most this many tokens: they are counted in the middle of a step."""
BURST_TOKENS: Final = 16
"""The most tokens that one step of a speculative stream is taken to give (llama.cpp's default draft length)."""


class LiveSource(StrEnum):
    """Where the figures of users' traffic come from: exact counts of the slots, or the server's own counters."""

    SLOTS = "slots"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class SlotPoll:
    """One answer of GET /slots.

    Attributes:
        at: The middle between question and answer, monotonic seconds.
        round_trip: From question to answer, seconds.
    """

    at: float
    round_trip: float
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class LiveShare:
    """What was seen of one number of streams.

    Attributes:
        streams: Streams that generated together.
        seconds: For how long.
        tokens: Tokens of all of them.
        steps: Decode steps; None where tokens are not steps (speculation), or the streams did not advance together.
        depth: Mean number of cached tokens of a stream; None where the build does not tell.
    """

    streams: int
    seconds: float
    tokens: int
    steps: float | None
    depth: float | None


@dataclass(frozen=True, slots=True)
class LiveSample:
    """Users' traffic over the newest intervals in which it is known; None is what is not.

    Attributes:
        streams: Mean number of streams that generated.
        tokens_per_second: Of all streams together.
        step_seconds: Mean time of one step.
        shares: What it is the mean of, by number of streams; empty where the server's own counters tell.
        measured_at: Monotonic seconds.
    """

    source: LiveSource
    streams: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    measured_at: float
    shares: tuple[LiveShare, ...] = ()


@dataclass(frozen=True, slots=True)
class LivePoint:
    """A live sample under its roof; `floor_ratio` is None where it is not known, or not plausible."""

    sample: LiveSample
    floor_ratio: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """Successive intervals in which the same requests generated, and nothing else happened.

    Attributes:
        streams: The slots' numbers and their requests.
        tokens: What each stream generated.
        depth_seconds: Integral of the streams' mean depth over time; None where a depth is not known.
        round_trips: Of the first and of the last poll, seconds.
    """

    streams: tuple[tuple[int, int | None], ...]
    began: float
    ended: float
    tokens: tuple[int, ...]
    depth_seconds: float | None
    round_trips: tuple[float, float]
    speculative: bool

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began

    @property
    def each(self) -> float:
        """Mean tokens of a stream."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def steps(self) -> float | None:
        """Decode steps, where every stream took part in each."""
        together = not self.speculative and max(self.tokens) - min(self.tokens) <= MOST_APART
        return self.each if together else None

    @property
    def error_seconds(self) -> float:
        """By how much its length may differ from the time that its tokens took."""
        whole = BURST_TOKENS if self.speculative else 1
        return min(1.0, whole / max(1.0, self.each)) * self.seconds + sum(self.round_trips) / 2

    def then(self, after: "Run") -> "Run":
        """This run and the interval that follows it, as one."""
        depths = (self.depth_seconds, after.depth_seconds)
        return replace(
            self,
            ended=after.ended,
            tokens=tuple(a + b for a, b in zip(self.tokens, after.tokens, strict=True)),
            depth_seconds=None if None in depths else sum(d for d in depths if d is not None),
            # The polls in between cancel out: only the ends' timing matters.
            round_trips=(self.round_trips[0], after.round_trips[1]),
        )

    @property
    def full(self) -> bool:
        """Long and exact enough to stand alone."""
        return self.seconds >= RUN_SECONDS and self.error_seconds <= MAX_ERROR * self.seconds


def interval(before: SlotPoll, after: SlotPoll) -> Run | None:
    """What was generated between two polls; None where that is not known exactly, or nothing was."""
    known = {slot.number: slot for slot in before.slots}
    if after.at <= before.at or len(known) != len(after.slots):
        return None
    pairs: list[tuple[Slot, Slot]] = []
    for slot in after.slots:
        old = known.get(slot.number)
        # A request that began, ended, or both in between: how much of the time it generated is not known.
        if old is None or (old.task, old.processing) != (slot.task, slot.processing):
            return None
        if slot.processing:
            # Without a token at the start it was at its prompt, which holds every other stream up.
            if old.decoded == 0 or slot.decoded < old.decoded:
                return None
            pairs.append((old, slot))
    if not pairs:
        return None
    seconds = after.at - before.at
    depths = [slot.tokens for pair in pairs for slot in pair]
    mean_depth = None if None in depths else sum(d for d in depths if d is not None) / len(depths)
    return Run(
        streams=tuple((slot.number, slot.task) for _, slot in pairs),
        began=before.at,
        ended=after.at,
        tokens=tuple(slot.decoded - old.decoded for old, slot in pairs),
        depth_seconds=None if mean_depth is None else mean_depth * seconds,
        round_trips=(before.round_trip, after.round_trip),
        speculative=any(slot.speculative for _, slot in pairs),
    )


@dataclass(frozen=True, slots=True)
class LiveTrack:
    """The newest poll and the recent runs."""

    last: SlotPoll | None = None
    runs: tuple[Run, ...] = ()

    def add(self, poll: SlotPoll) -> "LiveTrack":
        """The track with one more poll."""
        runs = tuple(run for run in self.runs if run.ended >= poll.at - MEMORY_SECONDS)
        new = None if self.last is None else interval(self.last, poll)
        if new is not None:
            open_run = runs[-1] if runs else None
            joins = open_run is not None and not open_run.full and _follows(open_run, new)
            runs = (*runs[:-1], open_run.then(new)) if joins and open_run is not None else (*runs, new)
        return LiveTrack(poll, runs)

    def cut(self) -> "LiveTrack":
        """The track before a gap: what happens until the next poll is not the users' alone, or not known."""
        return LiveTrack(None, self.runs)

    @property
    def clean(self) -> bool:
        """Whether the newest interval counted."""
        return bool(self.runs) and self.last is not None and self.runs[-1].ended == self.last.at

    def sample(self) -> LiveSample | None:
        """The mean of the newest runs that are long and exact enough together, or None."""
        taken = _newest(self.runs)
        if not taken:
            return None
        shares = _shares(taken)
        seconds = sum(s.seconds for s in shares)
        steps = [s.steps for s in shares]
        return LiveSample(
            source=LiveSource.SLOTS,
            streams=sum(s.streams * s.seconds for s in shares) / seconds,
            tokens_per_second=sum(s.tokens for s in shares) / seconds,
            step_seconds=None if None in steps else seconds / sum(s for s in steps if s is not None),
            measured_at=taken[0].ended,
            shares=shares,
        )


def _follows(run: Run, new: Run) -> bool:
    return run.ended == new.began and run.streams == new.streams and run.speculative == new.speculative


def _newest(runs: Sequence[Run]) -> list[Run]:
    """The newest runs that are long and exact enough together, the newest first; none where all are not.

    Errors of runs that are apart are unrelated, so their squares add; a run is joined to the one that it follows.
    """
    seconds = squares = error = 0.0
    taken: list[Run] = []
    joined: Run | None = None
    for run in reversed(runs):
        taken.append(run)
        seconds += run.seconds
        if joined is not None and _follows(run, joined):
            joined = run.then(joined)
        else:
            squares += 0.0 if joined is None else joined.error_seconds**2
            joined = run
        error = sqrt(squares + joined.error_seconds**2) / seconds
        if seconds >= WINDOW_SECONDS and error <= MAX_ERROR:
            break
    return taken if error <= MAX_ERROR else []


def _shares(runs: Sequence[Run]) -> tuple[LiveShare, ...]:
    """The runs by number of streams."""
    found = []
    for streams in sorted({len(run.streams) for run in runs}):
        of = [run for run in runs if len(run.streams) == streams]
        steps, depths = [run.steps for run in of], [run.depth_seconds for run in of]
        seconds = sum(run.seconds for run in of)
        found.append(
            LiveShare(
                streams=streams,
                seconds=seconds,
                tokens=sum(sum(run.tokens) for run in of),
                steps=None if None in steps else sum(s for s in steps if s is not None),
                depth=None if None in depths else sum(d for d in depths if d is not None) / seconds,
            )
        )
    return tuple(found)


def place_live(sample: LiveSample, footprint: Footprint | None, roof: Roof) -> LivePoint:
    """The sample's floor ratio: the least time that its steps could take / the time that they took."""
    if footprint is None or footprint.weight_bytes_of(1) <= 0 or sample.step_seconds is None or not sample.shares:
        return LivePoint(sample, None)
    moved = 0.0
    for share in sample.shares:
        if share.steps is None or share.depth is None:
            return LivePoint(sample, None)
        moved += share.steps * footprint.step(share.streams, share.depth).bytes
    rate = moved / sum(share.seconds for share in sample.shares)
    hard, reference = roof.hard_bytes_per_second, roof.reference_bytes_per_second
    if reference is None or (hard is not None and rate > IMPLAUSIBLE_RATIO * hard):
        return LivePoint(sample, None)
    return LivePoint(sample, rate / reference)
