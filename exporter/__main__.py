"""`python -m exporter` is the command `roofline-exporter`."""

from exporter.cli import main

main(prog_name="roofline-exporter")
