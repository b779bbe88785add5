"""Formats the numbers in a report with three significant digits, in the unit that makes them shortest."""

# Each unit has the smallest time in ms that it formats, the unit's length in ms, and a name
TIMES = ((120_000.0, 60_000.0, "min"), (999.5, 1_000.0, "s"), (0.9995, 1.0, "ms"), (0.0, 1e-3, "µs"))


def time(ms: float) -> str:
    """Formats a time in milliseconds, such as 812 ms, 3.25 s or 4.17 min."""
    size, unit = next(((size, unit) for least, size, unit in TIMES if abs(ms) >= least), TIMES[0][1:])
    return f"{three_digits(ms / size)} {unit}"


def memory(mib: float) -> str:
    """Formats an amount of memory, such as 512 MiB or 1.50 GiB."""
    return f"{three_digits(mib / 1024)} GiB" if abs(mib) >= 1023.5 else f"{three_digits(mib)} MiB"


def count(number: float) -> str:
    """Formats a count, such as 12,345. A number that is not whole gets three digits, such as 3.25."""
    return f"{number:,.0f}" if float(number).is_integer() else three_digits(number)


def small_number(number: float) -> str:
    """Formats a difference or an error so that the order of magnitude is visible: 0, 1.2e-7, 0.25."""
    if number == 0 or 0.001 <= abs(number):
        return f"{number:.3g}"
    return f"{number:.1e}".replace("e-0", "e-")


def three_digits(number: float) -> str:
    """Formats a number with three significant digits, or more before the decimal point: 0.0123, 1.50, 98.1, 1,234."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    if abs(number) >= 9.995:
        return f"{number:.1f}"
    return f"{number:.2f}" if abs(number) >= 0.9995 or number == 0 else f"{number:.3g}"
