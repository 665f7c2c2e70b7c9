"""The ids and texts of all rules: 45 checks of a run and its record, 3 of a pull request, 6 for humans.

`docs/en/rules.md` shows these texts word for word, `docs/zh/rules.md` their translation; a test compares the ids.
"""

import dataclasses
from dataclasses import dataclass

# Stages: A `audit_run`, X `export_run`, R the check of a pull request.
AUDIT, EXPORT, REQUEST = "A", "X", "R"
ERROR, WARNING = "E", "W"


@dataclass(frozen=True)
class Rule:
    """One rule that a machine checks.

    Attributes:
        id: such as "C4".
        severities: "E" refuses, "W" reports, or both.
        stages: where it is checked: "A", "X" and "R".
        text: what is compared.
    """

    id: str
    severities: str
    stages: str
    text: str


# Id, severities, stages, text; indented lines continue a text.
_RUN_RULES = """
L1 EW A   Exactly the expected files are in the run folder; a missing one is an error, an unknown one a warning.
L2 E  A   The run is of the right kind and complete: mode in every witness, run_end last, state finished, last update
          reached, no lock.
L3 E  AXR The method id is the same everywhere: --method, run, configuration, registry, family folder, evidence file.
L4 E  AR  Every JSON file parses and matches its schema: finite numbers, no unknown or duplicate keys; all problems
          are listed.
L5 W  AR  Regular files only, no links, names of letters, digits and . _ -; a record has at most 100 KB, an audit 200
          KB.
P1 E  AR  Protocol id, digest and constants equal the package's, in every file that names them.
P2 E  A   The recorded configuration is its digest, and it is the registered file's at the recorded commit.
P3 EW A   The code is a clean commit, the same in all attempts, and its files are that commit's.
P4 EW A   The part files are those of that commit; they import only the package and declared dependencies (warning).
P5 EW A   Versions and kernel tuning are recorded; torch, FLA, kernels and, on one kind of GPU, their tuning are the
          same in all attempts; versions outside the supported range are a warning.
P6 E  AXR GPU names and counts are recorded; nothing exported holds host or user names, absolute paths, addresses or
          tokens.
C1 E  A   Updates, rows, context and total tokens are the protocol's.
C2 E  A   Rows of the ranks follow the rule of shares and sum to the batch; every update has all rows and tokens.
C3 E  A   Optimizer groups: names, exact membership, base rates, momentum, betas, eps and decay as recomputed.
C4 E  A   Learning rates, momentum and weight decay of every effective update as recomputed, relative 1e-12.
C5 E  A   Precision policy and loss are the protocol's.
C6 E  A   The seed is the protocol's, in every attempt and checkpoint.
C7 E  A   No update was skipped: nothing follows a non-finite update without a resume; the optimizer's count is the
          update.
D1 E  A   Digests of manifest, tokenizer, byte table and data order are the published ones.
D2 E  A   The data order: the chain recomputed from the row hashes is the stored one and passes through the published
          values.
D3 E  A   Validation splits: digests, rows, tokens and bytes are the published ones, and so is the byte table.
D4 E  A   No document is in two of train, val_curve and val_final; no shard is in both training and validation.
M1 E  A   Parameter counts: recomputed, recorded and summed over the checkpoint's tensors.
M2 E  A   Training FLOPs per token: recomputed, recorded, and within the budget's tolerance.
M3 E  A   Names, shapes and dtypes of the final checkpoint are the model's, strictly both ways.
M4 E  A   Causality: on a tiny random copy later tokens change no earlier logit and get no gradient from it.
M5 E  A   The loss is that of a normalized distribution over exactly the vocabulary, and rows are independent.
M6 W  A   Methods that depend on the update say so, and the final update was set at evaluation.
T1 E  A   Event numbers, hashes and times are in order; the effective timeline has every update once.
T2 E  A   Every resume starts at a complete checkpoint of this run; the attempts cover all updates without a gap.
T3 E  A   Evaluations are at exactly the preset updates, once each; files and events agree.
T4 E  A   Tokens seen are the update times the tokens per update, everywhere, up to the whole run's.
T5 W  A   Speed is plausible; long gaps, many attempts and disagreeing repeated updates are reported.
N1 E  A   Losses and gradient norms are finite; the first loss is within 0.5 of ln V.
N2 W  A   Loss spikes are counted: more than 6 standard deviations above the mean of the last 128 updates.
N3 W  A   A BPB below 0.5, or curves outside the envelope of the formal records, are flagged for a human.
E1 E  AR  BPB is nats / (ln 2 x bytes) from the stored nats, for the final value and every curve point.
E2 E  A   The in-training BPB of the last update and that of the fresh load agree; val_final is near them.
E3 E  AR  CORE: tasks, rows, shots, baselines and digest of the bundle, no error or fallback; all values recomputed.
E4 E  A   Each evaluation used this run's weights of its update; the last ones those of the final checkpoint.
E5 W  A   With --deep: a slice of the evaluations scored again on this machine agrees.
K1 E  A   The final checkpoint is complete: every file's size and SHA-256 match its marker, and no file is extra.
K2 E  X   The exported tensors are the checkpoint's, load strictly and give the same logits.
K3 E  XR  The record embeds the digests of audit, run and weights; the audit is of the run's present state.
K4 E  XR  The record is reproducible byte by byte: no clock, sorted keys, fixed form of numbers.
"""
_REQUEST_RULES = """
R1 E  R   Compared with the merge base only the two evidence files change, for one method, and their names fit.
R2 E  R   No published number changes or disappears unless the record names the digest of the one it supersedes.
R3 E  R   The committed pages equal, byte for byte, those rebuilt from the records.
"""


def _parse(table: str) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for line in table.strip().splitlines():
        if line.startswith(" "):
            last = rules.popitem()[1]
            rules[last.id] = dataclasses.replace(last, text=f"{last.text} {line.strip()}")
        else:
            rule_id, severities, stages, text = line.split(maxsplit=3)
            rules[rule_id] = Rule(rule_id, severities, stages, text)
    return rules


RUN_RULE_IDS = tuple(_parse(_RUN_RULES))
RULES = _parse(_RUN_RULES + _REQUEST_RULES.lstrip())

HUMAN_RULES = {
    "H1": "The method is general: nothing in it recognizes the benchmark, the data or the number of updates, beyond "
    "the declared step hook.",
    "H2": "Neither validation split nor CORE was used for tuning beyond the budget that the description states.",
    "H3": "Ideas and code are attributed and cited.",
    "H4": "The description is honest: deviations from the paper, failed attempts, what the gain may come from.",
    "H5": "The licences of code and weights allow publication.",
    "H6": "Complexity out of proportion to the gain may be declined, with reasons.",
}

NEVER_WAIVED = frozenset("L2 C1 C2 C7 D1 D2 D3 E1 E3 E4 K1 K2".split())
