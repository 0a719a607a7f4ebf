"""What can go wrong for a user of the client.

Exception
  ShoalError
    ServerUnreachable     nobody answers there, or not in our language
      NotAServer          nobody can: it is no address of a server
    RequestRefused        the control plane refused, and says why (status, code, detail, param)
      NotSignedIn         401: the token is missing or wrong
      NotAllowed            403: the token is known, and may not do that
      NotFound            404
      Conflict            409
      InvalidRequest      400, 413, 415, 422: something that was sent cannot be used
    WaitTimeout           the job had not ended in time
"""

from __future__ import annotations


class ShoalError(Exception):
    pass


class ServerUnreachable(ShoalError):
    def __init__(self, server: str, problem: str) -> None:
        super().__init__(server, problem)
        self.server = server
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"no control plane answers at {self.server} ({self.problem}): start one with 'shoal up' or 'shoal serve', "
            "or set SHOAL_SERVER to where it is"
        )


class NotAServer(ServerUnreachable):
    def __str__(self) -> str:
        return (
            f"server = {self.server!r}: {self.problem}; SHOAL_SERVER, or an argument, says where the control plane is, "
            "as in http://127.0.0.1:8700"
        )


class RequestRefused(ShoalError):
    def __init__(self, status: int, code: str, detail: str, param: str | None = None) -> None:
        super().__init__(status, code, detail, param)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param

    def __str__(self) -> str:
        return self.detail


class NotSignedIn(RequestRefused):
    def __str__(self) -> str:
        return (
            f"{self.detail}: use 'shoal login', or set SHOAL_TOKEN, or SHOAL_DATA_DIR to the folder with the server's "
            "admin.token"
        )


class NotAllowed(RequestRefused):
    pass


class NotFound(RequestRefused):
    pass


class Conflict(RequestRefused):
    pass


class InvalidRequest(RequestRefused):
    pass


class WaitTimeout(ShoalError):
    def __init__(self, job_id: str, state: str, timeout_s: float) -> None:
        super().__init__(job_id, state, timeout_s)
        self.job_id = job_id
        self.state = state
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"{self.job_id} was still {self.state} after {self.timeout_s:g} s"
