"""Sends a job with the Python client, prints its steps, and ends with its outcome: python examples/submit.py [JOB]"""

import sys
from pathlib import Path

import yaml

from shoal import Client

path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("quickstart.yaml")

with Client() as client:  # SHOAL_SERVER and SHOAL_TOKEN, or the control plane of this machine
    job = client.submit(yaml.safe_load(path.read_text(encoding="utf-8")))
    for event in client.events(job["id"], follow=True):
        if event["kind"] == "step_done":
            print(f"step {event['step']:4d}  loss {event['loss']:.4f}")
        elif "reason" in event:
            print(f"{event['kind']}: {event['reason']}")
    status = client.get(job["id"])["status"]

print(f"{job['id']} {status['state']}: {status['reason']}")
sys.exit(status["state"] != "succeeded")
