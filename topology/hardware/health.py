"""Figures that explain a straggler: error and traffic counters of this host's RDMA ports, and the driver's figures of a
GPU. Only reads; unavailable figures are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .sysfs import Sysfs

PORT_COUNTERS: Mapping[str, tuple[Any, ...]] = {  # the figure, its unit, and the kind of an error
    "port_rcv_data": ("infiniband_received_bytes_total", 4),  # counted in words of four bytes
    "port_xmit_data": ("infiniband_transmitted_bytes_total", 4),
    "port_rcv_errors": ("infiniband_errors_total", 1, "receive"),
    "port_xmit_discards": ("infiniband_errors_total", 1, "transmit_discard"),
    "symbol_error": ("infiniband_errors_total", 1, "symbol"),
    "link_error_recovery": ("infiniband_errors_total", 1, "link_recovery"),
    "link_downed": ("infiniband_errors_total", 1, "link_down"),
    "local_link_integrity_errors": ("infiniband_errors_total", 1, "link_integrity"),
    "port_xmit_wait": ("infiniband_transmit_wait_ticks_total", 1),
}
HW_COUNTERS: Mapping[str, tuple[Any, ...]] = {
    "out_of_sequence": ("infiniband_errors_total", 1, "out_of_sequence"),
    "packet_seq_err": ("infiniband_errors_total", 1, "packet_sequence"),
    "local_ack_timeout_err": ("infiniband_errors_total", 1, "ack_timeout"),
    "rnr_nak_retry_err": ("infiniband_errors_total", 1, "receiver_not_ready"),
}

Figures = dict[tuple[str, ...], float]
"""By the name of the figure and its labels."""

THROTTLE_REASONS = {
    "power": 0x4 | 0x80,  # software cap, hardware brake
    "thermal": 0x20 | 0x40,
    "hardware": 0x8,
    "sync": 0x10,
}


def port_counters(fs: Sysfs) -> Figures:
    """Every RDMA port's counters by name (and kind of error), adapter and port, and `infiniband_port_up` (1 or 0)."""
    out: Figures = {}
    base = "sys/class/infiniband"
    for hca in fs.names(base):
        for port in (p for p in fs.names(f"{base}/{hca}/ports") if p.isdecimal()):
            folder = f"{base}/{hca}/ports/{port}"
            state = fs.text(f"{folder}/state")
            if state:
                out["infiniband_port_up", hca, port] = float(state.endswith("ACTIVE"))
            for where, names in (("counters", PORT_COUNTERS), ("hw_counters", HW_COUNTERS)):
                for file, (name, unit, *error) in names.items():
                    value = fs.number(f"{folder}/{where}/{file}")
                    if value is not None:
                        out[name, *error, hca, port] = float(value * unit)
    return out


def gpu_figures(nvml: Any, uuid: str) -> Figures:
    """One GPU's memory, utilisation, temperature, power, throttling and ECC. `nvml`: the initialised pynvml module."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return {}

    def memory() -> Figures:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {("gpu_memory_used_bytes",): float(info.used), ("gpu_memory_total_bytes",): float(info.total)}

    def throttled() -> Figures:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return {("gpu_throttled", name): float(bool(bits & mask)) for name, mask in THROTTLE_REASONS.items()}

    def ecc() -> Figures:
        kinds = (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )
        since_boot = nvml.NVML_VOLATILE_ECC
        return {
            ("gpu_ecc_errors_total", name): float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since_boot))
            for name, kind in kinds
        }

    looks: tuple[Callable[[], Figures], ...] = (
        memory,
        lambda: {("gpu_utilization_ratio",): nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100},
        lambda: {("gpu_temperature_celsius",): float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))},
        lambda: {("gpu_power_watts",): nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        lambda: {("gpu_sm_clock_hertz",): nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6},
        throttled,
        ecc,
    )
    out: Figures = {}
    for look in looks:
        with suppress(nvml.NVMLError, AttributeError):  # this GPU, driver or binding does not have it
            out.update(look())
    return out
