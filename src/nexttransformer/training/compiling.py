"""The training forward pass as one module, and how it is compiled (CUDA only)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nexttransformer.models import Decoder
from nexttransformer.ops.in_graph import prepare_compiler
from nexttransformer.training.distributed import World

Scope = Literal["model", "parts", "off"]


class TrainingForward(nn.Module):
    """Token ids -> the loss to differentiate and the nats to report.

    Compiling this module in place leaves the decoder itself as it is: evaluations run the same code as
    the `evaluate` command, and parameter names stay clean.
    """

    def __init__(self, decoder: Decoder, loss_scale: float) -> None:
        """Takes the decoder and W / tokens per update.

        DDP averages gradients over W ranks, so the gradient becomes the sum over all tokens of the
        update divided by their number, whatever the shares of the ranks.
        """
        super().__init__()
        self.decoder = decoder
        self.loss_scale = loss_scale

    def forward(self, ids_BT1: Tensor, weights_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scaled loss (float32 scalar) and the sum of nats over rows of weight 1 (float64 scalar)."""
        nats_BT = self.decoder(ids_BT1[:, :-1], ids_BT1[:, 1:])
        loss = (nats_BT.sum(dim=1) * weights_B).sum() * self.loss_scale
        nats = (nats_BT.detach().double().sum(dim=1) * weights_B).sum()
        return loss, nats


@dataclass(frozen=True)
class CompileSettings:
    """What is compiled.

    Attributes:
        scope: "model": one graph from ids to loss; "parts": every mixer and MLP by itself, so that
            gradients are handed to DDP while the backward pass goes on (evaluations then run the
            compiled parts too); "off": eager.
        splits_for_ddp: with scope "model" on several GPUs, dynamo cuts the graph at DDP's buckets, so
            that gradients are reduced while the backward pass goes on.
    """

    scope: Scope = "model"
    splits_for_ddp: bool = True


def choose_settings(world: World, *, is_wanted: bool) -> CompileSettings:
    """Returns the settings of a run: compiled on CUDA unless switched off, eager on a CPU."""
    return CompileSettings("model" if is_wanted and world.device.type == "cuda" else "off")


def compile_in_place(forward: TrainingForward, settings: CompileSettings) -> None:
    """Arranges compilation at the first forward pass; call it before wrapping in DDP. Shapes are fixed."""
    if settings.scope == "off":
        return
    prepare_compiler()
    torch._dynamo.config.optimize_ddp = settings.splits_for_ddp
    if settings.scope == "model":
        forward.compile(dynamic=False)
    else:
        for block in forward.decoder.blocks:
            block.attn.compile(dynamic=False)
            block.mlp.compile(dynamic=False)


def num_graphs() -> int:
    """Returns how many graphs torch has compiled in this process."""
    return int(_dynamo_counters().get("stats", {}).get("unique_graphs", 0))


def graph_breaks() -> list[str]:
    """Returns the reasons why compiled code was cut, each once."""
    return sorted(str(reason).splitlines()[0] for reason in _dynamo_counters().get("graph_break", {}))


def cache_lookups() -> dict[str, int]:
    """Returns how many compiled graphs came from the cache on disk (`hits`) and how many did not (`misses`)."""
    counted = _dynamo_counters().get("inductor", {})
    return {"hits": int(counted.get("fxgraph_cache_hit", 0)), "misses": int(counted.get("fxgraph_cache_miss", 0))}


def _dynamo_counters() -> Mapping[str, Mapping[str, int]]:
    # Importing the compiler takes seconds; where nobody did, nothing was compiled.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters if dynamo is not None else {}
