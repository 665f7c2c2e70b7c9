"""Which kind of work a kernel (CUDA) or an operator (CPU) does, told by its name."""

import re

PRODUCTS, ATTENTION, RECURRENT, LOSS = "products", "attention", "recurrent", "loss"
EMBEDDINGS, ELEMENTWISE, ACCUMULATION = "embeddings", "elementwise", "gradient_accumulation"
COPIES, OPTIMIZER, COMMUNICATION, OTHER, IDLE = "copies", "optimizer", "communication", "other", "idle"
# In the order of tables and plots.
CLASSES = (
    PRODUCTS,
    ATTENTION,
    RECURRENT,
    LOSS,
    EMBEDDINGS,
    ELEMENTWISE,
    ACCUMULATION,
    COPIES,
    OPTIMIZER,
    COMMUNICATION,
    OTHER,
    IDLE,
)

# The first pattern found in the lower-case name decides.
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (COMMUNICATION, r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_scatter"),
        (COPIES, r"^memcpy|^memset"),
        # Inductor names a kernel after the operators fused into it; attention's own kernels are templates.
        (ATTENTION, r"triton_tem_fused.*(flex|attention)"),
        (PRODUCTS, r"triton_(tem|mm|bmm)|triton_.*_mm_\d*$"),
        (EMBEDDINGS, r"triton_.*(embedding|index_put)"),
        (ELEMENTWISE, r"^triton_(poi|red|per|for)"),
        (ATTENTION, r"sdpa|flash|fmha|attention|attn|dot_do_o|convert_dq|softmax_warp"),
        (RECURRENT, r"chunk_|wy_|w_u_|solve_tril|merge_16x16|kda|gdn|delta_rule|l2norm|cumsum|fused_recurrent"),
        (LOSS, r"softcap|cross_entropy|log_softmax|nll_loss"),
        (EMBEDDINGS, r"embedding|index_put|index_select|indexing_backward|radixsort|radix_sort|compute_grad_weight"),
        (EMBEDDINGS, r"sum_and_scatter|krn_partial|::sort|devicesegmentedreduce|index_add|gather|lookup_|searchsorted"),
        (
            PRODUCTS,
            r"gemm|gemv|nvjet|cutlass|cublas|xmma|_product_kernel|splitk|aten::(mm|bmm|addmm|baddbmm)$|::linear",
        ),
        (ACCUMULATION, r"accumulategrad|cudafunctor_add<float>|cudafunctoronself_add<float>"),
        (COPIES, r"aten::(copy_|clone|contiguous|_to_copy|fill_|zero_|cat|empty|empty_like|empty_strided)$"),
        # Our own kernels, named after their operator.
        (ELEMENTWISE, r"rotary_|convolved_|stream_(forward|(mixing_)?backward)|sinkhorn_"),
        (ELEMENTWISE, r"norm|elementwise|reduce_kernel|vectorized|catarray|fillfunctor|multi_tensor|^aten::"),
    )
)


def classify(name: str) -> str:
    """Returns the class of a kernel or operator name; `other` if nothing fits."""
    lower = name.lower()
    return next((kind for kind, pattern in _PATTERNS if pattern.search(lower)), OTHER)
