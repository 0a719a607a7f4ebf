"""What `shoal plan` runs for a model of the user's own: looks at it here, with the code around it that the job names.

Run as `python -m shoal_workers.own_looking` with {module, seed, seq_len, precision, paths} as JSON on standard input.
Prints the shape as one JSON object; what is wrong with the code goes to standard error, in one line.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from shoal_planner.own_model import OwnModule
from shoal_planner.strict import read
from shoal_workers.own_look import look
from shoal_workers.user_code import told


def main() -> int:
    order = json.load(sys.stdin)
    sys.path[:0] = order["paths"]
    try:
        shape = look(read(OwnModule, order["module"]), order["seed"], order["seq_len"], order["precision"])
    except BaseException as error:  # theirs may raise anything
        if (theirs := told(error)) is None:
            raise
        sys.stderr.write("; ".join(theirs.splitlines()) + "\n")
        return 2
    sys.stdout.write(json.dumps(dataclasses.asdict(shape)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
