"""Throughput arithmetic: MFU by both conventions, time and GPU hours to go."""

from dataclasses import dataclass

# Dense bf16 peak of one device in FLOP/s, as the vendor states it; the first name that is contained wins.
PEAK_FLOPS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A6000", 154.8e12),
    ("4090", 165.2e12),
    ("5090", 209.5e12),
    ("MI300X", 1307e12),
)


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a device in FLOP/s; None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS if name in device_name), None)


@dataclass(frozen=True)
class Throughput:
    """Costs of a run, for its progress line.

    Attributes:
        flops_per_token: training FLOPs per token, causal-exact (the protocol's count).
        nominal_flops_per_token: by the convention that charges every key of a window.
        peak: one device's dense bf16 peak in FLOP/s, None where unknown.
        world_size: devices.
    """

    flops_per_token: float
    nominal_flops_per_token: float
    peak: float | None
    world_size: int

    def mfu(self, tokens_per_second: float) -> float | None:
        """Returns the causal-exact model FLOPs utilization, None where the peak is unknown."""
        return self._utilization(self.flops_per_token, tokens_per_second)

    def nominal_mfu(self, tokens_per_second: float) -> float | None:
        """Returns the utilization by the nominal convention."""
        return self._utilization(self.nominal_flops_per_token, tokens_per_second)

    def _utilization(self, flops_per_token: float, tokens_per_second: float) -> float | None:
        if self.peak is None:
            return None
        return flops_per_token * tokens_per_second / (self.peak * self.world_size)


def show_duration(seconds: float) -> str:
    """Returns a duration as `45 s`, `12 min`, `3.4 h` or `2.1 d`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
