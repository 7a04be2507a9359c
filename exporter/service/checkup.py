"""What a health check asks: how a server is, when it sleeps, which model it has; what hangs keeps nobody waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import structlog

from exporter.config import ServerSettings
from exporter.measure.answers import Props
from exporter.measure.model import ModelReader
from exporter.measure.probe import ASK_TIMEOUT, DecodeProbe, Identity, identify
from exporter.measure.sleep import SleepReader
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import Model, Server

LOOK_SECONDS: Final = ASK_TIMEOUT
"""For each look at what belongs to the server on this machine: its model's file, its process."""
_T = TypeVar("_T")


class Look(Generic[_T]):
    """A look, in a thread, at what may hang, as a file behind a network does; while one hangs, no other is begun.

    Args:
        what: What is looked at, for the log.
        logger: The log.
    """

    def __init__(self, what: str, logger: structlog.typing.FilteringBoundLogger) -> None:
        self._what = what
        self._log = logger
        self._task: asyncio.Future[_T] | None = None

    async def take(self, look: Callable[[], Awaitable[_T]], last: _T) -> _T:
        """What is seen now; `last` where that takes too long, or there is no thread to look in."""
        if self._task is not None and not self._task.done():
            return last
        task = self._task = asyncio.ensure_future(look())
        await asyncio.wait({task}, timeout=LOOK_SECONDS)
        if not task.done():
            self._log.warning(f"{self._what} hangs: what was known before stays", seconds=LOOK_SECONDS)
            return last
        try:
            return task.result()
        except RuntimeError as error:
            # Python's word for a machine that gives no more threads.
            self._log.warning(f"no thread to look at {self._what} in", error=str(error))
            return last


class Checkup:
    """Asks one server how it is, without touching its model.

    Args:
        settings: The server's configuration.
        probe: Its client, and what is known of its users and its sleep, which is told what is found.
        models: Reads the model's file, where it can be seen.
        sleep: Finds out when the server sleeps, where the configuration does not say.
        logger: The log.

    Attributes:
        file: The look at the model's file.
        process: The look at the server's process.
    """

    def __init__(
        self,
        settings: ServerSettings,
        probe: DecodeProbe,
        models: ModelReader,
        sleep: SleepReader,
        logger: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._told_sleep = settings.sleep_idle is not None
        self._probe = probe
        self.models = models
        self.sleep = sleep
        self._log = logger
        self.file: Look[Model | None] = Look("the model's file", logger)
        self.process: Look[float | None] = Look("the server's process", logger)
        self._sleep_idle: float | None = None

    def go_on_from(self, before: "Checkup") -> None:
        """Takes over what an older configuration's checkup of the same server reads; what hangs there hangs on."""
        self.models, self.file = before.models, before.file
        self.sleep, self.process = before.sleep, before.process

    async def ask(self, known: Identity | None, last: Model | None) -> tuple[Identity | Reason, Model | None]:
        """How the server is, or why that is not known, and its model.

        Args:
            known: What it was before; what cannot have changed is not asked again.
            last: Its model before, which stands while the file hangs and the server tells the same name and build.
        """
        answer = await identify(self._probe.client, known)
        if isinstance(answer, Reason):
            # It may have been started anew, with other arguments.
            self.sleep.forget()
            return answer, None
        props, size = answer.props, answer.size
        await self._learn_sleep(props)
        kept = last if last is not None and (last.name, last.build) == (props.model, props.build) else None
        return answer, await self.file.take(lambda: self.models.describe(props, size), kept)

    async def _learn_sleep(self, props: Props) -> None:
        """What the server's command line tells is as good as what the operator would say."""
        found = await self.process.take(lambda: self.sleep.read(props), self._sleep_idle)
        if not self._told_sleep and found != self._sleep_idle:
            self._sleep_idle = self._probe.manners.sleep_idle = found
            self._log.info("the server's command line tells when it sleeps", sleep_idle=found)


def started_anew(props: Props, marker: str | None, was: Server) -> bool:
    """Whether this may be another start of the server than the one that was measured, of the same model.

    Args:
        props: What it says of itself now.
        marker: Its word for the start that was seen last; None before the first, empty in builds that have none.
        was: Its record until now.
    """
    if marker is None:
        return False
    if props.marker or marker:
        return props.marker != marker
    return not was.state.up or was.slots != props.slots
