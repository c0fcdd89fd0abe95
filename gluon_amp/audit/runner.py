"""Run operators in workers and turn what comes back into verdicts."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Mapping

from ..dtypes import BFLOAT16, FLOAT32
from .compare import CRASH, ERROR, OK, TIMEOUT, UNUSABLE, WRONG
from .pool import Pool
from .records import Mode, Sample, modes_for
from .samples import family_of, samples_of

__all__ = ["Options", "audit_operator", "checked_operator", "merge_checks", "overall", "run_modes"]

Key = tuple
_SIGNIFICANT = {"error": 4, "bias": 5}


@dataclass(frozen=True)
class Options:
    """What to test and how patient to be.

    Attributes
    ----------
    dtype : str
        ``'bfloat16'`` or ``'float16'``.
    device : str
        ``'cpu(0)'`` or ``'gpu(0)'``.
    timeout : float
        Seconds of processor time, and of waiting without using any, that an operator may take.
    """

    dtype: str = BFLOAT16
    device: str = "cpu(0)"
    timeout: float = 120.0

    def request(self, op: str, dtype: str, only: Iterable[Key] | None = None) -> dict:
        """Make the request that runs an operator, see :func:`gluon_amp.audit.worker.run_request`."""
        return {"op": op, "dtype": dtype, "rounding": self.dtype, "device": self.device,
                "cpu_seconds": self.timeout, "idle_seconds": self.timeout / 2,
                "only": None if only is None else [list(key) for key in only]}


def audit_operator(pool: Pool, op: str, options: Options) -> dict:
    """Run an operator's samples in all modes, and in FP32 where one of them is not right.

    Parameters
    ----------
    pool : Pool
        Runs the requests.
    op : str
        Registered name of an operator that has samples.
    options : Options
        Type, device and patience.

    Returns
    -------
    dict
        ``family`` and ``conditions``, as in the JSON file, see :mod:`gluon_amp.audit.report`.
    """
    found = run_modes(pool, op, options, options.dtype)
    doubtful = [key for key, record in found.items() if record["verdict"] not in (OK, UNUSABLE)]
    control = run_modes(pool, op, options, FLOAT32, doubtful) if doubtful else {}
    device = options.device.partition("(")[0]
    conditions = {item.condition: _condition(item, modes_for(item, options.dtype, device), found, control)
                  for item in samples_of(op)}
    return {"family": family_of(op), "conditions": conditions}


def checked_operator(pool: Pool, op: str, options: Options) -> dict[Key, dict]:
    """Run an operator again in a pool whose workers check every block of memory.

    Returns
    -------
    dict
        Records of the modes that crashed, by condition and mode.
    """
    found = run_modes(pool, op, options, options.dtype)
    return {key: record for key, record in found.items() if record["verdict"] in (CRASH, TIMEOUT)}


def merge_checks(entry: dict, crashed: Mapping[Key, dict]) -> None:
    """Write crashes that only memory checks brought to light over an operator's verdicts."""
    for (condition, mode), record in crashed.items():
        target = entry["conditions"][condition]
        if target["modes"][mode] != CRASH:
            target["modes"][mode] = record["verdict"]
            target.setdefault("details", {}).setdefault(f"with malloc checks: {record['detail']}", []).append(mode)
            target["verdict"] = overall(target["modes"], target.get("fp32", {}))


def run_modes(pool: Pool, op: str, options: Options, dtype: str, only: list[Key] | None = None) -> dict[Key, dict]:
    """Run an operator; when its process does not survive, run every mode in a process of its own.

    Parameters
    ----------
    pool : Pool
        Runs the requests.
    op : str
        Registered name.
    options : Options
        Device, rounding and patience.
    dtype : str
        Type to run in, which may be FP32.
    only : list of (str, str), optional
        Conditions and modes to run instead of all.
    """
    outcome = pool.ask(options.request(op, dtype, only))
    found = _read(outcome)
    if outcome["ended"] == "normally":
        return found
    keys = only if only is not None else _keys(op, options)
    found = {}
    for condition in dict.fromkeys(key[0] for key in keys):
        found.update(_run_condition(pool, op, options, dtype, [key for key in keys if key[0] == condition]))
    return found


def _run_condition(pool: Pool, op: str, options: Options, dtype: str, keys: list[Key]) -> dict[Key, dict]:
    outcome = pool.ask(options.request(op, dtype, keys))
    found = _read(outcome)
    if outcome["ended"] == "normally" or len(keys) == 1:
        return found if outcome["ended"] == "normally" else {keys[0]: _ended(outcome)}
    for key in keys:
        outcome = pool.ask(options.request(op, dtype, [key]))
        found[key] = _read(outcome).get(key, {}) if outcome["ended"] == "normally" else _ended(outcome)
    return found


def _keys(op: str, options: Options) -> list[Key]:
    device = options.device.partition("(")[0]
    return [(item.condition, str(mode)) for item in samples_of(op) for mode in modes_for(item, options.dtype, device)]


def _read(outcome: dict) -> dict[Key, dict]:
    """Return the records of the modes that came to an end."""
    return {tuple(record["done"]): record for record in outcome["records"]}


def _ended(outcome: dict) -> dict:
    """Make the record of a mode whose process did not end normally."""
    ended = outcome["ended"]
    if ended == "timeout":
        return {"verdict": TIMEOUT, "detail": "no end within the time allowed", "error": 0.0, "bias": 0.0}
    if ended.startswith("exit code"):
        return {"verdict": CRASH, "detail": f"the engine ended the process ({ended})", "error": 0.0, "bias": 0.0}
    if not ended.startswith("SIG"):
        return {"verdict": ERROR, "detail": ended, "error": 0.0, "bias": 0.0}
    said = [line.strip() for line in outcome["said"].splitlines() if line.strip()]
    notable = [line for line in said if line.startswith(("malloc", "free()", "double free", "corrupted", "munmap",
                                                         "realloc", "terminate", "Fatal", "*** "))]
    return {"verdict": CRASH, "detail": ": ".join([ended, *notable[:1]]), "error": 0.0, "bias": 0.0}


def _condition(item: Sample, modes: tuple[Mode, ...], found: Mapping[Key, dict], control: Mapping[Key, dict]) -> dict:
    records = {str(mode): found.get((item.condition, str(mode)),
                                    {"verdict": ERROR, "detail": "no result", "error": 0.0, "bias": 0.0})
               for mode in modes}
    verdicts = {mode: record["verdict"] for mode, record in records.items()}
    finite = [record for mode, record in records.items()
              if record["verdict"] in (OK, WRONG) and not mode.endswith("/addlow")]
    worst = max((record["error"] for record in finite), default=0.0)
    same = {mode: control[(item.condition, mode)]["verdict"] for mode in verdicts
            if control.get((item.condition, mode), {"verdict": OK})["verdict"] != OK}
    result: dict[str, Any] = {
        "attrs": dict(item.attrs), "inputs": item.signature, "verdict": overall(verdicts, same),
        "error": round(min(worst, 1e9), _SIGNIFICANT["error"]),
        "bias": round(max((record["bias"] for record in finite), key=abs, default=0.0), _SIGNIFICANT["bias"]),
        "gradient": item.gradient and any(record.get("gradient") for record in records.values()),
        "modes": verdicts}
    details: dict[str, list[str]] = {}
    for mode, record in records.items():
        if record["detail"]:
            details.setdefault(record["detail"], []).append(mode)
    if details:
        result["details"] = details
    if same:
        result["fp32"] = same
    return result


_ORDER = (CRASH, TIMEOUT, WRONG, ERROR, OK, UNUSABLE)


def overall(verdicts: Mapping[str, str], fp32: Mapping[str, str]) -> str:
    """Return the worst verdict of all modes.

    Errors that FP32 gives as well do not count. Neither does ``addlow``, unless it ends the process: AMP keeps gradient
    buffers in FP32, and where two inputs get the very same gradient it is the engine's copy that does not add.

    Examples
    --------
    >>> overall({"eager/plain/write": "ok", "eager/plain/addlow": "wrong"}, {"eager/plain/addlow": "wrong"})
    'ok'
    """
    own = [verdict for mode, verdict in verdicts.items()
           if verdict == CRASH or not (mode.endswith("/addlow") or (verdict == ERROR and mode in fp32))]
    return min(own or verdicts.values(), key=_ORDER.index)

