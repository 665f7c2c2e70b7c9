"""What this very machine can do: a large product, a copy, attention at the model's shape; and the bound they give.

Machines of one kind differ by several percent, so these are measured in the same run as the model.
"""

from typing import Any

import torch

from nexttransformer.benchmark.subject import Passes, Subject
from nexttransformer.benchmark.timing import Clock, repeat, slowest, summary
from nexttransformer.errors import ConfigError
from nexttransformer.evaluation.failures import describe
from nexttransformer.models.budget_formulas import softmax_attention_macs
from nexttransformer.ops.attention import attention, plan_attention
from nexttransformer.ops.relu_squared.tiles import Tile, chosen_tile, tiles, time_tile
from nexttransformer.registry import load_part
from nexttransformer.training.distributed import World

# Side of the square product and bytes of the copy, on a GPU and on a CPU (there only to show that it works).
_PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}
_NUM_STEPS = {"cuda": 20, "cpu": 3}
_NUM_WARMUP = {"cuda": 5, "cpu": 1}


def _seconds(world: World, function: Any) -> float:
    kind = world.device.type
    samples = repeat(world.device, function, num_steps=_NUM_STEPS[kind], num_warmup=_NUM_WARMUP[kind])
    return summary(slowest(world, samples, key=sum))["median_seconds"]


def _give_back(world: World) -> None:
    """Leaves the device's memory to the parts that follow."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _product_seconds(world: World, side: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(side, side, device=world.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _seconds(world, lambda: torch.matmul(a, b, out=out))


def _copy_seconds(world: World, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return _seconds(world, lambda: target.copy_(source))


def measure_machine(world: World) -> dict[str, Any]:
    """Times a square product of random data in the compute dtype and a copy; the slowest rank counts."""
    kind = world.device.type
    side, num_bytes = _PRODUCT_SIDE[kind], _COPY_BYTES[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    product_seconds = _product_seconds(world, side, dtype)
    copy_seconds = _copy_seconds(world, num_bytes)
    _give_back(world)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "product_side": side,
        "product_flops_per_second": 2 * side**3 / product_seconds,
        "copy_bytes": num_bytes,
        # A copy reads and writes.
        "copy_bytes_per_second": 2 * num_bytes / copy_seconds,
    }


def attention_windows(subject: Subject) -> list[int | None]:
    """Returns the window of every softmax-attention layer (None: unlimited), by the mixers' declarations."""
    layers = subject.config.layers
    uses = [load_part("mixer", layer["type"]).fused_ops_of(layer) for layer in layers]
    return [layer.get("window") for layer, ops in zip(layers, uses, strict=True) if "attention" in ops]


def measure_attention(subject: Subject, micro_batch: int, window: int | None, *, is_compiled: bool) -> dict[str, Any]:
    """Times attention forward and backward at the model's shape.

    FLOPs are causal-exact: 2 x multiply-adds forward, 2.5 times that backward.
    """
    world, config = subject.world, subject.config
    heads, dim, tokens = config.num_heads, config.head_dim, config.context_tokens
    shape = (micro_batch, tokens, heads, dim)
    dtype = subject.model.compute_dtype
    q, k, v = (torch.randn(shape, device=world.device, dtype=dtype).requires_grad_() for _ in range(3))
    upstream = torch.randn(shape, device=world.device, dtype=dtype)
    plan = plan_attention(tokens, window, world.device)
    # Flex attention exists only inside a compiled graph.
    function = torch.compile(attention, dynamic=False) if plan.backend == "flex" and is_compiled else attention
    clock, num_warmup = Clock(world.device), _NUM_WARMUP[world.device.type]
    # Each backward pass has a forward pass of its own: compiled graphs give their buffers away.
    for index in range(num_warmup + _NUM_STEPS[world.device.type]):
        if index >= num_warmup:
            clock.mark()
        o = function(q, k, v, window=window, plan=plan)
        if index >= num_warmup:
            clock.mark()
        torch.autograd.grad(o, (q, k, v), upstream)
    clock.mark()
    seconds = clock.seconds()
    forward_seconds, backward_seconds = (
        summary(slowest(world, part, key=sum))["median_seconds"] for part in (seconds[::2], seconds[1::2])
    )
    flops = 2 * softmax_attention_macs(heads, dim, dim, tokens, window) * micro_batch * tokens
    return {
        "window": window,
        "backend": plan.backend,
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "forward_flops_per_second": flops / forward_seconds,
        "backward_flops_per_second": 2.5 * flops / backward_seconds,
    }


def measure_roofline(passes: Passes, machine: dict[str, Any], *, is_compiled: bool) -> dict[str, Any]:
    """Bounds the tokens per second of a pass by its products and attention alone, at this machine's own rates.

    Sequence mixing that is not softmax attention is charged at the product rate, which no such kernel
    reaches: for recurrent layers the bound is optimistic.
    """
    subject = passes.subject
    layers = attention_windows(subject)
    measured = {
        window: measure_attention(subject, passes.micro_batch, window, is_compiled=is_compiled)
        for window in dict.fromkeys(layers)
    }
    _give_back(subject.world)
    context, config = subject.protocol.context_tokens, subject.config
    attention_macs = sum(
        softmax_attention_macs(config.num_heads, config.head_dim, config.head_dim, context, window) for window in layers
    )
    product_flops = 6 * (subject.budget.macs_per_token - attention_macs)
    product_seconds = product_flops / machine["product_flops_per_second"]
    per_layer = [measured[window]["forward_seconds"] + measured[window]["backward_seconds"] for window in layers]
    attention_seconds = sum(per_layer) / (passes.micro_batch * context)
    return {
        "attention": list(measured.values()),
        "product_flops_per_token": product_flops,
        "product_seconds_per_token": product_seconds,
        "attention_seconds_per_token": attention_seconds,
        "tokens_per_second": subject.world.world_size / (product_seconds + attention_seconds),
    }


def measure_tiles(passes: Passes) -> dict[str, Any]:
    """Times every candidate tile of the squared-ReLU products at this micro-batch's shape (CUDA only).

    A tile that does not compile has no seconds but its error.

    Raises:
        ConfigError: without a GPU.
    """
    subject = passes.subject
    if subject.world.device.type != "cuda":
        raise ConfigError("--parts tiles: needs a GPU; the kernel's tiles do not exist on a CPU. Leave it out.")
    config, num_tokens = subject.config, passes.micro_batch * subject.protocol.context_tokens

    def timed(tile: Tile, is_backward: bool) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "tile": tile._asdict(),
            "is_used": tile == chosen_tile(subject.world.device, is_backward=is_backward),
        }
        try:
            seconds = time_tile(tile, num_tokens, config.width, config.mlp_width, is_backward=is_backward)
        except Exception as error:  # noqa: BLE001 - a candidate may need more than the device has
            return {**facts, "seconds": None, "error": describe(error)}
        flops = 2 * num_tokens * config.width * config.mlp_width
        return {**facts, "seconds": seconds, "flops_per_second": flops / seconds}

    return {
        name: [timed(tile, is_backward) for tile in tiles(is_backward=is_backward)]
        for name, is_backward in (("forward", False), ("backward", True))
    }
