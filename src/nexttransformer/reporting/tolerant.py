"""Access to JSON values that may be damaged: a wrong or missing value is None, never a traceback."""

import math
from typing import Any, TypeVar

ValueType = TypeVar("ValueType", str, int, float, bool, list, dict)


def dig(value: Any, path: str, kind: type[ValueType]) -> ValueType | None:
    """Returns the value at a dotted path if it is there and of that kind, else None.

    Args:
        value: parsed JSON, of any shape.
        path: keys separated by dots; a whole number indexes a list.
        kind: expected type; `float` takes whole numbers too and refuses NaN and Infinity, `int` refuses booleans.
    """
    for key in path.split("."):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        # Beyond 64 bits it is damage, and too large for a float.
        value = float(value) if abs(value) < 2**63 else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dig_numbers(value: Any, path: str) -> list[float]:
    """Returns the finite numbers of the list at a path; empty where there is no list."""
    items = dig(value, path, list) or []
    numbers = [dig(items, str(index), float) for index in range(len(items))]
    return [number for number in numbers if number is not None]
