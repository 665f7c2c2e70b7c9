"""The decoder as a Transformers model: the class that an exported folder's modeling file names.

One `model.safetensors` with the public parameter names serves both forms: the decoder is the attribute `model`, and
`base_model_prefix` adds that name on loading. Parameters stay float32; Transformers' `dtype` is the compute dtype.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nexttransformer.config import config_from_dict
from nexttransformer.models.decoder import Decoder
from nexttransformer.models.state import DecoderState, map_state

# The name of what one step of `generate` hands to the next has changed between releases of Transformers.
_GENERATION: Any = GenerationMixin
_STEP_ARGUMENTS = inspect.signature(_GENERATION.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _STEP_ARGUMENTS else "past_key_values"
IGNORED_LABEL = -100


class NextTransformerConfig(PretrainedConfig):
    """`config.json`: `composition` is the expanded `model_config.json`, `trained_updates` what `set_step` is told."""

    model_type = "nexttransformer"

    def __init__(self, composition: dict[str, Any] | None = None, trained_updates: int = 0, **options: Any) -> None:
        self.composition = composition
        self.trained_updates = trained_updates
        super().__init__(**options)


@dataclass
class RowGroup:
    """Rows of a batch with equally many tokens so far, and the decoder's state after them."""

    rows: list[int]
    state: DecoderState


class DecoderCache:
    """State of a batch between two steps of `generate`. Rows with different padding have states of their own."""

    is_compileable = False
    is_linear = (True,)

    def __init__(self, groups: list[RowGroup], num_tokens: int) -> None:
        self.groups, self.num_tokens = groups, num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the columns of the batch seen so far, padding included."""
        return self.num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives row r the state of row `beam_idx[r]`, in place (beam search)."""
        source = beam_idx.tolist()
        place = {row: (group, index) for group in self.groups for index, row in enumerate(group.rows)}
        groups = []
        for group in self.groups:
            rows = [row for row, old in enumerate(source) if place[old][0] is group]
            if rows:
                index = torch.tensor([place[source[row]][1] for row in rows])
                groups.append(RowGroup(rows, map_state(lambda t, i=index: t[i.to(t.device)], group.state)))
        self.groups = groups


class NextTransformerForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of any registered composition for `AutoModelForCausalLM` and `generate`."""

    config_class = NextTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    # A recurrent state cannot be cut back, which assisted decoding would need.
    _is_stateful = True
    _keep_in_fp32_modules_strict = ["model"]

    def __init__(self, config: NextTransformerConfig) -> None:
        super().__init__(config)
        if config.composition is None:
            raise ValueError("config.json has no 'composition'. Load a folder that export_run wrote.")
        compute_dtype = getattr(config, "dtype", None) or torch.float32
        if isinstance(compute_dtype, str):
            compute_dtype = getattr(torch, compute_dtype)
        # Under Transformers' own context the default dtype is the compute dtype; parameters name float32 themselves.
        self.model = Decoder(config_from_dict(config.composition, "config.json: composition"), compute_dtype)
        self.model.set_step(config.trained_updates)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        # Only of use without stored weights; with them nothing is missing.
        if isinstance(module, Decoder):
            module.init_weights(0)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> torch.nn.Module:
        """Returns the table of token embeddings."""
        return self.model.transformer["wte"]

    def get_output_embeddings(self) -> torch.nn.Module:
        """Returns the head's matrix; logits pass through the soft cap after it."""
        return self.model.lm_head

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the arguments of one step: all tokens at first, then only the newest."""
        cache: DecoderCache | None = kwargs.get(CACHE_NAME)
        if cache is None:
            return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": use_cache}
        return {"input_ids": input_ids[:, cache.num_tokens :], CACHE_NAME: cache, "use_cache": use_cache}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Runs the decoder.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], 1 for tokens; padding may stand before or after them, not between.
            labels: int64 [B, T], -100 where nothing is predicted; position t holds the token at t.
            use_cache: whether to return the state for the next tokens.
            return_dict: False gives a tuple.
            logits_to_keep: only the logits of that many last columns; 0 for all.
            kwargs: the state of an earlier call under Transformers' name for it; the rest is ignored.

        Returns:
            Logits float32 [B, T, V] (0 at padding), loss if labels are given, state.
        """
        cache: DecoderCache | None = kwargs.get(CACHE_NAME)
        num_rows, num_columns = input_ids.shape
        if cache is None:
            spans = _token_spans(attention_mask, num_rows, num_columns)
            groups = {span: [row for row in range(num_rows) if spans[row] == span] for span in dict.fromkeys(spans)}
            work = [(rows, span, None) for span, rows in groups.items()]
        else:
            work = [(group.rows, (0, num_columns), group.state) for group in cache.groups]
        kept = num_columns if not logits_to_keep else min(logits_to_keep, num_columns)
        first = num_columns - kept
        logits_BTV = torch.zeros(num_rows, kept, self.config.vocab_size, dtype=torch.float32, device=input_ids.device)
        made = []
        for rows, (start, stop), state in work:
            index = torch.tensor(rows, device=input_ids.device)
            h_BTD, new_state = self.model.hidden(input_ids[index, start:stop], state=state, want_state=bool(use_cache))
            shown = slice(max(first - start, 0), stop - start)
            logits = self.model.head_logits(h_BTD[:, shown])
            logits_BTV[index, max(start - first, 0) : max(stop - first, 0)] = logits
            if new_state is not None:
                made.append(RowGroup(rows, new_state))
        loss = None
        if labels is not None:
            if kept != num_columns:
                raise ValueError("logits_to_keep: a loss needs all logits. Leave it out where labels are given.")
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
            )
        seen = num_columns + (cache.num_tokens if cache is not None else 0)
        # Transformers' own type is its caches' base class; only what `generate` calls is needed.
        step: dict[str, Any] = {CACHE_NAME: DecoderCache(made, seen) if use_cache else None}
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **step)
        return output.to_tuple() if return_dict is False else output


def _token_spans(attention_mask: Tensor | None, num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Returns the columns (start, stop) of each row's tokens.

    Padding is left out rather than masked: a recurrent layer would take it up.

    Raises:
        ValueError: a row has padding between its tokens, or no token.
    """
    if attention_mask is None:
        return [(0, num_columns)] * num_rows
    spans: list[tuple[int, int]] = []
    rows: Sequence[Sequence[int]] = attention_mask.long().tolist()
    for row, mask in enumerate(rows):
        num_tokens = sum(mask)
        start = mask.index(1) if num_tokens else 0
        if not num_tokens or mask[start : start + num_tokens] != [1] * num_tokens:
            raise ValueError(
                f"attention_mask row {row}: expected the tokens (1) side by side with padding (0) only before or "
                "after them."
            )
        spans.append((start, start + num_tokens))
    return spans
