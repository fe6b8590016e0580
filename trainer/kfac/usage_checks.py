"""What a user may do wrong: a warning, logged once, or an error."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from .registration import require_whole

logger = logging.getLogger(__name__)

REMOVED = "K-FAC leaves these alone, which are not in the model any more: %s"
INCOMPLETE = "K-FAC leaves the gradients of these as they are, some of whose parameters are frozen or have none: %s"
UNUSED = (
    "K-FAC leaves the gradients of these as they are, whose modules it has not seen called in training mode (nor does "
    "it see calls in a model that torch.compile has compiled and run before K-FAC was built): %s"
)
STALE = (
    "K-FAC preconditions gradients again that no backward pass has changed since the last step(): clear the gradients "
    "of all parameters of the model, including those that the optimizer does not have; here: %s"
)
NEW_PARAMETERS = (
    "K-FAC: the model's trainable parameters have changed since the preconditioner was built; these keep their raw "
    "gradients (remove() the preconditioner and build a new one): %s"
)
MORE_MICRO_BATCHES = (
    "K-FAC: more micro-batches than accumulation_steps = %s before step(); the first ones count (call discard() after "
    "a backward pass that no step() follows, and remove() a preconditioner that is not used any more)"
)


class UsageChecks:
    """Checks how a model is used, step after step. Each warning is logged once."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._known = model, _trainable_parameters(model)
        self._warned: set[str] = set()
        # The gradients that the last step left, and how often each had been written to.
        self._left: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def drop_removed(self, layers: Mapping[str, nn.Module]) -> list[str]:
        """Return the names of the layers that are still in the model, and warn of those that are not."""
        modules = set(self._model.modules())
        present = [name for name, module in layers.items() if module in modules]
        self.warn(REMOVED, sorted(layers.keys() - set(present)))
        return present

    def require_new_gradients(self, layers: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """Check that a backward pass has written the gradients of these layers since the last step.

        A gradient that was written to through NumPy or `data` looks as if it had not been.

        Raises:
            RuntimeError: No layer has a gradient, or all gradients are as the last step left them. (If only some are,
                that is a warning.)
            ValueError: Parameters or gradients have been sharded, since which there may be no gradients.
        """
        for name, parameters in layers.items():
            require_whole(name, parameters)
        if not layers:
            for name, parameter in self._model.named_parameters():
                require_whole(name, [parameter])
            raise RuntimeError("no layer has a gradient: call loss.backward() before step()")
        stale = [name for name, parameters in layers.items() if all(map(self._is_left, parameters))]
        if len(stale) == len(layers):
            raise RuntimeError(
                "all gradients are those that the last step() left (or were written to through `data`, which leaves no "
                "trace): call loss.backward() before step()"
            )
        self.warn(STALE, stale)

    def remember_gradients(self, layers: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """At the end of a step, remember which gradients it leaves, for `require_new_gradients`."""
        self._left = {
            parameter: (weakref.ref(parameter.grad), parameter.grad._version)
            for parameters in layers.values()
            for parameter in parameters
            if parameter.grad is not None
        }

    def _is_left(self, parameter: nn.Parameter) -> bool:
        reference, version = self._left.get(parameter, (None, 0))
        gradient = parameter.grad
        if gradient is None or reference is None:
            return False
        return reference() is gradient and gradient._version == version

    def warn_of_new_parameters(self) -> None:
        """Warn of parameters that are trainable, and were not when K-FAC was built."""
        self.warn(NEW_PARAMETERS, sorted(_trainable_parameters(self._model) - self._known))

    def warn(self, message: str, names: Sequence[str]) -> None:
        """Log one of the messages above about these names, if there are any, and not a second time."""
        if names and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, ", ".join(names))


def _trainable_parameters(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


class _Launcher(NamedTuple):
    """A program that starts processes, and the environment variables by which it numbers them.

    Where others may set variables of the same names, one of the variables `marks` must be there as well.
    """

    name: str
    number: str
    size: str
    marks: tuple[str, ...] = ()


# The innermost first, as each passes on the variables of those around it. Slurm's are those of a job step: a batch
# script, which runs once, has SLURM_NTASKS and SLURM_PROCID=0 as well.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")),
    _Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("MPICH/PMI", "PMI_RANK", "PMI_SIZE"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def require_connected(independent: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Check that processes which were started together are connected: each would learn from its own batches alone.

    Args:
        independent: Each process trains a network of its own.
        environ: The environment variables.

    Raises:
        ValueError: There are several processes and torch.distributed is not initialised; or they are `independent`,
            and torch.distributed connects several.
    """
    if dist.is_available() and dist.is_initialized():
        if independent and dist.get_world_size() > 1:
            raise ValueError(
                f"independent: True, but torch.distributed connects {dist.get_world_size()} processes; allowed: False"
            )
        return
    launcher, count = num_processes(environ)
    if count > 1 and not independent:
        raise ValueError(
            f"{launcher} started {count} processes, and torch.distributed, which alone K-FAC sends through, does not "
            "connect them: their weights would drift apart. Call torch.distributed.init_process_group() before "
            "building the preconditioner; or, where each process trains a network of its own, pass independent=True"
        )


def num_processes(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the launcher and how many processes it has started: ("", 1) if there is no launcher."""
    horovod = sys.modules.get("horovod.torch")  # MPI itself may have given it the number
    if horovod is not None and horovod.is_initialized():
        return "Horovod", horovod.size()
    for launcher in _LAUNCHERS:
        number, count = environ.get(launcher.number, ""), environ.get(launcher.size, "")
        if not (number.isdigit() and count.isdigit()):
            continue
        if launcher.marks and not environ.keys() & {*launcher.marks}:
            continue
        if launcher.name == "Slurm" and environ.get("SLURM_NTASKS", count) != count:
            continue  # left from the job step that submitted this job
        return launcher.name, int(count)
    return "", 1
