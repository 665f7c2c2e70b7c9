"""Text to rows: tokenizer, packing, data order, the manifest, and the readers training uses."""
