"""Curves small enough for a page: smoothing, thinning that keeps spikes, rounding."""

from collections.abc import Sequence

MAX_POINTS = 1200
_DIGITS = 6


def half_life(num_points: int) -> int:
    """Returns the half-life of the smoothing in points: 1 % of the curve, from 4 to 200."""
    return max(4, min(200, num_points // 100))


def smooth(values: Sequence[float], points: int) -> list[float]:
    """Returns the exponential moving average with that half-life, bias corrected: it starts at the first value.

    At the start, where curves are steep, the half-life is shorter: a twentieth of the points so far.
    """
    total = weight = 0.0
    result = []
    for index, value in enumerate(values):
        keep = 0.5 ** (1 / max(1.0, min(points, index / 20)))
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(total / weight)
    return result


def thin(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Returns the indices to draw: evenly spread, first and last always among them."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})


def thin_noisy(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Returns the indices to draw so that no spike is lost: the lowest and highest of each stretch."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = max(1, (limit - 2) // 2)
    chosen = {0, count - 1}
    for stretch in range(stretches):
        inside = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        chosen.add(min(inside, key=values.__getitem__))
        chosen.add(max(inside, key=values.__getitem__))
    return sorted(chosen)


def rounded(values: Sequence[float]) -> list[float]:
    """Returns the values with 6 significant digits: less than a pixel, a third of the bytes."""
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def median(values: Sequence[float]) -> float | None:
    """Returns the (upper) median, None for nothing."""
    return sorted(values)[len(values) // 2] if values else None
