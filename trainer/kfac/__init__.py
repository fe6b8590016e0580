"""K-FAC: second-order preconditioning of gradients. Needs torch and nothing else."""

from .preconditioner import KFAC

__all__ = ["KFAC"]
