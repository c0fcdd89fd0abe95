"""Run operators in processes of their own and turn what comes back into verdicts."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Sequence

from gluon_amp.dtypes import BFLOAT16, FLOAT32

from .judge import Key, run_samples
from .modes import modes_for
from .processes import NORMALLY, TIMED_OUT, Outcome, isolated
from .samples import family_of, samples_of
from .samples.sample import Sample
from .verdicts import CRASH, ERROR, OK, TIMEOUT, UNUSABLE, WRONG, Result, overall

Results = Dict[Key, Result]
_COMPLAINTS = ("malloc", "free()", "double free", "corrupted", "munmap", "realloc", "terminate", "Fatal", "*** ")


@dataclass(frozen=True)
class Options:
    """What to test and how patient to be."""

    dtype: str = BFLOAT16  # ``'bfloat16'`` or ``'float16'``
    device: str = "cpu(0)"  # ``'cpu(0)'`` or ``'gpu(0)'``
    # seconds of processor time that a process may take; it may wait half as long without using any
    timeout: float = 120.0


def audit_operator(op: str, options: Options) -> dict:
    """Run an operator's samples in all modes, and in FP32 where one of them is not right."""
    results = run_modes(op, options, options.dtype)
    doubtful = [key for key, result in results.items() if result.verdict not in (OK, UNUSABLE)]
    control = run_modes(op, options, FLOAT32, doubtful) if doubtful else {}
    return {"family": family_of(op),
            "conditions": {item.condition: _condition(item, options, results, control) for item in samples_of(op)}}


def run_modes(op: str, options: Options, dtype: str, only: Sequence[Key] | None = None) -> Results:
    """Run an operator; where its process crashes, run each condition, then each mode, in a process of its own."""
    outcome = isolated(run_samples, (op, dtype, options.dtype, options.device, only), options.timeout)
    if outcome.ended == NORMALLY:
        return outcome.value
    keys = only or [(item.condition, str(mode)) for item in samples_of(op)
                    for mode in modes_for(item, options.dtype, options.device)]
    if len(keys) == 1:
        return {keys[0]: _failure(outcome)}
    parts: dict[str, list[Key]] = {}
    for key in keys:
        parts.setdefault(key[0], []).append(key)
    smaller = list(parts.values()) if len(parts) > 1 else [[key] for key in keys]
    return {key: result for part in smaller for key, result in run_modes(op, options, dtype, part).items()}


def _failure(outcome: Outcome) -> Result:
    """Make the result of a mode whose process did not end normally."""
    if outcome.ended == TIMED_OUT:
        return Result(TIMEOUT, "no end within the time allowed")
    if outcome.ended.startswith("exit code"):
        return Result(CRASH, f"the engine ended the process ({outcome.ended})")
    if not outcome.ended.startswith("SIG"):
        return Result(ERROR, outcome.ended)
    complaints = [line.strip() for line in outcome.said.splitlines() if line.strip().startswith(_COMPLAINTS)]
    return Result(CRASH, ": ".join([outcome.ended, *complaints[:1]]))


def _condition(item: Sample, options: Options, results: Results, control: Results) -> dict:
    """Summarise a sample's modes as in the JSON file."""
    names = [str(mode) for mode in modes_for(item, options.dtype, options.device)]
    own = {name: results.get((item.condition, name), Result(ERROR, "no result")) for name in names}
    verdicts = {name: result.verdict for name, result in own.items()}
    fp32 = {name: control[item.condition, name].verdict for name in names
            if (item.condition, name) in control and control[item.condition, name].verdict != OK}
    compared = [result for name, result in own.items()
                if result.verdict in (OK, WRONG) and not name.endswith("/addlow")]
    summary: dict[str, Any] = {
        "attrs": item.attrs, "inputs": item.signature, "verdict": overall(verdicts, fp32),
        "error": round(min(max((result.error for result in compared), default=0.0), 1e9), 4),
        "bias": round(float(max((result.bias for result in compared), key=abs, default=0.0)), 5),
        "gradient": item.gradient and any(result.gradient for result in own.values()),
        "modes": verdicts}
    details: dict[str, list[str]] = {}
    for name, result in own.items():
        if result.detail:
            details.setdefault(result.detail, []).append(name)
    return {**summary, **({"details": details} if details else {}), **({"fp32": fp32} if fp32 else {})}


def merge_checks(entry: dict, checked: Mapping[str, Any]) -> None:
    """Write crashes that only a run with memory checks brought to light over an operator's verdicts."""
    for condition, result in checked["conditions"].items():
        target = entry["conditions"][condition]
        for mode, verdict in result["modes"].items():
            if verdict in (CRASH, TIMEOUT) and target["modes"][mode] != CRASH:
                detail = next(text for text, modes in result["details"].items() if mode in modes)
                target["modes"][mode] = verdict
                target.setdefault("details", {}).setdefault(f"with malloc checks: {detail}", []).append(mode)
        target["verdict"] = overall(target["modes"], target.get("fp32", {}))
