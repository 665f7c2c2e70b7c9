"""Triton kernels of the stream write: one pass over the streams each way.

Streams, old and new, are [tokens, N, D], y and x0 [tokens, D], 16-bit; res is [tokens, N, N], post and the squares are
[tokens, N], lambda and mu one number, float32. Gradients, named d..., are shaped like what they belong to, but those
of lambda and mu have one number a token. All are contiguous; what a kind of write lacks is neither read nor written.
"""

import triton
import triton.language as tl

# Rows of a matrix on tensor cores, the streams of several tokens; a plain 16 in the kernel.
ROWS = 16


@triton.jit
def stream_forward_kernel(
    streams,
    y,
    res,
    post,
    lambda_,
    mu,
    x0,
    new,
    squares,
    width,
    num_streams: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_mixing: tl.constexpr,
    has_scaling: tl.constexpr,
):
    """A program has one token."""
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, padded)
    is_stream = s < num_streams
    post_N = tl.load(post + token * num_streams + s, mask=is_stream, other=0.0)
    if has_mixing:
        pair = s[:, None] * num_streams + s[None, :]
        is_pair = is_stream[:, None] & is_stream[None, :]
        res_NN = tl.load(res + token * (num_streams * num_streams) + pair, mask=is_pair, other=0.0)
    total = tl.zeros((padded, block), dtype=tl.float32)
    kind = new.dtype.element_ty
    for start in range(0, width, block):
        d = start + tl.arange(0, block)
        inside = is_stream[:, None] & (d < width)[None, :]
        at = token * (num_streams * width) + s[:, None] * width + d[None, :]
        x = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
        if has_mixing:
            x = tl.sum(res_NN[:, :, None] * x[:, None, :], axis=0)
        x += post_N[:, None] * tl.load(y + token * width + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        if has_scaling:
            x *= tl.load(lambda_)
            x += tl.load(mu) * tl.load(x0 + token * width + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        rounded = x.to(kind)
        tl.store(new + at, rounded, mask=inside)
        exact = tl.where(inside, rounded.to(tl.float32), 0.0)
        total += exact * exact
    tl.store(squares + token * num_streams + s, tl.sum(total, 1), mask=is_stream)


@triton.jit
def stream_backward_kernel(
    gradient,
    streams,
    y,
    post,
    lambda_,
    mu,
    x0,
    dstreams,
    dy,
    dpost,
    dlambda,
    dmu,
    dx0,
    width,
    num_streams: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_scaling: tl.constexpr,
):
    """Without mixing; a program has one token."""
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, padded)
    is_stream = s < num_streams
    post_N = tl.load(post + token * num_streams + s, mask=is_stream, other=0.0)
    products = tl.zeros((padded, block), dtype=tl.float32)
    outputs = tl.zeros((padded, block), dtype=tl.float32)
    firsts = tl.zeros((block,), dtype=tl.float32)
    kind = dstreams.dtype.element_ty
    scale = 1.0
    if has_scaling:
        scale = tl.load(lambda_)
    for start in range(0, width, block):
        d = start + tl.arange(0, block)
        inside = is_stream[:, None] & (d < width)[None, :]
        at = token * (num_streams * width) + s[:, None] * width + d[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        products += g * tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
        y_D = tl.load(y + token * width + d, mask=d < width, other=0.0).to(tl.float32)
        outputs += g * y_D[None, :]
        if has_scaling:
            whole = tl.sum(g, 0)
            firsts += whole * tl.load(x0 + token * width + d, mask=d < width, other=0.0).to(tl.float32)
            tl.store(dx0 + token * width + d, (tl.load(mu) * whole).to(kind), mask=d < width)
        tl.store(dstreams + at, (scale * g).to(kind), mask=inside)
        dy_D = scale * tl.sum(post_N[:, None] * g, 0)
        tl.store(dy + token * width + d, dy_D.to(kind), mask=d < width)
    dpost_N = tl.sum(outputs, 1)
    tl.store(dpost + token * num_streams + s, scale * dpost_N, mask=is_stream)
    if has_scaling:
        tl.store(dlambda + token, tl.sum(post_N * dpost_N, 0) + tl.sum(tl.sum(products, 1), 0))
        tl.store(dmu + token, tl.sum(firsts, 0))


@triton.jit
def _two_terms(matrix, kind: tl.constexpr):
    """Returns two 16-bit terms whose sum has twice the bits, for the tensor cores."""
    high = matrix.to(kind)
    return high, (matrix - high.to(tl.float32)).to(kind)


@triton.jit
def stream_mixing_backward_kernel(
    gradient,
    streams,
    y,
    res,
    post,
    lambda_,
    mu,
    x0,
    dstreams,
    dy,
    dres,
    dpost,
    dlambda,
    dmu,
    dx0,
    num_tokens,
    width,
    num_streams: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_scaling: tl.constexpr,
):
    """With mixing, on tensor cores; a program has the streams of several tokens as the rows r of 16 x 16 matrices.

    What belongs to a token, its output or x0, has a row as well: output j is row j, x0 of token j row 8 + j.
    """
    tokens: tl.constexpr = 16 // padded
    first = tl.program_id(0).to(tl.int64) * tokens
    r = tl.arange(0, 16)
    token, s = r // padded, r % padded
    is_row = (s < num_streams) & (first + token < num_tokens)
    row = (first + token) * num_streams + s
    j = r % 8
    is_output, is_x0 = r < 8, r >= 8
    is_token = (j < tokens) & (first + j < num_tokens)
    same = (token[:, None] == token[None, :]) & is_row[:, None] & is_row[None, :]
    belongs = (j[:, None] == token[None, :]) & is_token[:, None] & is_row[None, :]
    kind = dstreams.dtype.element_ty
    scale = 1.0
    if has_scaling:
        scale = tl.load(lambda_)
    post_R = tl.load(post + row, mask=is_row, other=0.0)
    pair = row[:, None] * num_streams + s[None, :]
    res_RR = tl.load(res + pair, mask=same, other=0.0)
    mix_high, mix_low = _two_terms(scale * res_RR, kind)
    # Gradients of a token's output and x0 from those of its streams.
    share = tl.where(belongs & is_output[:, None], scale * post_R[None, :], 0.0)
    if has_scaling:
        share += tl.where(belongs & is_x0[:, None], tl.load(mu), 0.0)
    share_high, share_low = _two_terms(share, kind)
    # Products of the gradients with the old streams, and with outputs and x0.
    products = tl.zeros((16, 16), dtype=tl.float32)
    others = tl.zeros((16, 16), dtype=tl.float32)
    for start in range(0, width, block):
        d = start + tl.arange(0, block)
        inside = is_row[:, None] & (d < width)[None, :]
        at = row[:, None] * width + d[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0)
        x = tl.load(streams + at, mask=inside, other=0.0)
        token_at = (first + j)[:, None] * width + d[None, :]
        is_near = is_token[:, None] & (d < width)[None, :]
        z = tl.load(y + token_at, mask=is_near & is_output[:, None], other=0.0)
        if has_scaling:
            z += tl.load(x0 + token_at, mask=is_near & is_x0[:, None], other=0.0)
        products = tl.dot(x, tl.trans(g), products)
        others = tl.dot(g, tl.trans(z), others)
        dx = tl.dot(mix_low, g, tl.dot(mix_high, g))
        tl.store(dstreams + at, dx.to(kind), mask=inside)
        dz = tl.dot(share_low, g, tl.dot(share_high, g)).to(kind)
        tl.store(dy + token_at, dz, mask=is_near & is_output[:, None])
        if has_scaling:
            tl.store(dx0 + token_at, dz, mask=is_near & is_x0[:, None])
    dpost_R = tl.sum(tl.where(token[:, None] == r[None, :], others, 0.0), 1)
    tl.store(dpost + row, scale * dpost_R, mask=is_row)
    tl.store(dres + pair, scale * products, mask=same)
    if has_scaling:
        change_R = tl.sum(tl.where(same, res_RR * products, 0.0), 1) + post_R * dpost_R
        firsts_R = tl.sum(tl.where(8 + token[:, None] == r[None, :], others, 0.0), 1)
        of_token = (token[None, :] == r[:, None]) & is_row[None, :]
        tl.store(dlambda + first + r, tl.sum(tl.where(of_token, change_R[None, :], 0.0), 1), mask=is_token & is_output)
        tl.store(dmu + first + r, tl.sum(tl.where(of_token, firsts_R[None, :], 0.0), 1), mask=is_token & is_output)
