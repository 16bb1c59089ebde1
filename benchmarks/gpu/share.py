"""Ranks on GPUs: one GPU a rank, or several ranks on one GPU where there are fewer GPUs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

#: A process group with NCCL on GPUs, and gloo for tensors on the CPU.
NCCL = "cpu:gloo,cuda:nccl"
#: NCCL refuses two ranks of one host on one GPU. Ranks with host names of their own are on several
#: hosts to it, and send through sockets of this machine.
_NCCL_ON_ONE_GPU = {
    "NCCL_HOSTID": "osdp-{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def use_gpu(rank: int, ranks: int) -> torch.device:
    """Make a GPU the current one of this process, before its process group starts.

    ``ranks``: on this machine. Without enough GPUs several ranks share one; NCCL then sends through
    sockets.

    Returns the device.
    """
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        for name, value in _NCCL_ON_ONE_GPU.items():
            os.environ.setdefault(name, value.format(rank=rank))
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


def join_ranks(device: str, backend: str) -> None:
    """Start the process group of a rank that has torch.distributed's variables.

    ``device``: ``cuda`` gives the rank a GPU first.
    """
    if device == "cuda":
        use_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(backend)
