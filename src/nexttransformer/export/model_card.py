"""The model card: README.md of an exported folder, generated from the record alone."""

import json
import re

from nexttransformer.export.record import DEMO_MARK, Record
from nexttransformer.export.weights import DTYPE_RULE
from nexttransformer.reporting.noise import BPB_BAND, CORE_BAND

_MARKUP = re.compile(r"([\\`*_\[\]()#|!])")
# Licence ids as model hubs spell them.
_LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")
_DATA = {
    "formal": "ClimbMix (English web text), tokenized and packed as the protocol says. No document of the two "
    "validation splits was trained on.",
    "demo": "The small public-domain corpus that ships with the package.",
}


def escape(text: str) -> str:
    """Returns a text whose characters mean themselves in Markdown."""
    return _MARKUP.sub(r"\\\1", text)


def model_card(record: Record) -> str:
    """Returns the card. It uses every part of the record but the digests of the package's files."""
    is_demo = record.division == "demo"
    title = f"{DEMO_MARK}: {escape(record.display_name)}" if is_demo else escape(record.display_name)
    sections = [
        _front_matter(record),
        f"# {title}",
        _introduction(record),
        "## Results",
        _results(record),
        "## Use",
        _usage(),
        "## Model and training",
        _facts(record),
        "## Data",
        _DATA[record.division],
        "## Limits",
        _limits(is_demo),
        "## Licence and citation",
        _licence(record),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(record: Record) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "language: en"]
    if record.licence and _LICENCE_ID.fullmatch(record.licence.lower()):
        lines.append(f"license: {record.licence.lower()}")
    tags = ["nexttransformer", record.protocol.id, record.family, *(["demo"] if record.division == "demo" else [])]
    return "\n".join([*lines, "tags:", *(f"- {json.dumps(tag)}" for tag in tags), "---"])


def _introduction(record: Record) -> str:
    lines = [
        f"Method `{record.method}` (family `{record.family}`) of NextTransformer, trained under the protocol "
        f"`{record.protocol.id}` with package version {record.package_version}."
    ]
    if record.division == "demo":
        lines.append(
            f"**{DEMO_MARK}: a tiny model trained for minutes to show the whole path. It is no result and says nothing "
            "about the method.**"
        )
    return "\n\n".join(lines)


def _results(record: Record) -> str:
    results, core = record.results, record.results.core
    rows = [f"| BPB, `val_final` ({results.bpb_final.tokens_counted:,} tokens) | {results.bpb_final.bpb:.4f} |"]
    _, core_v1, core_v2 = core.curve[-1] if core.curve else (0, None, None)
    if core_v1 is not None and core_v2 is not None:
        rows.append(f"| CORE x 100 (`core_v1`) | {100 * core_v1:.2f} |")
        rows.append(f"| CORE x 100, corrected chance levels (`core_v2`) | {100 * core_v2:.2f} |")
    elif core.core_limited is not None:
        rows.append(f"| mean over an excerpt of CORE x 100; not comparable with CORE | {100 * core.core_limited:.2f} |")
    table = "\n".join(["| measure | value |", "|---|--:|", *rows])
    if record.division == "demo":
        noise = "How noisy these small numbers are is not known."
    else:
        noise = (
            f"Noise: two single runs are told apart only beyond {BPB_BAND:.1e} BPB or {100 * CORE_BAND:.2f} CORE "
            "points. Methods are ranked by BPB."
        )
    audit = f"Audit: passed with {record.audit.num_warnings} warnings and {record.audit.num_waivers} waivers"
    ids = f" ({', '.join(record.audit.warning_ids)})" if record.audit.warning_ids else ""
    return f"{table}\n\n{noise}\n\n{audit}{ids}; run `{record.run_id}`, audit file `{record.digests.audit[:16]}`."


def _usage() -> str:
    return """With the package `nexttransformer` installed, from this folder:

```python
from pathlib import Path
import torch
from safetensors.torch import load_file
from nexttransformer import jsonio
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.models import build_model, config_from_dict

folder = Path(".")
model = build_model(config_from_dict(jsonio.read_json(folder / "model_config.json")))
model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
model.set_step(jsonio.read_json(folder / "config.json")["trained_updates"])
tokenizer = Tokenizer.load(folder / "tokenizer.tiktoken.json")
ids = [tokenizer.bos_id, *tokenizer.encode("A river begins")]
logits = model.eval()(torch.tensor([ids]))
```

Through Transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)
inputs = tokenizer("A river begins", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

Every text begins with the token `<|bos|>`; both ways above put it there. Parameters are float32; the `dtype` given to
Transformers is the type of the computation."""


def _facts(record: Record) -> str:
    model, training = record.model, record.training
    gpus = sorted(
        {f"{count} x {escape(name)}" for attempt in training.attempts for name, count in attempt.gpus.items()}
    )
    rows = [
        ("parameters", f"{model.num_parameters:,}"),
        (
            "training FLOPs per token",
            f"{model.training_flops_per_token:,} ({model.flops_ratio - 1:+.2%} of the reference)",
        ),
        ("decode state of a full context", f"{model.decode_state_bytes:,} bytes"),
        ("updates, tokens", f"{training.num_updates:,}, {training.tokens:,}"),
        ("seed", f"{training.seed}"),
        ("hardware", ", ".join(gpus)),
        ("attempts, hours x devices", f"{len(training.attempts)}, {training.gpu_hours:,.2f}"),
        ("median tokens per second", f"{training.median_tokens_per_second:,.0f}"),
        ("track", f"`{record.track}`"),
        ("code", f"commit `{record.commit}`" if record.commit else f"source `{record.digests.source[:16]}`"),
        ("weights", f"{DTYPE_RULE}; digest `{record.digests.weights[:16]}`"),
    ]
    return "\n".join(["| fact | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _limits(is_demo: bool) -> str:
    lines = [
        "A base model trained on web text for research on architectures: no instruction tuning, no safety training. It "
        "states falsehoods and repeats biases of its data. Do not put it before users.",
        "One seed. The audit checks files, not that a GPU did the work; the repository's `rules.md` says what it can "
        "tell.",
    ]
    return "\n\n".join(lines[:1] if is_demo else lines)


def _licence(record: Record) -> str:
    lines = [f"Licence of the weights: {escape(record.licence) if record.licence else 'not stated'}."]
    if record.authors:
        lines.append(f"Authors: {', '.join(escape(author) for author in record.authors)}.")
    if record.links:
        lines.append("\n".join(f"- [{escape(link.title)}](<{link.url}>)" for link in record.links))
    if record.citation:
        # Indented, so that nothing in it is markup.
        lines.append("\n".join(f"    {line}" for line in record.citation.splitlines()))
    lines.append("Cite NextTransformer with its version and the protocol id.")
    return "\n\n".join(lines)
