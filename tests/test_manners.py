"""When a probe must keep away: from users' caches, from all slots at once, and from a server that wants to sleep."""

from dataclasses import dataclass, replace

import pytest

from exporter.measure.manners import Manners
from exporter.roofline.reason import Reason
from exporter.roofline.slots import Slot, others, touched

IDLE = Slot(0, processing=False)
OURS = Slot(0, processing=False, task=10, tokens=700, probe=True)
USERS = Slot(0, processing=False, task=10, tokens=700, probe=False)


@dataclass
class Time:
    now: float = 5000.0

    def __call__(self) -> float:
        return self.now


def manners(time: Time, sleep_idle: float | None = None) -> Manners:
    return Manners(time, interval=300.0, health_interval=15.0, sleep_idle=sleep_idle)


def test_a_fresh_server_or_one_that_only_probes_used_may_be_asked_for_all_slots() -> None:
    for slots in ((IDLE, replace(IDLE, number=1)), (OURS, replace(IDLE, number=1))):
        m = manners(Time())
        m.see_slots(slots)
        assert m.objection(2, 2) is None


def test_all_slots_only_after_an_interval_without_users() -> None:
    time = Time()
    m = manners(time)
    small = replace(USERS, tokens=100)
    m.see_slots([small, replace(IDLE, number=1)])
    assert m.objection(2, 2) is Reason.SLOTS_IN_USE, "at first sight nobody knows when it was"
    assert m.objection(1, 2) is None
    assert m.objection(2, 4) is None
    time.now += 299
    m.see_slots([small, replace(IDLE, number=1)])
    assert m.objection(2, 2) is Reason.SLOTS_IN_USE
    time.now += 1
    assert m.objection(2, 2) is None
    m.see_slots([replace(small, task=44), replace(IDLE, number=1)])
    assert m.objection(2, 2) is Reason.SLOTS_IN_USE, "a request came and went between two looks"
    time.now += 300
    m.see_slots([replace(small, task=45, processing=True)])
    assert m.objection(2, 2) is Reason.SLOTS_IN_USE


def test_a_conversation_is_kept_for_half_an_hour() -> None:
    time = Time()
    m = manners(time)
    m.see_slots([USERS, replace(IDLE, number=1)])
    assert m.objection(1, 4) is None, "one stream takes the slot that was used longest ago"
    assert m.objection(2, 4) is Reason.CACHE_IN_USE
    time.now += 1799
    m.see_slots([USERS])
    assert m.objection(2, 4) is Reason.CACHE_IN_USE
    time.now += 1
    assert m.objection(2, 4) is None
    m.see_slots([replace(USERS, tokens=900)])
    assert m.objection(2, 4) is Reason.CACHE_IN_USE, "it went on"
    m.see_slots([replace(OURS, task=99)])
    assert m.objection(2, 4) is None, "it is gone"


def test_a_slot_that_is_gone_keeps_no_conversation() -> None:
    m = manners(Time())
    m.see_slots([replace(IDLE, number=n) for n in range(3)] + [replace(USERS, number=3)])
    assert m.objection(2, 4) is Reason.CACHE_IN_USE
    m.see_slots([IDLE, replace(IDLE, number=1)])
    assert m.objection(2, 4) is None, "started anew, with fewer slots"


@pytest.mark.parametrize("tokens", [None, 0, 512])
def test_a_short_prompt_is_no_conversation(tokens: int | None) -> None:
    m = manners(Time())
    m.see_slots([replace(USERS, tokens=tokens)])
    assert m.objection(2, 4) is None


def test_where_the_server_does_not_tell_what_was_asked_the_probe_knows_its_own_slots() -> None:
    m = manners(Time())
    m.see_slots([replace(OURS, probe=None)], own={0})
    assert m.objection(4, 4) is None
    m.see_slots([replace(OURS, probe=None)])
    assert m.objection(4, 4) is None, "unchanged since"
    m.see_slots([replace(OURS, probe=None, task=11)])
    assert m.objection(4, 4) is Reason.CACHE_IN_USE


def test_a_server_without_a_sleep_may_always_be_asked() -> None:
    m = manners(Time())
    for _ in range(3):
        m.see_sleep(sleeping=False)
        m.touched()
        assert m.rest() == 0.0
    assert not m.sleeps


def test_with_a_known_sleep_time_a_probe_waits_until_it_would_sleep() -> None:
    time = Time()
    m = manners(time, sleep_idle=600.0)
    assert m.sleeps
    assert m.rest() == 0.0
    m.touched()
    assert m.rest() == 630.0
    time.now += 629
    assert m.rest() == pytest.approx(1.0)
    time.now += 1
    assert m.rest() == 0.0, "it is awake still, so a user was there"


def test_once_seen_asleep_a_server_is_asked_once_for_each_time_that_somebody_woke_it() -> None:
    time = Time()
    m = manners(time)
    m.touched()
    assert m.rest() == 0.0
    m.see_sleep(sleeping=True)
    m.see_sleep(sleeping=False)
    assert m.rest() == 0.0
    m.touched()
    for _ in range(3):
        time.now += 1e6
        m.see_sleep(sleeping=False)
        assert m.rest() is None
    m.see_sleep(sleeping=True)
    assert m.rest() == 0.0
    assert m.sleeps


def test_who_is_beside_us() -> None:
    ours = Slot(0, processing=True, task=1, probe=True)
    user = Slot(1, processing=True, task=2, probe=False)
    assert not others([ours, IDLE], 1)
    assert others([ours, user], 1)
    assert others([user], 1), "in our place"
    assert not others([replace(ours, probe=None)], 1)
    assert others([replace(ours, probe=None), replace(user, probe=None)], 1)


def test_a_slot_that_worked_between_two_looks_shows_it() -> None:
    before = [Slot(n, processing=False, task=n) for n in range(3)]
    assert not touched(before, before, {2})
    assert not touched(before, [*before[:2], replace(before[2], task=9)], {2})
    assert touched(before, [before[0], replace(before[1], task=9), before[2]], {2})
    assert touched([IDLE], [replace(IDLE, task=3)], {1}), "it had never had a task"
