"""What older torch cannot do, so that the tests of it can step aside there and nowhere else."""

import inspect
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

# FSDP2 waits for streams, which the CPU has only since some version after 2.6.
HAS_FSDP2_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
# Hooks step aside for torch.export where torch says that it is at work.
SAYS_THAT_IT_EXPORTS = hasattr(torch.compiler, "_is_exporting_flag")
# Products of half precision in float32, from 2.8 on.
HAS_WIDENING_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
HAS_MUON = hasattr(torch.optim, "Muon")
# Distributed checkpoints of one process; older torch finds out by itself that it is one.
ONE_PROCESS: dict[str, Any] = (
    {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
)
