"""Shoal trains one large model on machines that may vanish. `Client` submits and follows jobs; `JobSpec` is a job."""

from shoal.client import Client
from shoal.errors import ShoalError
from shoal_planner.job import JobSpec

__all__ = ["Client", "JobSpec", "ShoalError"]
