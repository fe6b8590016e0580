"""K-FAC: second-order preconditioning of gradients. Needs torch and nothing else."""

from .owners import reduce_to_owners
from .preconditioner import KFAC

__all__ = ["KFAC", "reduce_to_owners"]
