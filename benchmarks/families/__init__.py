"""Do models that nobody wrote for this project train like DDP, and under their limits?

``python -m benchmarks.families`` trains tiny models of many families on two ranks (gloo):

* ``ddp``: DistributedDataParallel in eager mode, the reference;
* ``osdp``: this backend without a limit;
* ``limit``: this backend at 1.1 times the least limit, with the measured peak;
* ``inductor``: plain ``torch.compile`` on every rank alone, only where osdp fails. It says
  whether torch itself can compile the model.

Every run starts fresh processes. ``results.jsonl`` gets one line a run, and a later sweep goes on
from there. The last step writes ``docs/families.md``.
"""
