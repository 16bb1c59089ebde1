"""Imports and caches that every rank of a test needs; :mod:`tests.ranks` loads them once."""

import gc

import torch._inductor.codecache
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch._inductor.cpu_vec_isa
import torch._inductor.fx_passes.post_grad
import torch.distributed.checkpoint.state_dict

import osdp_compile.engine.backend  # noqa: F401

torch._inductor.cpu_vec_isa.valid_vec_isa_list()  # starts a process for each instruction set
torch._inductor.codecache.torch_key()  # reads all of Inductor's sources
# Exclude these objects from walks over all objects: garbage collection, search for optimizers.
gc.collect()
gc.freeze()
# Traces make many objects that live long: the default threshold costs a tenth of a rank's time.
gc.set_threshold(50_000)
