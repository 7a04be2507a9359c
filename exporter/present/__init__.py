"""SPEAK: a snapshot becomes something to read."""
