"""SENSE: everything that touches the machine or a server."""
