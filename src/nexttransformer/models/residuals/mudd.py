"""Multi-way dynamic dense connections (mudd), and their static one-way form (denseformer).

Shape letters: k sources, C roles.

Equations: x_0 = x0, x_(i+1) = output of block i. After block i there are k = i + 2 sources and
    mudd         a = W_2 GELU(W_1 n(x_(i+1))) + b in R^(4k), role-major over (query, key, value, residual)
    denseformer  a in R^k, one weight per source for all roles
    role input c of block i + 1 = sum_j a_cj x_j, coefficients and sums in float32.
Attention reads query, key and value and adds to the residual role; the MLP reads and adds to that sum.
lambda and mu act on all role inputs. Block 0 reads x0 in every role; after the last block only the residual
role exists. Backout is kept; the middle stream is the residual role after the middle block.
Source: arXiv 2502.12170 and Caiyun-AI/MUDDFormer; arXiv 2402.02622 and epfml/DenseFormer.
Groups: coefficient, float32. Init: W_1 U(-s, s) as W_v, W_2 = 0, b (or a) one-hot on the newest source: equal
to the plain residual. Step dependence: none.
FLOPs: generator weights + D per source and role after each block, +0.46 %; denseformer +0.06 %.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import NORM_EPS, Linear, projection_bound
from nexttransformer.models.parts import Options, Part, Residual, ResidualRead, uniform, values, zeros
from nexttransformer.models.residuals.streams import generate_logits, sum_tensors
from nexttransformer.ops.norm import squared_norm

NUM_ROLES = 4


class DepthWeights(Part):
    """Weights of all sources after one block, for `num_roles` roles."""

    def __init__(self, width: int, num_sources: int, num_roles: int, *, is_dynamic: bool) -> None:
        super().__init__()
        self.num_roles = num_roles
        self.is_dynamic = is_dynamic
        size = num_roles * num_sources
        if is_dynamic:
            bound = projection_bound(width)
            self.w1 = Linear(width, size, tag="coefficient", init=uniform(-bound, bound), is_float32=True)
            self.w2 = Linear(size, size, tag="coefficient", init=zeros(), is_float32=True)
        newest = torch.zeros(num_roles, num_sources, device="cpu")
        newest[:, -1] = 1.0
        self.declare("bias", (size,), tag="coefficient", init=values(newest))

    def forward(self, newest_BTD: Tensor) -> Tensor:
        """Returns the weights [..., C, k], float32; without the batch and time dimensions if static."""
        weights = self.bias
        if self.is_dynamic:
            hidden = functional.gelu(generate_logits(newest_BTD, squared_norm(newest_BTD), self.w1.weight, NORM_EPS))
            weights = weights + self.w2(hidden)
        return weights.unflatten(-1, (self.num_roles, -1))


class DenseState(NamedTuple):
    """Outputs so far (x0 first), and the inputs of the current block by role, residual last.

    `roles` has 4 entries for mudd, 1 if all roles read the same tensor.
    """

    sources: tuple[Tensor, ...]
    roles: tuple[Tensor, ...]


class Mudd(Residual):
    """The residual scheme mudd."""

    is_dynamic = True
    num_roles = NUM_ROLES

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__(config)
        self.width = config.width
        # (sources, roles) after each block.
        self.sites = [(block + 2, self.num_roles) for block in range(config.num_layers)]
        self.sites[-1] = (self.sites[-1][0], 1)
        self.blocks = torch.nn.ModuleList(
            DepthWeights(config.width, sources, roles, is_dynamic=self.is_dynamic) for sources, roles in self.sites
        )

    def init(self, x0_BTD: Tensor) -> DenseState:
        return DenseState((x0_BTD,), (x0_BTD,))

    def scale(self, state: DenseState, lambda_: Tensor, mu: Tensor, x0_BTD: Tensor) -> DenseState:
        roles = tuple((lambda_[None] * x + mu[None] * x0_BTD).to(x.dtype) for x in state.roles)
        return DenseState(state.sources, roles)

    def read(self, state: DenseState, sublayer: int) -> ResidualRead:
        if len(state.roles) == 1:
            return ResidualRead(state.roles[0], state.roles[0], state.roles[0])
        return ResidualRead(*state.roles[:3])

    def write(self, state: DenseState, sublayer: int, y_BTD: Tensor, context: Any) -> DenseState:
        output_BTD = state.roles[-1] + y_BTD
        if sublayer % 2 == 0:
            return DenseState(state.sources, (output_BTD,))
        sources = (*state.sources, output_BTD)
        weights = self.blocks[sublayer // 2](output_BTD)
        roles = tuple(_mix(role.split(1, dim=-1), sources) for role in weights.unbind(-2))
        return DenseState(sources, roles)

    def collapse(self, state: DenseState) -> Tensor:
        return state.roles[-1]

    def extra_macs(self) -> float:
        """D per source and role after each block."""
        return self.width * sum(sources * roles for sources, roles in self.sites)


class DenseFormer(Mudd):
    """The residual scheme denseformer."""

    is_dynamic = False
    num_roles = 1


def _mix(weights: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> Tensor:
    """Returns the sum of weighted sources; weights in float32, [..., 1], so that every term is."""
    terms = [weight * x for weight, x in zip(weights, sources, strict=True)]
    return sum_tensors(terms).to(sources[0].dtype)
