"""Writes each proposal of the simulator with its prediction to the study's ledger, before the launch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.proposers.proposal import Proposal
from tuner.simulator.residual_candidates import ScoredCandidate

LEDGER_FILE = "ledger.jsonl"


def record_proposal(
    folder: Path,
    settings: Mapping[str, Any],
    predicted: Mapping[str, float],
    facts: Mapping[str, Any],
    chances: Mapping[str, float],
) -> Proposal:
    """Write a proposal to the ledger. Its `facts` and predictions are also stored with its trial."""
    predictions = {f"predicted_{name}": round(value, 6) for name, value in predicted.items()}
    attributes: dict[str, Any] = {"by_simulator": True, **facts, **predictions}
    row = {"settings": dict(settings), **attributes, **chances}
    with (folder / LEDGER_FILE).open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")
    return Proposal(settings, attributes)


def record_candidate(folder: Path, best: ScoredCandidate) -> Proposal:
    """Write the candidate of a residual model to the ledger, and return its proposal."""
    facts: dict[str, Any] = {"expected_gain": round(best.expected_gain, 6)}
    facts |= {"note": best.note} if best.note else {}
    return record_proposal(
        folder, best.settings, best.predicted, facts, {"chance": best.chance, "survival": best.survival}
    )
