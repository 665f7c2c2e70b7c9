"""The kernel self-check itself, interpreted: probes of our own operations at small and odd sizes."""

import pytest
import torch

from nexttransformer.ops.path_check import check_path, failure
from nexttransformer.ops.probes import Sizes
from tests.ops.interpreted.conftest import OPERATIONS

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("sizes", [Sizes(3, 64, 64, 75, 448, 1000), Sizes(1, 128, 128, 130, 64, 1500)])
def test_self_check_passes(op: str, sizes: Sizes) -> None:
    check = check_path(op, "native", sizes, device=torch.device("cpu"))
    assert check.passed, failure(check)
    assert set(check.ratios) == {"context", "odd_length"}


def test_self_check_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong constant in a kernel fails the check by its output and its gradient."""
    from nexttransformer.ops.rotary_heads import fused

    monkeypatch.setattr(fused, "NORM_EPS", 0.05)
    check = check_path("rotary_heads", "native", Sizes(1, 64, 64, 40, 64, 64), device=torch.device("cpu"))
    assert not check.passed
    assert "o 0." in failure(check) and "dqkv 0." in failure(check)
