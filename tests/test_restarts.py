"""A server that was started anew, with the same model and other settings: what was measured of it before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from benches import Bench, bench

from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState, view

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fake_llama import FakeLlama

AWAY: Mapping[str, Mapping[str, object]] = {
    "loading": {"loading": True},
    "unauthorized": {"api_key": "secret"},
    "unreachable": {"faults": {"*": "drop"}},
}
BACK: Mapping[str, object] = {"loading": False, "api_key": None, "faults": {}}


def measured(b: Bench) -> set[int]:
    return {batch for batch, record in b.server.batches.items() if record.sample is not None}


def change(fake: FakeLlama, **changes: object) -> None:
    for name, value in changes.items():
        setattr(fake.behaviour, name, value)


@pytest.mark.parametrize("away", AWAY)
@pytest.mark.parametrize("word", [True, False], ids=["new build", "build without a word for each start"])
async def test_a_server_that_was_away_is_probed_when_it_is_back(
    away: str, fake_llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, word: bool
) -> None:
    """Also where no probe failed meanwhile: what was measured may be another start's."""
    monkeypatch.setattr("fake_llama_answers.MEDIA_MARKER", "<__media_1__>" if word else "")
    async with bench(fake_llama, tmp_path) as b:
        await b.watch.cycle()
        assert measured(b) == {1, 2, 4}
        assert b.watch.due > b.time.now
        change(fake_llama, **AWAY[away])
        await b.watch.check()
        assert b.watch.due > b.time.now
        change(fake_llama, **BACK, n_slots=2)
        monkeypatch.setattr("fake_llama_answers.MEDIA_MARKER", "<__media_2__>" if word else "")
        await b.watch.check()
        assert (b.server.state, b.server.slots) == (ServerState.READY, 2)
        assert measured(b) == {1, 2}, "four streams do not fit any more"
        assert b.watch.due <= b.time.now
        assert set(view(b.scheduler._freeze(), b.time.now).servers[0].points) == {1, 2}
        await b.watch.cycle()
        assert b.server.batches[4].reason is Reason.TOO_FEW_SLOTS
        due = b.watch.due
        await b.watch.check()
        assert (b.watch.due, b.server.batches[4].reason) == (due, Reason.TOO_FEW_SLOTS)


async def test_a_restart_between_two_checks_is_seen_by_the_servers_own_word(
    fake_llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.watch.cycle()
        monkeypatch.setattr("fake_llama_answers.MEDIA_MARKER", "<__media_2__>")
        await b.watch.check()
        assert b.watch.due <= b.time.now
        assert measured(b) == {1, 2, 4}, "the same model: true until it is measured again"


async def test_the_same_start_of_a_server_that_was_not_heard_for_a_while_owes_no_probe(
    fake_llama: FakeLlama, tmp_path: Path
) -> None:
    async with bench(fake_llama, tmp_path) as b:
        await b.watch.cycle()
        due = b.watch.due
        change(fake_llama, **AWAY["unreachable"])
        await b.watch.check()
        change(fake_llama, **BACK)
        await b.watch.check()
        assert (b.server.state, b.watch.due) == (ServerState.READY, due)
