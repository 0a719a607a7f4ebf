"""CodeSpec: a user's own code, and what it needs around it, as Ray's runtime environments know these."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shoal_planner.errors import InvalidField
from shoal_planner.secrecy import looks_secret
from shoal_planner.uris import parts_of

_OF_A_NODE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_PACKAGES = ("s3", "gs", "https")  # whence each node fetches a .zip


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSpec:
    """`working_dir` is where the code is found: a folder (`file:///folder`) of where the job is supervised, which is
    sent to the nodes, or a .zip that each of them fetches from `s3://`, `gs://` or `https://`; `py_modules` are more of
    these, on the import path. `pip` are requirements, installed for this job alone. `env` is what the code finds in its
    environment, and `secrets` what it finds there besides: for each name the variable of the node's own environment
    that holds it, so that its value is in no job. `packages` are what was sent when the model was looked at, and
    Shoal's to say: code that has changed since is refused."""

    working_dir: str | None = None
    py_modules: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    secrets: dict[str, str] = field(default_factory=dict, hash=False)
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.working_dir is not None:
            _check_package("working_dir", self.working_dir)
        for index, module in enumerate(self.py_modules):
            _check_package(f"py_modules[{index}]", module)
        for index, requirement in enumerate(self.pip):
            if not requirement.strip():
                raise InvalidField(f"pip[{index}]", requirement, "must be a requirement, as in 'einops==0.8.1'")
        for name in (*self.env, *self.secrets):
            if not name or "=" in name or "\0" in name:
                field_name = "env" if name in self.env else "secrets"
                raise InvalidField(field_name, name, "is no name of an environment variable")
        for name, held_as in self.secrets.items():
            if name in self.env:
                raise InvalidField(f"secrets.{name}", held_as, "is in env, too: one of the two says what it is")
            if not _OF_A_NODE.fullmatch(held_as):
                # Not what was given: it may be the secret itself.
                problem = "must name an environment variable of the nodes, in capital letters, digits and underscores"
                raise InvalidField(f"secrets.{name}", "...", problem)


NO_CODE = CodeSpec()


def check_no_secrets(code: CodeSpec) -> None:
    """Raises InvalidField where something in `env` looks like a secret: what is in a job is kept and shown. For jobs
    that are new; those that were accepted before are what they are."""
    for name in code.env:
        if looks_secret(name):
            hint = f"set it in the environment of the nodes, and give secrets: {{{name}: ITS_NAME_THERE}}"
            raise InvalidField(f"env.{name}", "...", f"looks like a secret, and jobs are kept and shown: {hint}")


def _check_package(field: str, uri: str) -> None:
    parts = parts_of(field, uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidField(field, uri, "must be file:// and an absolute path, as in file:///home/me/project")
    elif parts.scheme not in _PACKAGES or not parts.path.endswith((".zip", ".whl")):
        raise InvalidField(field, uri, "must be a folder (file:///folder) or a .zip at s3://, gs:// or https://")
