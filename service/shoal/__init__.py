"""Shoal trains one large model on machines that may vanish. `Client` submits and follows jobs; `JobSpec` is a job."""

from shoal.client import Client
from shoal.errors import ShoalError
from shoal_planner.job import JobSpec
from shoal_planner.script_spec import ScriptSpec

__all__ = ["Client", "JobSpec", "ScriptSpec", "ShoalError"]
