"""Backend ``"chorus"`` of `torch.distributed`: PyTorch's collectives on CPU tensors, by those of `Communicator`.

Importing this package registers the backend and the rendezvous method ``mpi://``; under mpiexec or srun `init` does the
rest. Afterwards PyTorch's functions, DistributedDataParallel, FSDP2, DTensor and so on work as with any other backend.

    import collectives.torch
    collectives.torch.init()
    torch.distributed.all_reduce(torch.ones(3))
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError("collectives.torch needs PyTorch: install it with `pip install 'chorus-mpi[torch]'`")

from collectives.torch.hooks import Int8State, PowerSGDState, int8_hook, powersgd_hook
from collectives.torch.launch import init, register
from collectives.torch.process_group import ProcessGroup

register()

__all__ = ["Int8State", "PowerSGDState", "ProcessGroup", "init", "int8_hook", "powersgd_hook"]
