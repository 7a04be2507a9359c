"""Which state a server is in, from what its health checks and its slots tell together."""

from exporter.measure.probe import Identity, state_of
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState


def checked_state(answer: Identity | Reason, was: ServerState, *, stalled: bool, known: bool) -> ServerState:
    """The state after a health check.

    Args:
        answer: What the check found.
        was: The state before.
        stalled: Its slots showed work without progress.
        known: It was seen to be a llama.cpp server before.
    """
    state = state_of(answer)
    if answer is Reason.TIMEOUT and (was.up or was is ServerState.STALLED):
        # It was well, and nothing refuses: the process is there and does not move.
        return ServerState.STALLED
    if answer is Reason.NOT_LLAMA and known:
        # A proxy's own page, or whatever took its place: there was a server, and its users have none.
        return ServerState.UNREACHABLE
    if state is not ServerState.READY:
        return state
    # Health tells neither whether users are served nor whether anything moves; cycles and live polls do.
    return ServerState.STALLED if stalled else ServerState.BUSY if was is ServerState.BUSY else state


def live_state(was: ServerState, *, users: bool, stalled: bool) -> ServerState:
    """The state after a look at the slots, which only a server that is awake and answers was given."""
    if stalled:
        return ServerState.STALLED
    if was in {ServerState.READY, ServerState.BUSY, ServerState.STALLED}:
        return ServerState.BUSY if users else ServerState.READY
    return was
