"""Polls /health of a server, for use while it is under load: how long an operator's probe waits.

python benchmarks/health_latency.py http://127.0.0.1:8000 --seconds 180
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import quantiles

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=0.1, help="seconds between two polls")
    args = parser.parse_args()
    times, bad = [], 0
    end = time.monotonic() + args.seconds
    # A connection for each poll, as a load balancer has it: accepting is a part of the time.
    http = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
    while (began := time.monotonic()) < end:
        try:
            bad += http.get(f"{args.url}/health").status_code != 200
        except httpx.HTTPError:
            bad += 1
        times.append(time.monotonic() - began)
        time.sleep(max(0.0, began + args.every - time.monotonic()))
    cuts = quantiles(times, n=100, method="inclusive")
    told = {f"p{p}_ms": round(cuts[p - 1] * 1e3, 2) for p in (50, 90, 99)}
    print(json.dumps({"polls": len(times), "not_ok": bad, **told, "max_ms": round(max(times) * 1e3, 2)}))


if __name__ == "__main__":
    main()
