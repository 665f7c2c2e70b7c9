"""Numbers as people read them. None becomes an en dash."""

NOTHING = "\u2013"
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"))


def count(value: int | float | None) -> str:
    """Returns a whole number with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None, digits: int = 3) -> str:
    """Returns a large number in a few digits: 1.36 B, 4.64 M, 12,345."""
    if value is None:
        return NOTHING
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.{digits}g} {unit}"
    return count(value)


def millions(value: int | None) -> str:
    """Returns a count in millions with one decimal: 1,355.8 M."""
    return NOTHING if value is None else f"{value / 1e6:,.1f} M"


def decimals(value: float | None, digits: int) -> str:
    """Returns a number with fixed decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int) -> str:
    """Returns a number with fixed decimals and its sign; a true minus sign."""
    return NOTHING if value is None else f"{value:+.{digits}f}".replace("-", "\u2212")


def percent(fraction: float | None, digits: int = 1) -> str:
    """Returns a fraction in percent."""
    return NOTHING if fraction is None else f"{100 * fraction:.{digits}f} %"


def points(fraction: float | None) -> str:
    """Returns a CORE value times 100, with a true minus sign."""
    return NOTHING if fraction is None else f"{100 * fraction:.2f}".replace("-", "\u2212")


def seconds(value: float | None) -> str:
    """Returns a duration: 3.2 s, 4 min 10 s, 5 h 07 min, 2 d 3 h."""
    if value is None:
        return NOTHING
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def hours(value: float | None) -> str:
    """Returns hours with sensible digits."""
    return NOTHING if value is None else f"{value:,.3g}" if value < 100 else count(value)


def data_bytes(value: int | None) -> str:
    """Returns bytes in GiB or MiB."""
    if value is None:
        return NOTHING
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def moment(value: str | None) -> str:
    """Returns a log time to the second: 2026-01-31 12:00:00 UTC."""
    return NOTHING if value is None else f"{value[:10]} {value[11:19]} UTC"
