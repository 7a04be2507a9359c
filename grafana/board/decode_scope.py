"""What the decode dashboard is about: one instance, one of its servers, the chosen batches."""

from typing import Final

from board.promql import Scope, largest

HOST: Final = Scope('job=~"$job", instance="$instance"')
SERVER: Final = Scope(f'{HOST.matchers}, server="$server"')
BATCHES: Final = 'batch=~"$batch"'
BATCH_LEGEND: Final = "Batch {{batch}}"


def by_batch(name: str) -> str:
    """A metric of the server, by batch."""
    return largest(SERVER(name, BATCHES), "batch")
