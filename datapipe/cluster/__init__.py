"""Which process of a job this is, and what its scheduler tells, from environment variables. Pure."""

from .launchers import Task, detect, name_task
from .place import Placement, first_host, lonely, name_rank, placement, rank_placement
from .scheduler import ended_job, job_end, num_nodes, parse_time_limit

__all__ = [
    "Placement",
    "Task",
    "detect",
    "ended_job",
    "first_host",
    "job_end",
    "lonely",
    "name_rank",
    "name_task",
    "num_nodes",
    "parse_time_limit",
    "placement",
    "rank_placement",
]
