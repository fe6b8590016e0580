"""K-FAC: second-order preconditioning of gradients. Needs torch and nothing else."""

from .damping import AdaptiveDamping
from .ddp_hook import reduce_to_owners
from .ekfac import EKFAC
from .preconditioner import KFAC

__all__ = ["EKFAC", "KFAC", "AdaptiveDamping", "reduce_to_owners"]
