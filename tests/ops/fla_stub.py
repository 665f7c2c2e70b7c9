"""A stand-in for fla-core 0.6.0 on a CPU: the inner functions our wrappers call, computed by the references.

Signatures, result order and shapes follow the package; the cumulative decay is in base 2 and per chunk, as there.
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch

from nexttransformer.ops.chunking import CHUNK_TOKENS
from nexttransformer.ops.gated_delta_rule.naive import gated_delta_rule_chunk
from nexttransformer.ops.kimi_delta_attention.naive import kimi_delta_attention_chunk


def _cumulate(g):
    chunks = [part.cumsum(1) for part in g.float().split(CHUNK_TOKENS, dim=1)]
    return torch.cat(chunks, dim=1) / math.log(2)


def _differences(total):
    parts = [torch.diff(part, dim=1, prepend=torch.zeros_like(part[:, :1])) for part in total.split(CHUNK_TOKENS, 1)]
    return torch.cat(parts, dim=1) * math.log(2)


def _gradients(*arguments) -> Any:
    # Inside a custom operation autograd is switched off for the thread.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_gradients_here, *arguments).result()


def _gradients_here(function, q, k, v, g, beta, initial_state, do, dht):
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v, g, beta)]
    initial = None if initial_state is None else initial_state.detach().requires_grad_()
    with torch.enable_grad():
        o, state = function(*leaves, initial_state_BHKV=initial)
        outputs, weights = ([o], [do.float()]) if dht is None else ([o, state], [do.float(), dht])
        wanted = leaves + ([] if initial is None else [initial])
        gradients = torch.autograd.grad(outputs, wanted, weights)
    return (*gradients, None)[:6] if initial is None else gradients


def _matrix(k):
    return k.new_zeros(*k.shape[:3], CHUNK_TOKENS)


class FlaStub:
    """Counts calls; `damage` scales dk; `guard` raises in the gated backward unless the constant is switched."""

    def __init__(self):
        self.calls: list[str] = []
        self.damage: dict[str, float] = {}
        self.modules: dict[str, Any] = {
            name: ModuleType(name)
            for name in (
                "fla",
                "fla.ops.common.chunk_o",
                "fla.ops.gated_delta_rule.chunk",
                "fla.ops.kda.chunk_fwd",
                "fla.ops.kda.chunk_bwd",
            )
        }
        self.chunk_o = self.modules["fla.ops.common.chunk_o"]
        self.chunk_o.TRITON_ABOVE_3_7_1 = True
        gdn = self.modules["fla.ops.gated_delta_rule.chunk"]
        gdn.chunk_gated_delta_rule_fwd = self.gdn_forward
        gdn.chunk_gated_delta_rule_bwd = self.gdn_backward
        self.modules["fla.ops.kda.chunk_fwd"].chunk_kda_fwd = self.kda_forward
        self.modules["fla.ops.kda.chunk_bwd"].chunk_kda_bwd = self.kda_backward

    def install(self, monkeypatch):
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def gdn_forward(self, q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size=64):
        self.calls.append("gdn_forward")
        assert scale == q.shape[-1] ** -0.5 and all(x.is_contiguous() for x in (q, k, v, g, beta))
        o, state = gated_delta_rule_chunk(q, k, v, g, beta, initial_state_BHKV=initial_state)
        return _cumulate(g), o.contiguous(), _matrix(k), state if output_final_state else None, initial_state, None

    def gdn_backward(self, q, k, v, g, beta, A, scale, initial_state, do, dht, chunk_size=64):
        self.calls.append("gdn_backward")
        if not self.chunk_o.TRITON_ABOVE_3_7_1:
            raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")
        args = (q, k, v, _differences(g), beta, initial_state, do, dht)
        dq, dk, dv, dg, dbeta, dh0 = _gradients(gated_delta_rule_chunk, *args)
        return dq, dk * self.damage.get("gdn", 1.0), dv, dbeta, dg, dh0, None, None

    def kda_forward(self, q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size=64):
        self.calls.append("kda_forward")
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        o, state = kimi_delta_attention_chunk(q, k, v, g, beta, initial_state_BHKV=initial_state)
        state = state if output_final_state else None
        return (
            o.contiguous(),
            state,
            _cumulate(g),
            _matrix(k),
            _matrix(k),
            None,
            None,
            None,
            None,
            None,
            None,
            initial_state,
        )

    def kda_backward(self, q, k, v, beta, Aqk, Akk, scale, initial_state, do, dht, g=None, chunk_size=64):
        self.calls.append("kda_backward")
        args = (q, k, v, _differences(g), beta, initial_state, do, dht)
        dq, dk, dv, dg, dbeta, dh0 = _gradients(kimi_delta_attention_chunk, *args)
        return dq, dk * self.damage.get("kda", 1.0), dv, dbeta, dg, dh0, None, None
