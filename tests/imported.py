"""What every rank of a test imports and finds out; :mod:`tests.ranks` does it once for all."""

import gc

import torch._inductor.codecache
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch._inductor.cpu_vec_isa
import torch._inductor.fx_passes.post_grad
import torch.distributed.checkpoint.state_dict

import osdp_compile.engine.backend  # noqa: F401

torch._inductor.cpu_vec_isa.valid_vec_isa_list()  # a process of its own for each it tries
torch._inductor.codecache.torch_key()  # reads all of Inductor's sources
# Walks over all objects, of the collector and of what looks for optimizers, leave these out.
gc.collect()
gc.freeze()
