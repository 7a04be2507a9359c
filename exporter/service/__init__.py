"""RUN: the daemon."""
