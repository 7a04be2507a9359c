"""Measuring once: what of several runs of one command is told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import snapshots

from exporter.config import parse
from exporter.present.report import Format, bandwidth_text
from exporter.roofline.ceiling import BandwidthTrack, Kernel, ThreadScope
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import Host, Snapshot
from exporter.service import once
from exporter.service.wiring import CLOCKS


class Runs:
    """In place of a scheduler: bandwidth runs that left this host behind."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def run_once(self, *, probe: bool, prefill: bool) -> Snapshot:
        assert not probe
        assert not prefill
        return Snapshot(self._host)


def host(*, read: bool) -> Host:
    """The last run was disturbed; an earlier one gave every kernel, or every one but `read` on all threads."""
    now = CLOCKS.monotonic()
    tracks = {
        key: BandwidthTrack(tuple(replace(b, measured_at=now) for b in track.samples))
        for key, track in snapshots.host().tracks.items()
        if read or key != (Kernel.READ, ThreadScope.ALL)
    }
    return replace(snapshots.host(), tracks=tracks, problem=Reason.PREEMPTED)


@pytest.mark.parametrize("read", [True, False])
async def test_a_command_calls_no_run_of_its_own_an_earlier_one(monkeypatch: pytest.MonkeyPatch, read: bool) -> None:  # noqa: FBT001
    @asynccontextmanager
    async def measuring(*_: object) -> AsyncIterator[Runs]:
        yield Runs(host(read=read))

    monkeypatch.setattr(once, "measuring", measuring)
    text = bandwidth_text(await once.measure_once(parse("servers: []", "test"), probe=False), Format.TABLE, 300)
    assert "an earlier one" not in text
    assert ("The last measurement gave no read ceiling" in text) == (not read)
