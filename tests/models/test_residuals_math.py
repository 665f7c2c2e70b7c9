"""Residual schemes against the published equations, written out for one token in float64 numpy."""

import itertools

import numpy as np
import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.models.residuals.manifold_hyper_connections import permutation_matrices
from nexttransformer.models.residuals.streams import project_float32
from nexttransformer.ops.sinkhorn import sinkhorn
from tests.models.randomize import randomize

NUM_STREAMS = 4
LAMBDA, MU = 0.9, 0.2


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normalize(x, eps):
    return x / np.sqrt((x * x).mean() + eps)


def outputs(num_sublayers: int, width: int) -> np.ndarray:
    """Pretended sublayer outputs: independent of the inputs, so that only the residual scheme is under test."""
    return np.random.default_rng(0).normal(size=(num_sublayers, width))


def run_scheme(method: str):
    """Runs the scheme on one token; returns its parameters, x0, outputs, every read (query role) and the end."""
    model = build_model(resolve_method(method_files()[method], "test-v1"))
    randomize(model)
    scheme = model.residual
    width = model.config.width
    x0 = np.random.default_rng(1).normal(size=width)
    ys = outputs(scheme.num_sublayers, width)

    def tensor(value):
        return torch.tensor(value, dtype=torch.float32).view(1, 1, -1)

    reads = []
    with torch.no_grad():
        state = scheme.init(tensor(x0))
        for sublayer in range(scheme.num_sublayers):
            if sublayer % 2 == 0 and scheme.keeps_skeleton_scalars:
                state = scheme.scale(state, torch.tensor(LAMBDA), torch.tensor(MU), tensor(x0))
            read = scheme.read(state, sublayer)
            reads.append([part.flatten().double().numpy() for part in (read.query, read.key, read.value)])
            state = scheme.write(state, sublayer, tensor(ys[sublayer]), read.context)
        end = scheme.finish(state).flatten().double().numpy()
    parameters = {name: value.detach().double().numpy() for name, value in scheme.named_parameters()}
    return parameters, x0, ys, reads, end


def expected_gates(method: str, parameters: dict, sublayer: int, streams: np.ndarray, gate_streams: np.ndarray):
    """Returns pre[s], res[s, t], post[s] of one sublayer."""
    n = NUM_STREAMS
    own = {name.split(".", 2)[2]: p for name, p in parameters.items() if name.startswith(f"sublayers.{sublayer}.")}
    if method == "hc":
        a, c = own["scale"]
        pre, post, res = np.zeros(n), np.zeros(n), np.zeros((n, n))
        for s in range(n):
            r = own["generator.weight"] @ normalize(streams[s], 2.0**-23)
            pre[s] = own["read_bias"][s] + a * np.tanh(r[0])
            post[s] = own["write_bias"][s] + c * np.tanh(r[n + 1])
            for t in range(n):
                res[s, t] = own["mix_bias"][s, t] + a * np.tanh(r[1 + t])
        return pre, res, post
    logits = own["generator.weight"] @ normalize(gate_streams.reshape(-1), 1e-6)
    pre = sigmoid(own["scale"][0] * logits[:n] + own["bias"][:n])
    post = 2 * sigmoid(own["scale"][1] * logits[n : 2 * n] + own["bias"][n : 2 * n])
    if method == "simple_hc":
        return pre, np.eye(n), post
    mix = own["scale"][2] * logits[2 * n :] + own["bias"][2 * n :]
    if method == "mhc":
        res = softmax(mix.reshape(n, n)) + 1e-6
        res = res / res.sum(0)
        for _ in range(19):
            res = res / res.sum(1)[:, None]
            res = res / res.sum(0)
        return pre, res, post
    res = np.zeros((n, n))
    for weight, permutation in zip(softmax(mix), itertools.permutations(range(n)), strict=True):
        for s in range(n):
            res[s, permutation[s]] += weight
    return pre, res, post


@pytest.mark.parametrize("method", ["hc", "mhc", "mhc_lite", "simple_hc"])
def test_stream_schemes(method):
    parameters, x0, ys, reads, end = run_scheme(method)
    streams = np.stack([x0] * NUM_STREAMS)
    gate_streams = streams
    for sublayer, y in enumerate(ys):
        if sublayer % 2 == 0:
            streams = LAMBDA * streams + MU * x0
        if method != "simple_hc" or sublayer % 4 == 0:
            gate_streams = streams
        pre, res, post = expected_gates(method, parameters, sublayer, streams, gate_streams)
        for role in reads[sublayer]:
            np.testing.assert_allclose(role, pre @ streams, atol=2e-5)
        streams = np.stack(
            [sum(res[s, t] * streams[s] for s in range(NUM_STREAMS)) + post[t] * y for t in range(NUM_STREAMS)]
        )
    np.testing.assert_allclose(end, streams.mean(0), atol=2e-5)


@pytest.mark.parametrize(("method", "block"), [("attnres_full", 1), ("attnres_block", 6)])
def test_attention_residuals(method, block):
    parameters, x0, ys, reads, end = run_scheme(method)
    for read in range(len(ys) + 1):
        complete = read // block
        sources = [x0, *(ys[i * block : (i + 1) * block].sum(0) for i in range(complete))]
        if read % block:
            sources.append(ys[complete * block : read].sum(0))
        expected = x0
        if read:
            w = parameters["queries"][read - 1]
            weights = softmax(np.array([w @ normalize(source, 1e-6) for source in sources]))
            expected = weights @ np.stack(sources)
        np.testing.assert_allclose(end if read == len(ys) else reads[read][0], expected, atol=2e-5)


@pytest.mark.parametrize("method", ["mudd", "denseformer"])
def test_dense_connections(method):
    parameters, x0, ys, reads, end = run_scheme(method)
    num_blocks = len(ys) // 2
    sources, roles = [x0], np.stack([x0] * 4)
    for block in range(num_blocks):
        roles = LAMBDA * roles + MU * x0
        for role in range(3):
            np.testing.assert_allclose(reads[2 * block][role], roles[role], atol=2e-5)
        after_mixer = roles[3] + ys[2 * block]
        np.testing.assert_allclose(reads[2 * block + 1][0], after_mixer, atol=2e-5)
        newest = after_mixer + ys[2 * block + 1]
        sources.append(newest)
        weights = parameters[f"blocks.{block}.bias"]
        if method == "mudd":
            hidden = parameters[f"blocks.{block}.w1.weight"] @ normalize(newest, 2.0**-23)
            gelu = torch.nn.functional.gelu(torch.tensor(hidden)).numpy()
            weights = weights + parameters[f"blocks.{block}.w2.weight"] @ gelu
        roles = weights.reshape(-1, len(sources)) @ np.stack(sources)
        assert roles.shape[0] == (4 if method == "mudd" and block < num_blocks - 1 else 1)
        roles = np.broadcast_to(roles, (4, x0.size)) if roles.shape[0] == 1 else roles
    np.testing.assert_allclose(end, roles[3], atol=2e-5)


def test_sinkhorn_ends_on_columns():
    logits = 3 * torch.randn(1000, 4, 4, generator=torch.Generator().manual_seed(0))
    res = sinkhorn(logits, num_rounds=20, eps=1e-6)
    torch.testing.assert_close(res.sum(-2), torch.ones(1000, 4), atol=1e-6, rtol=0)
    assert 1e-5 < (res.sum(-1) - 1).abs().max() < 0.1
    assert (res > 0).all()


def test_permutation_matrices():
    matrices = permutation_matrices(4, "cpu")
    assert matrices.shape == (24, 4, 4)
    assert torch.equal(matrices[0], torch.eye(4))
    assert torch.equal(matrices.sum(1), torch.ones(24, 4)) and torch.equal(matrices.sum(2), torch.ones(24, 4))
    assert len({tuple(matrix.flatten().tolist()) for matrix in matrices}) == 24


def test_gates_at_init():
    model = build_model(resolve_method(method_files()["mhc_lite"], "test-v1"))
    state = model.residual.init(torch.randn(1, 2, 64))
    weights = model.residual.coefficients(state, 6)
    own, other = 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))
    expected = torch.tensor([other, other, own, other], dtype=torch.float32)
    torch.testing.assert_close(weights.pre_BTN[0, 0], expected)
    torch.testing.assert_close(weights.post_BTN[0, 0], 2 * expected)
    # The identity permutation keeps 1 / (1 + 23 exp(-8)) = 0.992 of the weight.
    assert weights.res_BTNN[0, 0, 0, 0].item() == pytest.approx(0.992, abs=3e-3)


def test_gate_inputs_refresh_twelve_times_in_forty_six_sublayers():
    model = build_model(resolve_method(method_files()["simple_hc"], "formal-v1"), "meta")
    scheme = model.residual
    state = scheme.init(torch.empty(1, 1, 1536, device="meta"))
    refreshed, left = [], 0
    for sublayer in range(scheme.num_sublayers):
        read = scheme.read(state, sublayer)
        memo = read.context.weights.memo
        refreshed += [sublayer] if len(memo) >= left else []
        left = len(memo)
        state = scheme.write(state, sublayer, read.query, read.context)
    assert refreshed == list(range(0, 46, 4))
    assert len(refreshed) == 12


def test_project_float32_on_cpu():
    x, weight = torch.randn(2, 3, 8).bfloat16(), torch.randn(5, 8)
    y = project_float32(x, weight)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, (x.double() @ weight.double().t()).float())
