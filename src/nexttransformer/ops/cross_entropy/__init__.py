"""Cross-entropy of a soft-capped head: one function, a plain path and a fused CUDA path."""

from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.cross_entropy.naive import softcap_cross_entropy_naive


def softcap_cross_entropy(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float) -> Tensor:
    """Returns -log softmax(c tanh(z / c))[target] per token with z = h W^T.

    Args:
        h_ND: normalized hidden vectors, compute dtype.
        weight_VD: head weight, float32 or h's dtype; cast to h's dtype for the product.
        targets_N: target ids, int64.
        soft_cap: c.

    Returns:
        Nats per token [N], float32.
    """
    if is_fused("cross_entropy", h_ND):
        # Imported on first use: needs Triton.
        from nexttransformer.ops.cross_entropy.fused import softcap_cross_entropy_fused

        return softcap_cross_entropy_fused(h_ND, weight_VD, targets_N, soft_cap)
    return softcap_cross_entropy_naive(h_ND, weight_VD, targets_N, soft_cap)
