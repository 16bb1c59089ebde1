"""Presets: hardware profiles of known machines from published vendor data.

Presets serve planning without the machine: the needs of a model on 64 ranks of a known type.
A measured profile (``osdp calibrate``) is more accurate.

Published rates are peaks that no program reaches. Each is multiplied by a named efficiency
below. The efficiencies are our choice, rounded from common results of matrix products and of
NCCL's own tests; this project measured none of them. Expect errors of tens of percent.

The collectives of a GPU preset run over the links between the eight GPUs of one host. For more
ranks they also run over the hosts' network cards (``Hardware.over``). :func:`between_hosts` is
for one rank on each host.

Sources: NVIDIA's data sheets and architecture papers of the H100, H200, A100 and TITAN RTX
(dense rates: their figures with "sparsity" are twice these); PCI Express Base
Specification 3.0; OSDP (arXiv 2209.13258), most experiments on one server of 8 TITAN RTX cards
on PCIe 3.0; NCCL's tuning tables (src/graph/tuning.cc) for the latency of a ring per rank.
"""

from __future__ import annotations

import dataclasses

from passes.types.hardware import BLOCK_RESTS_BYTES, Hardware, Hosts, LinkRate

#: Share of the peak FLOP/s: large matrix products reach 0.6 to 0.8, partly by the power limit.
MATMUL_EFFICIENCY = 0.7
#: Share of the memory's rate that long copies reach, after refresh and read-to-write turnaround.
MEMORY_EFFICIENCY = 0.85
#: Share of a link's rate in one direction, after headers, flow control, and a ring's steps.
LINK_EFFICIENCY = 0.8
#: Share of compute lost to a collective in flight: NCCL holds about 16 to 24 of 108 to 132 SMs.
NCCL_COMPUTE_SHARE = 0.15
#: Time of a small NCCL collective between the GPUs of a host, and between hosts.
NVLINK_LATENCY_SECONDS = 15e-6
NETWORK_LATENCY_SECONDS = 30e-6
#: Latency per rank of a ring, NCCL's LL128 protocol: over NVLink, PCIe, and the network.
NVLINK_HOP_SECONDS = 1.9e-6
PCIE_HOP_SECONDS = 2.5e-6
NETWORK_HOP_SECONDS = 4e-6
#: Shortest time of a CUDA kernel, from its predecessor's end to its own.
CUDA_LAUNCH_SECONDS = 4e-6

_GPUS_OF_A_HOST = 8
_CUDA_ALIGNMENT_BYTES = 512  # torch's caching allocator
#: cuBLAS's workspace for one thread, which torch sets (getChosenWorkspaceSize in CUDABlas's handle
#: pool): on Hopper, and before. The forward's thread has one, and autograd's.
_HOPPER_WORKSPACE_BYTES, _WORKSPACE_BYTES = 4096 * 8 << 10, (4096 * 2 + 16 * 8) << 10
#: One card per GPU, as in a DGX H100: InfiniBand NDR.
_NDR_BITS_PER_SECOND = 400e9
#: One card per GPU, as in a DGX A100: InfiniBand HDR.
_HDR_BITS_PER_SECOND = 200e9
# 8 GT/s, 16 lanes, 128b/130b coding.
_PCIE3_X16_BYTES_PER_SECOND = 8e9 * 16 * 128 / 130 / 8


def preset(name: str) -> Hardware:
    """The profile of a known machine.

    >>> preset("h100-sxm").memory_bytes
    80000000000

    Raises:
        ValueError: for an unknown name; the message lists the known names.
    """
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(PRESETS)
        raise ValueError(f"no hardware preset is called {name!r}; there are {known}") from None


def between_hosts(hardware: Hardware, bits_per_second: float = _NDR_BITS_PER_SECOND) -> Hardware:
    """The same device with collectives over a network, one network card per rank.

    ``bits_per_second``: rate of a card in one direction (default: InfiniBand NDR, 400 Gb/s).
    """
    return dataclasses.replace(
        hardware,
        name=f"{hardware.name}, network",
        collectives=_nccl(bits_per_second / 8, NETWORK_LATENCY_SECONDS),
        source=f"{hardware.source}; collectives over {bits_per_second / 1e9:g} Gb/s a rank",
        hosts=None,
    )


def _nccl(bytes_per_second: float, latency_seconds: float) -> dict[str, LinkRate]:
    """NCCL's collectives over a link; ``bytes_per_second``: published rate in one direction."""
    seconds_per_byte = 1 / (LINK_EFFICIENCY * bytes_per_second)
    ring = LinkRate(
        latency_seconds=latency_seconds,
        seconds_per_byte=seconds_per_byte,
        overhead_seconds_per_byte=NCCL_COMPUTE_SHARE * seconds_per_byte,
        carried_out="ring",
    )
    rates = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), ring)
    return {**rates, "all_to_all": dataclasses.replace(ring, carried_out="messages")}


def _gpu(
    name: str,
    tensor_flops: float,
    tf32_flops: float | None,
    float32_flops: float,
    memory_bytes_per_second: float,
    memory_bytes: int,
    link_bytes_per_second: float,
    card_bits_per_second: float,
    capability: str,
    source: str,
    workspace_bytes: int = _WORKSPACE_BYTES,
    hop_seconds: float = NVLINK_HOP_SECONDS,
) -> Hardware:
    """A GPU profile from published peak rates per second; ``link_bytes_per_second``: one direction.

    ``card_bits_per_second``: each GPU's share of its host's network cards.
    ``capability``: compute capability. ``workspace_bytes``: cuBLAS's, for one thread.

    The profile's ``float32`` rate is without TF32, torch's default. Under
    ``torch.set_float32_matmul_precision("high")``, replace it by the rate of ``tf32``.
    """
    peaks = {
        "default": float32_flops,
        "float32": float32_flops,
        "float16": tensor_flops,
        "bfloat16": tensor_flops,
    }
    if tf32_flops is None:  # before Ampere: no TF32; bfloat16 is emulated in float32
        peaks["bfloat16"] = float32_flops
    else:
        peaks["tf32"] = tf32_flops
    return Hardware(
        name=name,
        flops_per_second={kind: MATMUL_EFFICIENCY * peak for kind, peak in peaks.items()},
        memory_bytes_per_second=MEMORY_EFFICIENCY * memory_bytes_per_second,
        launch_seconds=CUDA_LAUNCH_SECONDS,
        collectives=_nccl(link_bytes_per_second, NVLINK_LATENCY_SECONDS),
        allocator_alignment_bytes=_CUDA_ALIGNMENT_BYTES,
        library_bytes=2 * workspace_bytes + BLOCK_RESTS_BYTES,
        memory_bytes=memory_bytes,
        device_type="cuda",
        compute_capability=capability,
        hosts=Hosts(
            ranks=_GPUS_OF_A_HOST,
            between=_nccl(card_bits_per_second / 8, NETWORK_LATENCY_SECONDS),
            hop_seconds=hop_seconds,
            host_hop_seconds=NETWORK_HOP_SECONDS,
        ),
        source=f"{source}; peaks times {MATMUL_EFFICIENCY} (FLOP/s), {MEMORY_EFFICIENCY} "
        f"(memory), {LINK_EFFICIENCY} (links); latencies and launch assumed",
    )


def _cpu() -> Hardware:
    """One rank on one core of a server with 10 Gbit/s Ethernet: round figures."""
    # AVX2: two fused multiply-adds of 8 floats a cycle, at 3 GHz.
    flops = MATMUL_EFFICIENCY * 2 * 2 * 8 * 3e9
    seconds_per_byte = 1 / (LINK_EFFICIENCY * 10e9 / 8)
    # A core copies and checksums about 4 GB/s of TCP data.
    messages = LinkRate(2e-4, seconds_per_byte, 2.5e-10, carried_out="messages")
    ring = LinkRate(3e-4, seconds_per_byte, 2.5e-10, carried_out="ring")
    # Twice the bytes: gloo runs a reduce-scatter as an all-reduce and drops the other ranks' rows.
    inside = LinkRate(4e-4, 2 * seconds_per_byte, 5e-10, carried_out="all_reduce inside")
    return Hardware(
        name="cpu-gloo",
        flops_per_second={"default": flops, "float32": flops},
        memory_bytes_per_second=10e9,
        launch_seconds=5e-6,
        collectives={
            "all_gather": messages,
            "reduce_scatter": inside,
            "all_reduce": ring,
            "all_to_all": messages,
        },
        source="round figures: one AVX2 core at 3 GHz, 10 GB/s of memory, 10 Gbit/s Ethernet",
    )


PRESETS: dict[str, Hardware] = {
    "h100-sxm": _gpu(
        name="h100-sxm",
        tensor_flops=989.4e12,
        tf32_flops=494.7e12,
        float32_flops=66.9e12,
        memory_bytes_per_second=3.35e12,
        memory_bytes=80 * 10**9,
        link_bytes_per_second=450e9,  # NVLink 4: 900 GB/s both ways together
        card_bits_per_second=_NDR_BITS_PER_SECOND,
        workspace_bytes=_HOPPER_WORKSPACE_BYTES,
        capability="9.0",
        source="NVIDIA H100 data sheet and architecture paper (SXM5)",
    ),
    "h200": _gpu(
        name="h200",
        tensor_flops=989.4e12,
        tf32_flops=494.7e12,
        float32_flops=66.9e12,
        memory_bytes_per_second=4.8e12,
        memory_bytes=141 * 10**9,
        link_bytes_per_second=450e9,  # NVLink 4: 900 GB/s both ways together
        card_bits_per_second=_NDR_BITS_PER_SECOND,
        workspace_bytes=_HOPPER_WORKSPACE_BYTES,
        capability="9.0",
        source="NVIDIA H200 data sheet (SXM; compute as the H100)",
    ),
    "a100-40gb": _gpu(
        name="a100-40gb",
        tensor_flops=312e12,
        tf32_flops=156e12,
        float32_flops=19.5e12,
        memory_bytes_per_second=1.555e12,
        memory_bytes=40 * 10**9,
        link_bytes_per_second=300e9,  # NVLink 3: 600 GB/s both ways together
        card_bits_per_second=_HDR_BITS_PER_SECOND,
        capability="8.0",
        source="NVIDIA A100 data sheet (SXM4, 40 GB)",
    ),
    "a100-80gb": _gpu(
        name="a100-80gb",
        tensor_flops=312e12,
        tf32_flops=156e12,
        float32_flops=19.5e12,
        memory_bytes_per_second=2.039e12,
        memory_bytes=80 * 10**9,
        link_bytes_per_second=300e9,  # NVLink 3: 600 GB/s both ways together
        card_bits_per_second=_HDR_BITS_PER_SECOND,
        capability="8.0",
        source="NVIDIA A100 data sheet (SXM4, 80 GB)",
    ),
    "rtx-titan-pcie3": _gpu(
        name="rtx-titan-pcie3",
        tensor_flops=130.5e12,
        tf32_flops=None,
        float32_flops=16.3e12,
        memory_bytes_per_second=672e9,
        memory_bytes=24 * 10**9,
        # Cards that share a root port have less each.
        link_bytes_per_second=_PCIE3_X16_BYTES_PER_SECOND,
        card_bits_per_second=100e9 / 8,  # assumed: one card of 100 Gb/s for all 8 GPUs
        hop_seconds=PCIE_HOP_SECONDS,
        capability="7.5",
        source="NVIDIA Turing architecture paper (TITAN RTX); PCIe 3.0 x16; the card of OSDP's "
        "experiments (arXiv 2209.13258)",
    ),
    "cpu-gloo": _cpu(),
}
