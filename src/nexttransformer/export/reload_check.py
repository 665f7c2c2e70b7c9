"""Loads an exported folder in a process of its own, natively and through Transformers, and says what it found.

Only the folder and the installed package are used. The result is one line of JSON on stdout.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nexttransformer
from nexttransformer.errors import AuditError

if TYPE_CHECKING:
    from nexttransformer.data.tokenizer import Tokenizer
    from nexttransformer.models import Decoder

TRANSFORMERS_TOLERANCE = 1e-4
_LIMIT_SECONDS = 3600


@dataclass(frozen=True)
class Reload:
    """What a fresh process found.

    Attributes:
        logits_digest, greedy_ids: of the fixed prompt, through `build_model`.
        transformers: version, or None where it is not installed; then the rest is None or empty.
        missing: keys that Transformers' loading reported as missing, unexpected or mismatched.
        largest_difference: of the logits through Transformers from the native ones.
        is_same_text: `generate` continues greedily with the same ids.
        is_same_tokens: `AutoTokenizer` gives the same ids, BOS included.
    """

    logits_digest: str
    greedy_ids: list[int]
    transformers: str | None
    missing: list[str]
    largest_difference: float | None
    is_same_text: bool | None
    is_same_tokens: bool | None


def reload_in_fresh_process(folder: Path, *, num_threads: int) -> Reload:
    """Runs this module on a folder.

    Args:
        folder: the exported folder.
        num_threads: torch threads, so that sums are split as in this process.

    Raises:
        AuditError: the folder does not load; with the last line of what the process said.
    """
    root = str(Path(nexttransformer.__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(num_threads),
            "CUDA_VISIBLE_DEVICES": "",
            # Nothing is looked up or left behind: the copy of the modeling file goes to a folder of its own.
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": cache,
        }
        command = [sys.executable, "-m", "nexttransformer.export.reload_check", str(folder), str(num_threads)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_SECONDS)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise AuditError(f"{folder}: the export does not load in a fresh process: {lines[-1]}")
    return Reload(**json.loads(result.stdout.strip().splitlines()[-1]))


def reload(folder: Path) -> Reload:
    """Loads a folder in this process; see `Reload`."""
    from nexttransformer import jsonio
    from nexttransformer.config import config_from_dict
    from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer
    from nexttransformer.export import weights
    from nexttransformer.training import checkpoint_files as names
    from nexttransformer.training.safetensors_file import SafetensorsReader

    tokenizer = Tokenizer.load(folder / FILE_NAME)
    config = config_from_dict(jsonio.read_json(folder / names.CONFIG_FILE), names.CONFIG_FILE)
    update = int(SafetensorsReader(folder / names.MODEL_FILE).metadata()["update"])
    model = weights.model_from_file(config, update, folder / names.MODEL_FILE)
    found = weights.probe(model, tokenizer)
    native = Reload(found.logits_digest, found.greedy_ids, None, [], None, None, None)
    if importlib.util.find_spec("transformers") is None:
        return native
    return _through_transformers(folder, model, tokenizer, native)


def _through_transformers(folder: Path, model: "Decoder", tokenizer: "Tokenizer", native: Reload) -> Reload:
    import torch
    import transformers

    from nexttransformer.export import weights

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ids = weights.probe_ids(tokenizer)
    ids_BT = torch.tensor([ids])
    with torch.no_grad():
        expected_BTV = model(ids_BT)
    del model
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), trust_remote_code=True, output_loading_info=True
    )
    wrapped, info = loaded
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    missing = sorted(f"{key}: {name}" for key in keys for name in info.get(key, ()))
    auto_tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    with torch.no_grad():
        got_BTV = wrapped(ids_BT).logits
        made = wrapped.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=weights.PROBE_NEW_TOKENS,
            do_sample=False,
        )[0, len(ids) :].tolist()
    continued = [token for token in made if token != tokenizer.bos_id]
    return Reload(
        native.logits_digest,
        native.greedy_ids,
        transformers.__version__,
        missing,
        (got_BTV.float() - expected_BTV).abs().max().item(),
        continued == native.greedy_ids,
        auto_tokenizer(weights.PROBE_TEXT)["input_ids"][: len(ids)] == ids,
    )


def main() -> int:
    """Prints what `reload` finds."""
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(asdict(reload(Path(sys.argv[1])))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
