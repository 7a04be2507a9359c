"""A server's roof as the configuration describes it."""

from exporter.config import ServerSettings
from exporter.roofline.ceiling import CeilingSource, Device, RoofPolicy


def policy_of(server: ServerSettings, machine_compute_peak: float | None = None) -> RoofPolicy:
    """What the configuration says about the server's ceilings; the machine's compute peak is a CPU server's too."""
    of_machine = machine_compute_peak if server.device == "cpu" else None
    return RoofPolicy(
        device=Device(server.device),
        reference=None if server.reference == "auto" else CeilingSource(server.reference),
        peak_bytes_per_second=server.peak_bandwidth,
        sustained_fraction=server.sustained_fraction,
        compute_flops_per_second=server.compute_peak or of_machine,
    )
