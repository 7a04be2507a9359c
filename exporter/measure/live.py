"""Reads a server's slots or counters for its users' traffic, with the time that the answer holds for."""

from collections.abc import Callable

from exporter.measure.llama import LlamaClient
from exporter.measure.probe import ASK_TIMEOUT
from exporter.roofline.counters import Counters
from exporter.roofline.live import SlotPoll
from exporter.roofline.reason import Reason


class LiveReader:
    """Asks one server.

    Args:
        client: The server.
        clock: Monotonic seconds.
    """

    def __init__(self, client: LlamaClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock

    async def asleep(self) -> bool | Reason:
        """Whether the model sleeps (GET /props, which does not wake it)."""
        props = await self._client.props(ASK_TIMEOUT)
        return props if isinstance(props, Reason) else props.sleeping

    async def slots(self) -> SlotPoll | Reason:
        """GET /slots, which would wake a sleeping model."""
        asked = self._clock()
        slots = await self._client.slots(ASK_TIMEOUT)
        answered = self._clock()
        return slots if isinstance(slots, Reason) else SlotPoll((asked + answered) / 2, answered - asked, slots)

    async def counters(self) -> Counters | Reason:
        """GET /metrics, which resets two of the server's own gauges and, before b10519, would wake a sleeping model."""
        return await self._client.counters(ASK_TIMEOUT, self._clock())
