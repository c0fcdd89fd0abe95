"""The type that each kind of device of this machine runs, and why: the choice of ``init`` and the conversions."""
from __future__ import annotations

import logging
import math
import os
from functools import lru_cache
from typing import Mapping

import mxnet as mx

from .. import native
from .._mxnet import gpus
from .._mxnet.engine import time_in_both
from ..errors import DTypeError, warn
from ..machine import host
from ..machine.costs import Rates, rates_of
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32, IMITATED_FLOAT16, Support, cpu_isa, cpu_support, cuda_support
from ..rules import FP32, Policy
from ..rules.tables import groups

_logger = logging.getLogger("gluon_amp")
_warned: set[str] = set()
_LEAST_GAIN, _AMX_GAIN = 1.3, 2.5  # gains seen lie at 1.7 to 2.0, or at 0.5 to 0.7; with AMX at 5
# Layers that networks spend their time in: channels, and the side of their maps.
_PROBED, _PROBED_BATCH, _PROBES = ((64, 56), (128, 28), (256, 14)), 4, 5
_ONEDNN = "MXNET_MKLDNN_ENABLED"
SAFE_ACCUMULATION = "MXNET_SAFE_ACCUMULATION"  # 1: sums of float16 values are kept in FP32, those of FP32 in float64
# MXNet's own kernels of these operators add up in the type of their data, unless the variable is set.
_SUMMING = (*groups.SOFTMAX, *groups.NORMS, "softmin", *groups.SUMS, *groups.NUMPY_SUMS, *groups.NORMS_OF_TENSORS)
_before: dict[str, str | None] = {}  # values of the variables that `prepare_gpus` has set


def lacks_onednn(environ: Mapping[str, str]) -> str:
    """Say why MXNet runs without oneDNN, whose kernels bfloat16 needs; nothing where it runs with it."""
    if not mx.runtime.Features().is_enabled("MKLDNN"):
        return "this MXNet was built without oneDNN, whose kernels bfloat16 needs"
    value = environ.get(_ONEDNN, "")
    if value.lower() in ("0", "false"):
        return f"{_ONEDNN}={value} switches oneDNN off, whose kernels bfloat16 needs"
    return ""


_ONEDNN_FAULT = lacks_onednn(os.environ)  # MXNet reads the variable once, too


def support(device_type: str, device_id: int = 0) -> Support:
    """Say which type a kind of device runs in."""
    if device_type == "gpu":
        return cuda_support(host.gpu(device_id)[1])
    if _ONEDNN_FAULT:
        return Support(FLOAT32, True, _ONEDNN_FAULT)
    own = cpu_support()
    if own.dtype == FLOAT32:
        return own
    lost = lost_amx()
    if lost:
        return _kept_in_fp32(lost)
    return own if own.amx else chosen_by(cpu_rates(), own)


def chosen_by(rates: Rates, own: Support) -> Support:
    """Choose the type of a CPU that has BF16 instructions and no AMX, by what they gain."""
    # Flags do not tell: CPUs of Intel's that hide their AMX are slower by them.
    whence = "" if rates.cpu == host.cpu_kind() else "as on the nearest CPU that was measured, "
    gain = f"bfloat16: {rates.gain:.1f} times as fast as FP32, {whence}{rates.cpu}"
    if rates.gain >= _LEAST_GAIN:
        return own._replace(reason=f"{own.reason}; {gain}")
    return _kept_in_fp32(f"this CPU has BF16 instructions ({cpu_isa()}) that are no faster than its FP32 ones ({gain})")


def _kept_in_fp32(reason: str) -> Support:
    return Support(FLOAT32, True, reason, on_request=BFLOAT16, channel_multiple=16, cost="bfloat16 is slower than FP32")


@lru_cache(maxsize=1)
def cpu_rates() -> Rates:
    """Return what kernels cost on this CPU, or on the one that is most like it."""
    return rates_of(host.cpu_kind(), cpu_isa())


def device_supports() -> dict[str, Support]:
    """Say which type each kind of device of this machine runs in."""
    # A GPU of another kind than the first one has an entry of its own, as ``'gpu(1)'``: it may run another type.
    supports, names = {"cpu": support("cpu")}, {}
    for number in range(gpus.count()):
        own, names[number] = support("gpu", number), host.gpu(number)[0]
        if number == 0:
            supports["gpu"] = own
        elif (own, names[number]) != (supports["gpu"], names[0]):
            supports[f"gpu({number})"] = own
    return supports


def of_device(device: mx.Context, by_device: Mapping[str, Support]) -> Support | None:
    """Look a device up in what :func:`device_supports` gives; None where there is nothing for its kind."""
    return by_device.get(str(device)) or by_device.get("gpu" if device.device_type == "gpu" else "cpu")


def lost_amx() -> str | None:
    """Return why oneDNN does not use the CPU's AMX tiles; None where it does, or where that costs no speed."""
    outcome = host.amx_outcome()
    if outcome == host.REFUSED:
        return ("this CPU has AMX tiles, which the operating system does not let this process use (Linux from 5.16 on "
                "does; in a container or a virtual machine the host must, too)")
    if outcome == host.GRANTED_LATE and _measured_gain() <= _AMX_GAIN:
        return ("this CPU's AMX tiles are off, because MXNet ran an operator before gluon_amp was imported (import "
                "gluon_amp first)")
    return None


@lru_cache(maxsize=1)
def _measured_gain() -> float:
    """Return how many times as fast convolutions of a network's sizes train in bfloat16, once a process in 0.3 s."""
    host.take_little_memory()  # MXNet reads these settings with its first operator
    fp32 = low = math.inf
    for _ in range(2):
        # Least times: on a busy machine medians are off by more than the types differ by.
        times = [time_in_both((_PROBED_BATCH, channels, side, side), _PROBES) for channels, side in _PROBED]
        fp32, low = map(min, (fp32, low), map(sum, zip(*times)))
        if fp32 < _AMX_GAIN * low:
            break  # only a gain is measured twice: bfloat16 without one may show it once on a busy machine
    return fp32 / low


def choose(requested: str | None, supports: Mapping[str, Support]) -> dict[str, Support]:
    """Return how every kind of device runs: in its own best type, or in the one that the user named."""
    # Devices that do not run the named type stay in FP32.
    if requested is None:
        return dict(supports)
    asked = {name: own.requested(requested) for name, own in supports.items()}
    able = {name: each for name, each in asked.items() if each is not None}
    if not able and requested == FLOAT16 and "gpu" not in supports:
        able = {"cpu": IMITATED_FLOAT16}
    if not able:
        reasons = "; ".join(f"{name}: {each.reason}" for name, each in supports.items())
        needs = {BFLOAT16: "a CPU with AVX512", FLOAT16: "a CUDA GPU of compute capability 5.0 to 8.9"}[requested]
        raise DTypeError(f"expected a type that this machine runs, received {requested!r}, which needs {needs} "
                         f"({reasons}). Leave the type out, and each device runs in its best one")
    return {name: able.get(name) or Support(FLOAT32, True, f"it does not run {requested}, which was asked for")
            for name in supports}


@lru_cache(maxsize=1)
def require_bfloat16() -> None:
    """Raise DTypeError where this CPU cannot run bfloat16, not even emulated."""
    own = support("cpu")
    if own.requested(BFLOAT16) is None:
        raise DTypeError(f"expected a CPU with AVX512 to run a bfloat16 network, but {own.reason}. Export the "
                         "network and run it on another machine, or convert it without a type, or to 'float32'")


def verdict(supports: Mapping[str, Support]) -> str:
    """Say in a sentence which type each device runs, and why."""
    alike: dict[Support, list[str]] = {}
    for name, each in supports.items():
        alike.setdefault(each, []).append(name)
    return "; ".join(f"{each.dtype} on the {', '.join(names)}, because {each.reason}" for each, names in alike.items())


def announce(chosen: Mapping[str, Support], requested: str | None) -> None:
    """Log which type each device runs, and warn where a device cannot be used, or a type that was named is slow."""
    warn_if_slow(chosen)
    broken = gpus.problem()
    if broken:
        warn_once(f"NVIDIA's driver does not work, so that there are no GPUs and AMP runs on the CPU: {broken}")
    for name, own in chosen.items():
        if own.dtype == FLOAT32 and name.startswith("gpu") and requested is None:
            warn_once(f"AMP stays in FP32 on the {name.upper()}: {own.reason}. Use another device")
        if own.dtype == FLOAT32 and name.startswith("gpu") and requested == BFLOAT16:
            warn_once(f"AMP stays in FP32 on the {name.upper()}, which MXNet has no bfloat16 kernels for: "
                      "bfloat16 was asked for. amp.init() without a type runs each device in its best one")
        if requested is None and own.dtype == FLOAT32 and name == "cpu" and lost_amx():
            warn_once(f"AMP stays in FP32, although bfloat16 could be several times as fast: {own.reason}")
    _logger.info("AMP runs %s", verdict(chosen))
    if "cpu" in chosen:
        if cpu_rates().cpu != host.cpu_kind():
            _logger.info("AMP: kernels are chosen by the rates of another CPU, %s; `gluon-amp check --measure` "
                         "measures this one in two minutes", cpu_rates())
        native.say_what_is_missing()
        is_fault, advice = host.threads_advice()
        if advice:
            _logger.log(logging.WARNING if is_fault else logging.INFO, "AMP: %s", advice)


def warn_if_slow(chosen: Mapping[str, Support]) -> None:
    """Warn of a type that a device runs, but slower than FP32."""
    for name, each in chosen.items():
        if not each.native:
            warn_once(f"AMP will be slow on the {name}: {each.reason}")


def warn_once(text: str) -> None:
    """Warn the user's code, once per process and text."""
    if text not in _warned:
        _warned.add(text)
        warn(text)


def prepare_gpus(policies: Mapping[str, Policy]) -> None:
    """Set MXNet's variables for GPUs as policies need them, and say so; :func:`restore_gpus` undoes it."""
    # MXNet reads the variable for fusion as it sets a graph up, the other one at each call.
    on_gpus = [policy for device, policy in policies.items() if device.startswith("gpu")]
    if not on_gpus:
        return
    problem = host.fusion_problem(host.driver_version(), host.nvrtc_version())
    if problem and os.environ.get(host.NO_FUSION) != "0":
        _put(host.NO_FUSION, "0")
        warn_once(f"{host.NO_FUSION}=0 is set, so that elementwise operators on the GPU are not fused: {problem}, "
                  f"in FP32 as well. Update NVIDIA's driver, or set {host.NO_FUSION}=0 yourself for networks "
                  "without AMP")
    # A user's list, or a level, may let an operator that adds up run in float16.
    if SAFE_ACCUMULATION not in os.environ and any(policy.target_dtype == FLOAT16 and any(
            policy.decide(op, {}).rule != FP32 for op in _SUMMING) for policy in on_gpus):
        _put(SAFE_ACCUMULATION, "1")


def restore_gpus() -> None:
    """Take back what :func:`prepare_gpus` set."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def _put(name: str, value: str) -> None:
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value
