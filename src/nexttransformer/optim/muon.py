"""Muon with row equilibration, Polar Express, renormalization and NorMuon's second moments.

The unit is one matrix W of m x n = (out, in) with gradient G. Units of equal shape are updated in
one batch; batching may change the last bits, nothing more. The functions from `nesterov_` to
`apply_update` are the steps of `muon_update`, in order. Steps 2 to 5, with the matrix products, run
in the compute dtype (bf16 on a GPU, fp32 on a CPU; never fp16), everything else in the dtype of the
weights, fp32. The guards make a zero gradient give O = 0 and W <- W (1 - eta omega).

Shape letters of this file: E units of the batch, M rows and N columns of a unit.

Sources: Polar Express arXiv 2505.16932 (5 steps, safety 2e-2, cushion 2); row equilibration
2603.28254; renormalization 2602.21545; NorMuon 2510.05491; as combined in karpathy/nanochat@92d63d4.
"""

import math

import torch
from torch import Tensor

# Largest singular value that the iteration accepts is 1; the margin covers bf16 rounding.
NORM_MARGIN = 1.01
NORM_GUARD = 1e-6
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def unit_cost(num_rows: int, num_columns: int) -> int:
    """Returns the FLOPs of one Polar Express step: 4 s^2 l + 2 s^3, s the short and l the long side."""
    short, long = sorted((num_rows, num_columns))
    return 4 * short**2 * long + 2 * short**3


def second_moment_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of v for a matrix (m, n) or stack (E, m, n): one value per slice of the longer side."""
    *stack, num_rows, num_columns = shape
    return (*stack, num_rows, 1) if num_rows >= num_columns else (*stack, 1, num_columns)


@torch.no_grad()
def muon_update(
    weights_EMN: Tensor,
    gradients_EMN: Tensor,
    momentum_EMN: Tensor,
    second_moments: Tensor,
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    second_beta: float,
    eps: float,
    compute_dtype: torch.dtype,
) -> None:
    """Applies one Muon update to a batch of equally shaped matrices, in place.

    Args:
        weights_EMN: fp32 weights; overwritten with the new ones.
        gradients_EMN: fp32 gradients; used as working memory, undefined afterwards.
        momentum_EMN: Buf, fp32, zero before the first update; overwritten.
        second_moments: v, fp32, [E, M, 1] if M >= N else [E, 1, N], zero before the first update;
            overwritten.
        learning_rate: scheduled rate of the group, before the shape factor sqrt(max(1, m/n)).
        momentum: kappa of this update.
        weight_decay: omega of this update.
        second_beta: decay rate of v.
        eps: guard of v and of the last norm.
        compute_dtype: bfloat16 or float32, used for the matrix products.
    """
    num_rows, num_columns = weights_EMN.shape[-2:]
    x_EMN = nesterov_(gradients_EMN, momentum_EMN, momentum)
    x_EMN = bound_norm(equilibrate_rows(x_EMN.to(compute_dtype)))
    o_EMN = normalize(polar_express(x_EMN), second_moments, second_beta=second_beta, eps=eps)
    eta = learning_rate * math.sqrt(max(1.0, num_rows / num_columns))
    apply_update(weights_EMN, o_EMN, eta=eta, omega=weight_decay)


def nesterov_(gradients_EMN: Tensor, momentum_EMN: Tensor, kappa: float) -> Tensor:
    """Step 1: Buf <- kappa Buf + (1-kappa) G; returns X = (1-kappa) G + kappa Buf in the gradient's memory."""
    momentum_EMN.lerp_(gradients_EMN, 1 - kappa)
    return gradients_EMN.lerp_(momentum_EMN, kappa)


def equilibrate_rows(x_EMN: Tensor) -> Tensor:
    """Steps 2 and 3: scales every row to the same norm, ||X||_F / sqrt(m); X may share the input's memory."""
    row_norms_EM1 = torch.linalg.vector_norm(x_EMN, dim=-1, keepdim=True, dtype=_norm_dtype(x_EMN))
    norm_E11 = torch.linalg.vector_norm(row_norms_EM1, dim=-2, keepdim=True)
    target_E11 = norm_E11 / math.sqrt(x_EMN.shape[-2])
    return x_EMN.mul_(target_E11 / row_norms_EM1.clamp(min=NORM_GUARD))


def bound_norm(x_EMN: Tensor) -> Tensor:
    """Step 4: X / (1.01 ||X||_F + 1e-6); the result may share the input's memory."""
    norm_E11 = torch.linalg.vector_norm(x_EMN, dim=(-2, -1), keepdim=True, dtype=_norm_dtype(x_EMN))
    return x_EMN.div_(NORM_MARGIN * norm_E11 + NORM_GUARD)


def polar_express(x_EMN: Tensor) -> Tensor:
    """Step 5: five steps towards the orthogonal factor of X (of norm below 1), in the dtype of X.

    They do not finish the job: small singular values of a square matrix stay small.
    """
    is_wide = x_EMN.shape[-2] <= x_EMN.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        # The Gram matrix of the shorter side, then b A + c A^2 and a X + (...) X as one product each.
        gram = x_EMN @ x_EMN.mT if is_wide else x_EMN.mT @ x_EMN
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (polynomial, x_EMN) if is_wide else (x_EMN, polynomial)
        x_EMN = torch.baddbmm(x_EMN, left, right, beta=a)
    return x_EMN


def normalize(x_EMN: Tensor, second_moments: Tensor, *, second_beta: float, eps: float) -> Tensor:
    """Steps 6 to 8: sets the norm to sqrt(min(m, n)) and evens out the slices of the longer side.

    A slice is a row if m >= n, else a column. All three steps only scale whole slices, so the
    slices' norms are followed through them, and X itself is multiplied once.

    Args:
        x_EMN: result of the products, compute dtype.
        second_moments: v, one per slice; overwritten. There is no bias correction.
        second_beta: decay rate of v.
        eps: guard of v and of the last norm.

    Returns:
        O, in the dtype of v (fp32), with ||O||_F = sqrt(min(m, n)), or zero if X is zero.
    """
    num_rows, num_columns = x_EMN.shape[-2:]
    short_side = min(num_rows, num_columns)
    within_slice = -1 if num_rows >= num_columns else -2
    slice_norms = torch.linalg.vector_norm(x_EMN, dim=within_slice, keepdim=True, dtype=second_moments.dtype)
    # Step 6: X <- X sqrt(min(m, n)) / max(||X||_F, guard).
    scale = math.sqrt(short_side) / _total(slice_norms).clamp(min=NORM_GUARD)
    slice_norms = slice_norms * scale
    # Step 7: v <- beta v + (1 - beta) mean of X^2 over the slice; Y = X / sqrt(max(v, eps)).
    second_moments.lerp_(slice_norms.square() / short_side, 1 - second_beta)
    root = second_moments.clamp(min=eps).sqrt()
    # Step 8: O = Y ||X||_F / max(||Y||_F, eps).
    restore = _total(slice_norms) / _total(slice_norms / root).clamp(min=eps)
    return x_EMN * (scale / root * restore)


def apply_update(weights_EMN: Tensor, o_EMN: Tensor, *, eta: float, omega: float) -> None:
    """Step 9: W <- W - eta O - eta omega W [O W >= 0], the mask taken with W before the update, in place."""
    decayed_EMN = weights_EMN * (o_EMN * weights_EMN >= 0)
    weights_EMN.add_(o_EMN, alpha=-eta)
    weights_EMN.add_(decayed_EMN, alpha=-eta * omega)


def _total(slice_norms: Tensor) -> Tensor:
    # Frobenius norms, [E, 1, 1], from the norms of the slices.
    return torch.linalg.vector_norm(slice_norms, dim=(-2, -1), keepdim=True)


def _norm_dtype(x: Tensor) -> torch.dtype:
    # Norms of bf16 tensors are fp32.
    return torch.promote_types(x.dtype, torch.float32)
