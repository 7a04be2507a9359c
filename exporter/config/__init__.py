"""config.yaml -> validated, immutable settings. The rest of the package reads only what is named here."""

from exporter.config.keyfile import read_key
from exporter.config.loading import ConfigError, load, parse, to_yaml
from exporter.config.settings import BandwidthSettings, ProbeSettings, ServerSettings, Settings
from exporter.config.warnings import Warned, warnings

__all__ = [
    "BandwidthSettings",
    "ConfigError",
    "ProbeSettings",
    "ServerSettings",
    "Settings",
    "Warned",
    "load",
    "parse",
    "read_key",
    "to_yaml",
    "warnings",
]
