"""Command: continues a text with any checkpoint or export; every token costs one step of the model's state."""

import argparse
import codecs
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nexttransformer.errors import EXIT_OK, ConfigError, DataError, join_problems, run_command
from nexttransformer.site_config import load_site_config

if TYPE_CHECKING:
    from nexttransformer.data.tokenizer import Tokenizer
    from nexttransformer.models import Decoder


def generate_tokens(
    model: "Decoder", prompt_ids: list[int], *, max_tokens: int, temperature: float, seed: int, stop_id: int
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
    import torch

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


def load_model(folder: Path, site_file: Path | None) -> tuple["Decoder", "Tokenizer"]:
    """Loads a checkpoint (its tokenizer comes from the site's data) or an export (which holds its own).

    Raises:
        NextTransformerError: the folder is neither, is damaged, or the tokenizer is another one.
    """
    import torch

    from nexttransformer import jsonio
    from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer
    from nexttransformer.models import build_model, config_from_dict
    from nexttransformer.protocol import get_protocol
    from nexttransformer.training import checkpoint_files as files
    from nexttransformer.training.checkpoint_load import load_for_evaluation, load_weights
    from nexttransformer.training.safetensors_file import SafetensorsReader

    if not (folder / files.MODEL_FILE).is_file() or not (folder / files.CONFIG_FILE).is_file():
        raise ConfigError(
            f"--checkpoint {folder}: neither a checkpoint nor an export: {files.MODEL_FILE} or {files.CONFIG_FILE} is "
            "missing. Name a checkpoint_ folder of a run or an export folder."
        )
    if (folder / files.MARKER_FILE).exists() or not (folder / FILE_NAME).exists():
        state = load_for_evaluation(folder).state
        protocol_id = jsonio.read_json(folder / files.PROTOCOL_FILE)["id"]
        path = load_site_config(site_file).data_folder(protocol_id) / FILE_NAME
        tokenizer = Tokenizer.load(path)
        if tokenizer.digest != state.digests.tokenizer:
            raise DataError(f"{path}: not the tokenizer that {folder} was trained with. Use the data of that run.")
        update = state.update
    else:
        tokenizer, update = Tokenizer.load(folder / FILE_NAME), None
    config = config_from_dict(jsonio.read_json(folder / files.CONFIG_FILE), str(folder / files.CONFIG_FILE))
    try:
        model = build_model(config, "cuda" if torch.cuda.is_available() else "cpu", seed=None)
    except (RuntimeError, MemoryError) as problem:
        reason = (str(problem).splitlines() or ["not enough memory"])[0][:200]
        raise ConfigError(
            f"{folder / files.CONFIG_FILE}: a model of these sizes cannot be built here: {reason}. "
            "Use a machine with more memory, or an undamaged copy."
        ) from None
    load_weights(folder / files.MODEL_FILE, dict(model.named_parameters()))
    if update is None:
        header = SafetensorsReader(folder / files.MODEL_FILE).metadata()
        update = int(header.get("update", get_protocol(config.protocol).num_updates))
    model.set_step(update)
    return model.eval(), tokenizer


def main(argv: list[str] | None = None) -> int:
    """Prints the prompt and its continuation as it is made."""
    parser = argparse.ArgumentParser(prog="python -m nexttransformer.generate", description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint or export folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue; may be empty")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens to make (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: most likely (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the drawing (default 0)")
    parser.add_argument("--site-config", type=Path, metavar="FILE", help="site file; not needed for an export")
    arguments = parser.parse_args(argv)
    is_positive = arguments.max_tokens >= 1
    problems = [] if is_positive else [f"--max-tokens {arguments.max_tokens}: expected a whole number from 1."]
    if not (math.isfinite(arguments.temperature) and arguments.temperature >= 0):
        problems += [f"--temperature {arguments.temperature}: expected a number of at least 0."]
    if not 0 <= arguments.seed < 2**63:
        problems += [f"--seed {str(arguments.seed)[:40]}: expected a whole number from 0 to 2^63 - 1."]
    if problems:
        raise ConfigError(join_problems(problems))
    model, tokenizer = load_model(arguments.checkpoint, arguments.site_config)
    prompt_ids = [tokenizer.bos_id, *tokenizer.encode(arguments.prompt)]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(arguments.prompt, end="", flush=True)
    how = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "seed": arguments.seed}
    for token in generate_tokens(model, prompt_ids, stop_id=tokenizer.bos_id, **how):
        print(decoder.decode(tokenizer.decode_bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
