"""AdamW for embeddings, head, scalars and everything Muon does not take (fp32 throughout).

With t = update + 1 for every parameter, in this order:

    p <- p (1 - lr wd);   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) * m / ( sqrt(v / (1 - b2^t)) + eps )

eps is added after the bias-corrected root. Gradients are dense: rows of unseen tokens still decay
and coast on their momentum. Source: Loshchilov and Hutter (2019), as in torch.optim.AdamW.
"""

import torch
from torch import Tensor


@torch.no_grad()
def adamw_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    *,
    update: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Applies one AdamW update in place to the parameters of one group.

    Args:
        parameters: fp32 tensors of any shape, all on one device; overwritten.
        gradients: their gradients, fp32, same shapes.
        first_moments: m, fp32, same shapes, zero before the first update; overwritten.
        second_moments: v, likewise.
        update: update index from 0; the bias correction uses t = update + 1.
        learning_rate: scheduled learning rate.
        betas: decay rates of m and v.
        eps: added to the root.
        weight_decay: decoupled decay, multiplied by the scheduled learning rate.

    On CUDA torch's fused kernel computes the same in one pass over memory.
    """
    is_fused = parameters[0].is_cuda
    (_update_fused if is_fused else _update_plain)(
        parameters, gradients, first_moments, second_moments, update + 1, learning_rate, betas, eps, weight_decay
    )


def _update_plain(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    t: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    wd: float,
) -> None:
    b1, b2 = betas
    for p, g, m, v in zip(parameters, gradients, first_moments, second_moments, strict=True):
        p.mul_(1 - lr * wd)
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        root = (v / (1 - b2**t)).sqrt_().add_(eps)
        p.addcdiv_(m, root, value=-lr / (1 - b1**t))


def _update_fused(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    t: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    wd: float,
) -> None:
    # The kernel reads t from the device; filling it there needs no synchronization.
    t_on_device = torch.full((), float(t), dtype=torch.float32, device=parameters[0].device)
    torch.ops.aten._fused_adamw_(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        [t_on_device] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=wd,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
