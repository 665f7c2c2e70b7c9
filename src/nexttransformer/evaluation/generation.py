"""Continuing a text with a trained model: loading any checkpoint or export, and the tokens one by one."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from nexttransformer import jsonio
from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer
from nexttransformer.errors import ConfigError, DataError
from nexttransformer.models import Decoder, build_model, config_from_dict
from nexttransformer.protocol import get_protocol
from nexttransformer.site_config import default_cache_root, load_site_config
from nexttransformer.training import checkpoint_files as files
from nexttransformer.training.checkpoint_load import load_for_evaluation, load_weights
from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.kernel_tuning import restore_tiles
from nexttransformer.training.safetensors_file import SafetensorsReader


def generate_tokens(
    model: Decoder, prompt_ids: list[int], *, max_tokens: int, temperature: float, seed: int, stop_id: int
) -> Iterator[int]:
    """Yields new token ids until `stop_id` or `max_tokens`.

    Args:
        model: in eval mode, weights on their device.
        prompt_ids: BOS and the prompt's tokens.
        max_tokens: most tokens to make.
        temperature: 0 takes the most likely token, the lowest id among equals; else logits are divided by it.
        seed: of the drawing; the same seed gives the same text on the same machine.
        stop_id: ends the text (BOS: a new document would begin); not yielded.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids_BT, state = torch.tensor([prompt_ids], device=device), None
    for _ in range(max_tokens):
        with torch.no_grad():
            h_BTD, state = model.hidden(ids_BT, state=state, want_state=True)
            logits_V = model.head_logits(h_BTD[0, -1]).cpu()
        if temperature == 0:
            token = int((logits_V == logits_V.max()).nonzero()[0])
        else:
            # Taking the maximum off first keeps the quotient finite at any temperature.
            probabilities_V = torch.softmax((logits_V - logits_V.max()).double() / temperature, dim=0)
            token = int(torch.multinomial(probabilities_V, 1, generator=generator))
        if token == stop_id:
            return
        yield token
        ids_BT = torch.tensor([[token]], device=device)


def load_model(folder: Path, site_file: Path | None) -> tuple[Decoder, Tokenizer]:
    """Loads a checkpoint (its tokenizer comes from the site's data) or an export (which holds its own).

    Raises:
        NextTransformerError: the folder is neither, is damaged, or the tokenizer is another one.
    """
    if not (folder / files.MODEL_FILE).is_file() or not (folder / files.CONFIG_FILE).is_file():
        raise ConfigError(
            f"--checkpoint {folder}: neither a checkpoint nor an export: {files.MODEL_FILE} or {files.CONFIG_FILE} is "
            "missing. Name a checkpoint_ folder of a run or an export folder."
        )
    if (folder / files.MARKER_FILE).exists() or not (folder / FILE_NAME).exists():
        state = load_for_evaluation(folder).state
        protocol_id = jsonio.read_json(folder / files.PROTOCOL_FILE)["id"]
        site = load_site_config(site_file)
        cache_root, path = site.cache_root, site.data_folder(protocol_id) / FILE_NAME
        tokenizer = Tokenizer.load(path)
        if tokenizer.digest != state.digests.tokenizer:
            raise DataError(f"{path}: not the tokenizer that {folder} was trained with. Use the data of that run.")
        update = state.update
    else:
        tokenizer, update = Tokenizer.load(folder / FILE_NAME), None
        cache_root = load_site_config(site_file).cache_root if site_file is not None else default_cache_root()
    config = config_from_dict(jsonio.read_json(folder / files.CONFIG_FILE), str(folder / files.CONFIG_FILE))
    try:
        model = build_model(config, "cuda" if torch.cuda.is_available() else "cpu", seed=None)
    except (RuntimeError, MemoryError) as problem:
        reason = (str(problem).splitlines() or ["not enough memory"])[0][:200]
        raise ConfigError(
            f"{folder / files.CONFIG_FILE}: a model of these sizes cannot be built here: {reason}. "
            "Use a machine with more memory, or an undamaged copy."
        ) from None
    # The continued text alone goes to stdout.
    say = partial(print, file=sys.stderr, flush=True)
    device = next(model.parameters()).device
    restore_tiles(config, folder, control=SingleProcess(), device=device, cache_root=cache_root, say=say)
    load_weights(folder / files.MODEL_FILE, dict(model.named_parameters()))
    if update is None:
        header = SafetensorsReader(folder / files.MODEL_FILE).metadata()
        update = int(header.get("update", get_protocol(config.protocol).num_updates))
    model.set_step(update)
    return model.eval(), tokenizer
