"""What is said of environments that Ray cannot make."""

from __future__ import annotations

import pytest
from ray.exceptions import RuntimeEnvSetupError

from shoal_workers.code_ray import not_made

_OF_RAY = """Could not create the actor because its associated runtime env failed to be created.
[Node 192.0.2.2] Traceback (most recent call last):
  File "/env/ray/_private/runtime_env/utils.py", line 105, in check_output_cmd
    raise SubprocessCalledProcessError(
Command '['python', '-m', 'pip', 'install']' returned non-zero exit status 1.
Last 50 lines of stdout:
    Looking in indexes: https://pypi.org/simple
    WARNING: Location 'file:///here/simple/eniops/' is ignored: it is no directory.
"""


@pytest.mark.parametrize(
    ("of_pip", "said"),
    [
        (
            "    ERROR: Could not find a version of eniops\n    ERROR: No matching distribution found for eniops\n",
            "ERROR: Could not find a version of eniops ERROR: No matching distribution found for eniops",
        ),
        (
            "      error: subprocess-exited-with-error\n      | no compiler\n    ERROR: Failed to build 'eniops'\n",
            "error: subprocess-exited-with-error | no compiler ERROR: Failed to build 'eniops'",
        ),
    ],
)
def test_of_pip_only_its_errors_are_said(of_pip: str, said: str) -> None:
    assert not_made(RuntimeEnvSetupError(_OF_RAY + of_pip)) == f"the job's environment cannot be made: {said}"


def test_what_ray_says_beside_pip_is_said_in_a_line() -> None:
    assert not_made(RuntimeEnvSetupError("s3://b/code.zip\n cannot be fetched")).endswith(
        "cannot be made: Failed to set up runtime environment. s3://b/code.zip cannot be fetched"
    )
