"""Evaluating an exported folder with lm-evaluation-harness.

The harness's own `hf` model works on the folder too (`--trust_remote_code`). This adapter, model name
`nexttransformer`, adds what this package's models need: BOS before every text, and the installed class without
remote code. It is run as the harness's command line:

    python -m nexttransformer.export.lm_eval_adapter --model nexttransformer --model_args pretrained=DIR --tasks TASK
"""

import sys
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from nexttransformer.errors import EXIT_OK


@register_model("nexttransformer")
class NextTransformerLM(HFLM):
    """An exported folder. Scores are those of rows that begin with BOS, as in training."""

    def __init__(self, pretrained: str, **options: Any) -> None:
        register_with_transformers()
        super().__init__(
            pretrained, **{"backend": "causal", "add_bos_token": True, "trust_remote_code": False, **options}
        )


def register_with_transformers() -> None:
    """Makes `AutoConfig` and `AutoModelForCausalLM` know the installed classes; repeating it is safe."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from nexttransformer.export.hf_model import NextTransformerConfig, NextTransformerForCausalLM

    AutoConfig.register(NextTransformerConfig.model_type, NextTransformerConfig, exist_ok=True)
    AutoModelForCausalLM.register(NextTransformerConfig, NextTransformerForCausalLM, exist_ok=True)


def main() -> int:
    """Runs the harness's command line with the model registered."""
    cli_evaluate()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
