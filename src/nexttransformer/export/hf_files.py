"""The small files beside the weights that make an exported folder a Transformers model."""

from typing import Any

from nexttransformer import jsonio
from nexttransformer.config import ModelConfig
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.export import hf_tokenizer

MODELING_NAME = "modeling_nexttransformer"
# Transformers reads the imports of this file and names the missing install itself.
_MODELING = '''"""The model's class, from the installed package: pip install nexttransformer."""

from nexttransformer.export.hf_model import NextTransformerConfig, NextTransformerForCausalLM

__all__ = ["NextTransformerConfig", "NextTransformerForCausalLM"]
'''


def transformers_files(config: ModelConfig, tokenizer: Tokenizer, *, update: int, division: str) -> dict[str, bytes]:
    """Returns file name -> content; the same for every version of Transformers."""
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.bos_id}
    model: dict[str, Any] = {
        "model_type": "nexttransformer",
        "architectures": ["NextTransformerForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING_NAME}.NextTransformerConfig",
            "AutoModelForCausalLM": f"{MODELING_NAME}.NextTransformerForCausalLM",
        },
        "composition": config.to_dict(),
        "trained_updates": update,
        "division": division,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "tie_word_embeddings": False,
        "use_cache": True,
        # Of the computation; parameters stay float32.
        "dtype": "float32",
        "torch_dtype": "float32",
        **special,
    }
    return {
        "config.json": jsonio.pretty_bytes(model),
        "generation_config.json": jsonio.pretty_bytes({**special, "_from_model_config": False}),
        f"{MODELING_NAME}.py": _MODELING.encode("utf-8"),
        hf_tokenizer.TOKENIZER_FILE: hf_tokenizer.tokenizer_json(tokenizer.content),
        hf_tokenizer.TOKENIZER_CONFIG_FILE: hf_tokenizer.tokenizer_config_json(config.context_tokens),
    }
