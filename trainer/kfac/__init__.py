"""K-FAC: second-order preconditioning of gradients. Needs torch and nothing else."""

from .adaptive import AdaptiveDamping
from .ekfac import EKFAC
from .owners import reduce_to_owners
from .preconditioner import KFAC

__all__ = ["EKFAC", "KFAC", "AdaptiveDamping", "reduce_to_owners"]
