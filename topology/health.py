"""Figures that explain a straggler: error and traffic counters of this host's RDMA ports, and what the driver says of
one GPU. Reads only; a figure that cannot be had is left out. Names are flat, `figure/label/…`, as heartbeats carry
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .sysfs import Sysfs

PORT_COUNTERS = {
    "port_rcv_data": ("infiniband_received_bytes_total", 4),  # counted in words of four bytes
    "port_xmit_data": ("infiniband_transmitted_bytes_total", 4),
    "port_rcv_errors": ("infiniband_errors_total/receive", 1),
    "port_xmit_discards": ("infiniband_errors_total/transmit_discard", 1),
    "symbol_error": ("infiniband_errors_total/symbol", 1),
    "link_error_recovery": ("infiniband_errors_total/link_recovery", 1),
    "link_downed": ("infiniband_errors_total/link_down", 1),
    "local_link_integrity_errors": ("infiniband_errors_total/link_integrity", 1),
    "port_xmit_wait": ("infiniband_transmit_wait_ticks_total", 1),
}
HW_COUNTERS = {
    "out_of_sequence": ("infiniband_errors_total/out_of_sequence", 1),
    "packet_seq_err": ("infiniband_errors_total/packet_sequence", 1),
    "local_ack_timeout_err": ("infiniband_errors_total/ack_timeout", 1),
    "rnr_nak_retry_err": ("infiniband_errors_total/receiver_not_ready", 1),
}
PORT_ERRORS = tuple(
    name.partition("/")[2] for name, _ in (*PORT_COUNTERS.values(), *HW_COUNTERS.values()) if "/" in name
)

THROTTLE_REASONS = {
    "power": 0x4 | 0x80,  # software cap, hardware brake
    "thermal": 0x20 | 0x40,
    "hardware": 0x8,
    "sync": 0x10,
}


def port_counters(fs: Sysfs) -> dict[str, float]:
    """Every RDMA port's counters as `name[/error]/hca/port`, and `infiniband_port_up/hca/port` (1 or 0)."""
    out: dict[str, float] = {}
    base = "sys/class/infiniband"
    for hca in fs.names(base):
        for port in (p for p in fs.names(f"{base}/{hca}/ports") if p.isdecimal()):
            folder = f"{base}/{hca}/ports/{port}"
            state = fs.text(f"{folder}/state")
            if state:
                out[f"infiniband_port_up/{hca}/{port}"] = float(state.endswith("ACTIVE"))
            for where, names in (("counters", PORT_COUNTERS), ("hw_counters", HW_COUNTERS)):
                for file, (name, unit) in names.items():
                    value = fs.number(f"{folder}/{where}/{file}")
                    if value is not None:
                        out[f"{name}/{hca}/{port}"] = float(value * unit)
    return out


def gpu_figures(nvml: Any, uuid: str) -> dict[str, float]:
    """One GPU's memory, utilisation, temperature, power, throttling and ECC. `nvml`: the initialised pynvml module."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return {}
    out: dict[str, float] = {}

    def look(read: Callable[[], dict[str, float]]) -> None:
        try:
            out.update(read())
        except (nvml.NVMLError, AttributeError):  # this GPU, driver or binding does not have it
            return

    def memory() -> dict[str, float]:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"gpu_memory_used_bytes": float(found.used), "gpu_memory_total_bytes": float(found.total)}

    def throttled() -> dict[str, float]:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return {f"gpu_throttled/{name}": float(bool(bits & mask)) for name, mask in THROTTLE_REASONS.items()}

    def ecc() -> dict[str, float]:
        kinds = (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )
        since_boot = nvml.NVML_VOLATILE_ECC
        return {
            f"gpu_ecc_errors_total/{name}": float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since_boot))
            for name, kind in kinds
        }

    look(memory)
    look(lambda: {"gpu_utilization_ratio": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100})
    look(lambda: {"gpu_temperature_celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))})
    look(lambda: {"gpu_power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000})
    look(lambda: {"gpu_sm_clock_hertz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6})
    look(throttled)
    look(ecc)
    return out
