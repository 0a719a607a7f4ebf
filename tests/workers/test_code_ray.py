"""What is said of environments that Ray cannot make."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RuntimeEnvSetupError

from shoal_planner.code_spec import CodeSpec
from shoal_workers.code_ray import CodeRefused, environment_of, not_made

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


def test_a_folder_that_is_not_there_is_named_with_its_field(tmp_path: Path) -> None:
    here, gone = tmp_path.as_uri(), (tmp_path / "gone").as_uri()
    for code, field in (
        (CodeSpec(working_dir=gone), "working_dir"),
        (CodeSpec(working_dir=here, py_modules=(here, gone)), r"py_modules\[1\]"),
    ):
        with pytest.raises(CodeRefused, match=f"^{field} = '{gone}': there is no {tmp_path}/gone where"):
            environment_of(code)
