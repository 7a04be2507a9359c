"""The roofline as a picture: where its lines and points stand on a page, on two logarithmic axes.

Williams, Waterman, Patterson, "Roofline", CACM 2009: attainable FLOP/s = min(compute peak, intensity x bandwidth).
"""

from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Final

from exporter.present.words import si
from exporter.roofline.snapshot import ServerView

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 16, 26, HEIGHT - 40


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis of whole decades, drawn from one place to another."""

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def covering(cls, lowest: float, highest: float, start: float, end: float) -> "Axis":
        """The axis of the fewest decades that hold both values."""
        low = floor(log10(lowest))
        return cls(low, max(low + 1, ceil(log10(highest))), start, end)

    def at(self, value: float) -> float:
        """Where the value stands."""
        share = (log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def decades(self) -> list[float]:
        """The powers of ten on the axis."""
        return [10.0**n for n in range(self.low, self.high + 1)]


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class RoofLine:
    """One ceiling's roof: the slope of the memory, then the flat of the compute peak if that is known."""

    points: str
    label: str
    label_x: float
    label_y: float
    reference: bool


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A measured batch."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Everything to draw, in the units of the picture."""

    ticks_x: tuple[Tick, ...]
    ticks_y: tuple[Tick, ...]
    roofs: tuple[RoofLine, ...]
    points: tuple[PlotPoint, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


def roofline_plot(s: ServerView) -> Plot | None:
    """The server's roofline with its batches; None while no ceiling or no batch can be placed."""
    placed = {
        batch: (p.intensity_flops_per_byte, p.flops_per_second)
        for batch, p in s.points.items()
        if p.intensity_flops_per_byte and p.flops_per_second
    }
    ceilings, compute = s.roof.ceilings, s.roof.compute_flops_per_second
    if not placed or not ceilings:
        return None
    ridges = [compute / ceiling for ceiling in ceilings.values()] if compute else []
    intensities = [intensity for intensity, _ in placed.values()]
    x = Axis.covering(min(intensities) / 1.5, 1.5 * max(*intensities, *ridges, 0), LEFT, RIGHT)
    first, last = x.decades()[0], x.decades()[-1]
    peak = compute or inf
    left_ends = [min(first * ceiling, peak) for ceiling in ceilings.values()]
    right_ends = [min(last * ceiling, peak) for ceiling in ceilings.values()]
    rates = [rate for _, rate in placed.values()]
    y = Axis.covering(min(*rates, *left_ends), 1.2 * max(*rates, *right_ends), BOTTOM, TOP)
    roofs = []
    for row, (source, ceiling) in enumerate(sorted(ceilings.items(), key=lambda item: -item[1])):
        bends = [bend for bend in (peak / ceiling,) if first < bend < last]
        path = [(intensity, min(intensity * ceiling, peak)) for intensity in (first, *bends, last)]
        corners = " ".join(f"{x.at(intensity)},{y.at(rate)}" for intensity, rate in path)
        label = f"{source} {si(ceiling, 'B/s')}"
        roofs.append(RoofLine(corners, label, LEFT + 34, TOP + 18 + 16 * row, source is s.roof.reference))
    return Plot(
        ticks_x=tuple(Tick(x.at(value), f"{value:g}") for value in x.decades()),
        ticks_y=tuple(Tick(y.at(value), si(value, "").replace(".00", "").replace(".0", "")) for value in y.decades()),
        roofs=tuple(roofs),
        points=tuple(PlotPoint(x.at(i), y.at(rate), f"batch {batch}") for batch, (i, rate) in placed.items()),
    )
