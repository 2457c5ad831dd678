"""Results as a table: values, floors, goals."""

import json
from pathlib import Path

from reference_server.model_server.measure.record import Measurement, Record

LARGE_PRESETS = ("llama-3.1-8b", "qwen2.5-7b")
# By preset: largest batch, then pass and goal of the efficiency at level S.
DECODE_GOALS = {
    "large": ((8, 0.65, 0.82), (64, 0.62, 0.78), (256, 0.58, 0.75)),
    "llama-3.2-1b": ((8, 0.40, 0.52), (256, 0.40, 0.55)),
    "bloom-560m": ((8, 0.25, 0.38), (256, 0.40, 0.58)),
}
# By preset: largest number of tokens in the step, then pass and goal.
PREFILL_GOALS = {
    "large": ((512, 0.45, 0.58), (2048, 0.60, 0.72), (8192, 0.65, 0.77)),
    "llama-3.2-1b": ((512, 0.20, 0.35), (2048, 0.40, 0.55), (8192, 0.50, 0.62)),
    "bloom-560m": ((2048, 0.25, 0.40), (8192, 0.35, 0.50)),
}


def render(record: Record, before: Path | None) -> str:
    """Device and ceilings, checks, one line per number, peers, notes."""
    try:
        earlier = _earlier(before)
    except (OSError, ValueError, TypeError, KeyError) as error:
        record.note(f"could not read the earlier result {before}: {type(error).__name__}: {error}")
        earlier = {}
    lines = [
        f"\n{record.device}; ceilings: " + ", ".join(f"{name} {value:.4g}" for name, value in record.ceilings.items()),
        f"checks: {sum(check['passed'] for check in record.checks)} of {len(record.checks)} passed",
        f"{'preset':<14}{'level':<6}{'phase':<24}{'batch':>6}{'ctx':>6}{'ms':>11}{'floor':>10}{'eff.':>7}"
        f"{'pass':>6}{'goal':>6}{'kernels':>8}{'spread':>8}  other",
    ]
    for result in record.results:
        line = (
            f"{result.preset:<14}{result.level:<6}{result.phase:<24}{result.batch:>6}{result.context:>6}"
            f"{result.value:>11.4f}{_number(result.floor, 10, 4)}{_number(result.efficiency, 7, 2)}"
        )
        least, goal = goals_of(result)
        line += f"{_number(least, 6, 2)}{_number(goal, 6, 2)}{result.kernels or '':>8}{_number(result.spread, 8, 3)}  "
        others = {
            name: round(value, 3) if isinstance(value, float) else value for name, value in result.settings.items()
        }
        line += " ".join(f"{name}={value}" for name, value in others.items())
        if (known := earlier.get(_key(result))) is not None:
            line += f"  {result.value / known:.2f} x before"
        lines.append(line)
    lines += [
        f"{peer['preset']}: {peer['batch']} x {peer['prompt']} in, {peer['tokens']} out: "
        f"{peer['engine_tokens_per_s']:.1f} tokens/s, {peer['peer']} {peer['peer_tokens_per_s']:.1f}"
        f" = {peer['ratio']:.2f} x"
        for peer in record.peers
    ]
    lines += [f"note: {note}" for note in record.notes]
    lines += [f"failed: {part['name']}: {part['error']}" for part in record.parts if part["error"] is not None]
    lines.append(f"{record.elapsed:.0f} s; {'all checks passed' if record.is_valid else 'NOT VALID: a check failed'}")
    return "\n".join(lines)


def goals_of(result: Measurement) -> tuple[float | None, float | None]:
    """Pass and goal of a step's efficiency; None without a goal."""
    preset = "large" if result.preset in LARGE_PRESETS else result.preset
    if result.level != "S":
        return None, None
    table, size = (DECODE_GOALS, result.batch)
    if result.phase == "prefill":
        table, size = (PREFILL_GOALS, result.batch * result.context)
    for largest, least, goal in table.get(preset, ()):
        if size <= largest:
            return least, goal
    return None, None


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'' if value is None else format(value, f'.{digits}f'):>{width}}"


def _earlier(before: Path | None) -> dict[tuple[object, ...], float]:
    if before is None:
        return {}
    results = json.loads(before.read_text())["results"]
    return {_key(Measurement(**result)): result["value"] for result in results}


def _key(result: Measurement) -> tuple[object, ...]:
    settings = tuple((name, result.settings[name]) for name in ("run_ahead", "kernel") if name in result.settings)
    return (result.preset, result.level, result.phase, result.batch, result.context, settings)
