"""The decoder skeleton: embeddings, smear, layer loop, backout, head and loss.

Equals the base of karpathy/nanochat (nanochat/gpt.py); mixers and the residual scheme are parts.
Parameter names are nanochat's and are an interface: published weights load strictly.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import Linear, Lookup, projection_bound, rms_norm, rope_table
from nexttransformer.models.parts import (
    MixerInput,
    ParameterSpec,
    Part,
    Residual,
    Rope,
    constant,
    normal,
    tensor_generator,
    uniform,
    values,
    zeros,
)
from nexttransformer.models.state import DecoderState
from nexttransformer.ops.cross_entropy import softcap_cross_entropy
from nexttransformer.ops.lookup_gradient import lookup_order
from nexttransformer.registry import load_part

SMEAR_CHANNELS = 24


class Block(nn.Module):
    """One layer's parts: `attn` is its mixer (nanochat's name), `mlp` its MLP."""

    def __init__(self, config: ModelConfig, layer: int, *, has_value_row: bool) -> None:
        super().__init__()
        options = dict(config.layers[layer])
        mixer = load_part("mixer", options.pop("type"))
        self.attn = mixer(config, layer, mixer.Options(**options), has_value_row=has_value_row)
        self.mlp = load_part("mlp", config.mlp_type)(config)


class Decoder(Part):
    """A decoder of any registered composition. Parameters are float32; there are no buffers."""

    # What the skeleton itself may run fused on CUDA (folders of `ops/`).
    fused_ops = ("cross_entropy", "lookup_gradient")

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        num_layers, width, vocab = config.num_layers, config.width, config.vocab_size
        bound = projection_bound(width)
        table_layers = [layer for layer in range(num_layers) if layer % 2 == (num_layers - 1) % 2]
        self.transformer = nn.ModuleDict(
            {
                "wte": Lookup(vocab, width, tag="embedding", init=normal(0.8)),
                "h": nn.ModuleList(
                    Block(config, layer, has_value_row=layer in table_layers) for layer in range(num_layers)
                ),
            }
        )
        self.lm_head = Linear(width, vocab, tag="head", init=normal(0.001))
        self.value_embeds = nn.ModuleDict(
            {
                str(layer): Lookup(vocab, width, tag="value_embedding", init=uniform(-bound, bound))
                for layer in table_layers
            }
        )
        options = dict(config.residual)
        residual = load_part("residual", options.pop("type"))
        self.residual: Residual = residual(config, residual.Options(**options))
        span = max(num_layers - 1, 1)
        layers = torch.arange(num_layers, dtype=torch.float64, device="cpu")
        if self.residual.keeps_skeleton_scalars:
            self.declare("resid_lambdas", (num_layers,), tag="lambda", init=values(1.15 - 0.10 * layers / span))
            self.declare("x0_lambdas", (num_layers,), tag="x0_lambda", init=values(0.20 - 0.15 * layers / span))
            self.declare("backout_lambda", (1,), tag="smear_backout", init=constant(0.2))
        self.smear_gate = Linear(SMEAR_CHANNELS, 1, tag="smear_backout", init=uniform(0.0, 0.02))
        self.declare("smear_lambda", (1,), tag="smear_backout", init=zeros())
        self._rope: Rope | None = None

    @property
    def blocks(self) -> list[Block]:
        """The layers in order."""
        return cast(list[Block], list(cast(nn.ModuleList, self.transformer["h"])))

    @property
    def is_update_dependent(self) -> bool:
        """Whether any part's behaviour depends on the update index."""
        mixers = any(block.attn.is_update_dependent for block in self.blocks)
        return mixers or self.residual.is_update_dependent

    def set_step(self, update: int) -> None:
        """Tells step-dependent parts how many updates are completed; others ignore it."""
        for module in self.modules():
            tell = getattr(module, "set_step", None)
            if module is not self and tell is not None:
                tell(update)

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the declaration of every parameter by its public name, in the model's order.

        Raises:
            ValueError: if a parameter was created without `declare` (a part's bug).
        """
        specs = {}
        for prefix, module in self.named_modules():
            for name, spec in getattr(module, "declarations", {}).items():
                specs[f"{prefix}.{name}" if prefix else name] = spec
        names = [name for name, _ in self.named_parameters()]
        missing = sorted(set(names) ^ set(specs))
        if missing:
            raise ValueError(f"parameters without a tag and initialization: {', '.join(missing)}")
        return {name: specs[name] for name in names}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws every parameter on the CPU from its own generator, independent of device and other tensors."""
        specs = self.parameter_specs()

        def draw(item: tuple[str, nn.Parameter]) -> None:
            name, parameter = item
            spec = specs[name]
            drawn = spec.init(spec.shape, tensor_generator(seed, name))
            if drawn.shape != parameter.shape or drawn.dtype != torch.float32:
                raise ValueError(f"{name}: initialization gave {tuple(drawn.shape)} {drawn.dtype}")
            # The gradient mode belongs to a thread.
            with torch.no_grad():
                parameter.copy_(drawn)

        # One generator draws on one core; with one per tensor the cores share the work.
        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(draw, self.named_parameters()))

    def prepare(self, device: torch.device) -> None:
        """Builds the rotary table and the mixers' masks for the context on `device`, so that compilation sees them."""
        self.rope(0, self.config.context_tokens, device)
        for block in self.blocks:
            block.attn.prepare(self.config.context_tokens, device)

    def rope(self, start: int, num_tokens: int, device: torch.device) -> Rope:
        """Returns the rotary table of positions start .. start + num_tokens - 1, growing the cache on demand."""
        stop = start + num_tokens
        if self._rope is None or self._rope.cos.shape[0] < stop or self._rope.cos.device != device:
            length = max(stop, self.config.context_tokens)
            self._rope = rope_table(
                length, self.config.head_dim, self.config.rope_base, device=device, dtype=self.compute_dtype
            )
        return Rope(self._rope.cos[start:stop], self._rope.sin[start:stop])

    def _smear(self, e_BTD: Tensor, previous_B1D: Tensor | None) -> Tensor:
        """Adds a gated copy of the previous token's un-smeared embedding: e_t + s sigmoid(w e_t[:24]) e_{t-1}."""
        if previous_B1D is None:
            shifted = functional.pad(e_BTD, (0, 0, 1, 0))[:, :-1]
        else:
            shifted = torch.cat([previous_B1D, e_BTD[:, :-1]], dim=1)
        gate_BT1 = torch.sigmoid(self.smear_gate(e_BTD[..., :SMEAR_CHANNELS]).float()).to(e_BTD.dtype)
        mixed = e_BTD.float() + self.smear_lambda * gate_BT1.float() * shifted.float()
        return mixed.to(e_BTD.dtype)

    def hidden(
        self, ids_BT: Tensor, *, state: DecoderState | None = None, want_state: bool = False
    ) -> tuple[Tensor, DecoderState | None]:
        """Runs the decoder up to the normalized input of the head.

        Args:
            ids_BT: token ids, int64 or int32.
            state: what an earlier part of the same rows left; None at the start.
            want_state: whether to return the state after the last token.

        Returns:
            h [B, T, D] in the compute dtype, and the state or None.
        """
        dtype = self.compute_dtype
        start = state.num_tokens if state is not None else 0
        rope = self.rope(start, ids_BT.shape[1], ids_BT.device)
        wte = cast(Lookup, self.transformer["wte"])
        # Every table is looked up with the same ids.
        order = lookup_order(ids_BT, wte.weight, dtype)
        e_BTD = rms_norm(wte(ids_BT, dtype, order))
        x0_BTD = self._smear(e_BTD, state.embedding if state is not None else None)
        residual, has_scalars = self.residual, self.residual.keeps_skeleton_scalars
        streams = residual.init(x0_BTD)
        middle = self.config.num_layers // 2
        u_mid = None
        mixer_states = []
        for layer, block in enumerate(self.blocks):
            if has_scalars:
                streams = residual.scale(streams, self.resid_lambdas[layer], self.x0_lambdas[layer], x0_BTD)
            read = residual.read(streams, 2 * layer)
            row_BTD = self.value_embeds[str(layer)](ids_BT, dtype, order) if block.attn.has_value_row else None
            y_BTD, mixer_state = block.attn(
                _normalized(read.query, read.key, read.value),
                row_BTD,
                rope,
                state=state.mixers[layer] if state is not None else None,
                want_state=want_state,
            )
            mixer_states.append(mixer_state)
            streams = residual.write(streams, 2 * layer, y_BTD, read.context)
            read = residual.read(streams, 2 * layer + 1)
            streams = residual.write(streams, 2 * layer + 1, block.mlp(rms_norm(read.query)), read.context)
            if layer == middle and has_scalars:
                u_mid = residual.collapse(streams)
        u_BTD = residual.finish(streams)
        if u_mid is not None:
            u_BTD = (u_BTD.float() - self.backout_lambda * u_mid.float()).to(dtype)
        new_state = None
        if want_state:
            new_state = DecoderState(start + ids_BT.shape[1], e_BTD[:, -1:], tuple(mixer_states))
        return rms_norm(u_BTD), new_state

    def head_logits(self, h: Tensor) -> Tensor:
        """Returns soft-capped logits, float32 [..., V], of normalized hidden vectors [..., D]."""
        cap = self.config.logit_soft_cap
        return cap * torch.tanh(self.lm_head(h).float() / cap)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Returns logits_BTV (float32), or with targets the cross-entropy of each token, nats_BT (float32)."""
        h_BTD, _ = self.hidden(ids_BT)
        if targets_BT is None:
            return self.head_logits(h_BTD)
        weight_VD = self.lm_head.cast_weight(h_BTD.dtype)
        nats_N = softcap_cross_entropy(
            h_BTD.flatten(0, 1), weight_VD, targets_BT.flatten().long(), self.config.logit_soft_cap
        )
        return nats_N.view_as(targets_BT)


def _normalized(query: Tensor, key: Tensor, value: Tensor) -> MixerInput:
    """Normalizes the role inputs, once if they are one tensor."""
    if query is key and key is value:
        x = rms_norm(query)
        return MixerInput(x, x, x)
    return MixerInput(rms_norm(query), rms_norm(key), rms_norm(value))
