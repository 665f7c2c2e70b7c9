"""What single runs can resolve. Field figures for full-size runs, to be replaced by repeats of our own.

Repeats of one method with other seeds differ by these standard deviations; two single runs are told apart only
beyond 2 sqrt(2) of them.
"""

import math

BPB_SD = 2.3e-4
CORE_SD = 0.0062
BPB_BAND = 2 * math.sqrt(2) * BPB_SD
CORE_BAND = 2 * math.sqrt(2) * CORE_SD


def is_bpb_tie(first: float, second: float) -> bool:
    """Whether two single runs' BPB are not distinguishable."""
    return abs(first - second) < BPB_BAND


def is_core_tie(first: float, second: float) -> bool:
    """Whether two single runs' CORE values (fractions) are not distinguishable."""
    return abs(first - second) < CORE_BAND
