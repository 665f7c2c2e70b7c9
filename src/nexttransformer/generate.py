"""Command: continues a text with any checkpoint or export; every token costs one step of the model's state."""

import argparse
import codecs
import math
from pathlib import Path

from nexttransformer.errors import EXIT_OK, ConfigError, join_problems, run_command


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
    # Imported here: usage errors should not wait for torch.
    from nexttransformer.evaluation.generation import generate_tokens, load_model

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
