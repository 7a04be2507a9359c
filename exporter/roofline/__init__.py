"""THINK: pure arithmetic of the roofline and its types. No I/O, no clock, no third-party import."""
