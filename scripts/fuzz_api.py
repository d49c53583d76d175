"""Sends generated requests, right and wrong ones, to every route of a running server: no answer may be a 5xx.

    pip install schemathesis        (an environment of its own)
    offroad serve MODEL --port 8000
    python scripts/fuzz_api.py http://127.0.0.1:8000 --cases 2000 [--api-key KEY]

Cases are shared out over the operations of the server's OpenAPI document. Ends with 1 and the first failing requests
(as curl commands) if there are some.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

# A request that waits for hundreds of tokens tests the model, not the API.
LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4}
NEEDED = {"model", "messages", "prompt", "input", "tokens", *LIMITS}
SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {args.api_key}"}
    schema = schemathesis.openapi.from_url(f"{args.url}/openapi.json", headers=headers)
    operations = [result.ok() for result in schema.get_all_operations()]
    bodies = sum(operation.method == "post" for operation in operations) - 1  # /admin takes none
    share = -(-args.cases // (2 * bodies))
    model = requests.get(f"{args.url}/v1/models", headers=headers, timeout=60).json()["data"][0]["id"]
    numbers = random.Random(0)
    statuses: Counter[int] = Counter()
    failed: list[str] = []

    with requests.Session() as http:
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

                def send(case) -> None:
                    if isinstance(case.body, dict):
                        soften(case.body, model, numbers)
                    answer = case.call(base_url=args.url, headers=headers, timeout=60)
                    statuses[answer.status_code] += 1
                    if answer.status_code >= 500:
                        failed.append(f"{answer.status_code} {answer.text[:300]}\n  {case.as_curl_command()}")

                run_cases(operation, mode, share, send)
                # A server that has stopped fails here, and not as a list of refused connections.
                http.get(f"{args.url}/health", timeout=60).raise_for_status()
            print(f"{operation.method.upper():5} {operation.path:32} {dict(sorted(statuses.items()))}", flush=True)
    print(f"{sum(statuses.values())} requests, {len(failed)} answers of 5xx")
    print("\n".join(failed[:SHOWN]))
    return int(bool(failed))


def soften(body: dict, model: str, numbers: random.Random) -> None:
    """Makes a body more likely to get far, in place: the served model, few tokens, and fewer of the optional fields,
    each of which may be refused."""
    keep = numbers.choice((0.1, 0.3, 1.0))
    for name in list(body):
        if name in LIMITS and type(body[name]) is int:
            body[name] = min(body[name], LIMITS[name])
        elif name == "model" and numbers.random() < 0.9:
            body[name] = model
        elif name not in NEEDED and numbers.random() > keep:
            del body[name]


def run_cases(operation, mode: GenerationMode, count: int, send) -> None:
    """Calls `send` with up to `count` generated cases; an operation without parameters has few."""
    checks = list(HealthCheck)
    try:
        strategy = operation.as_strategy(generation_mode=mode)
        test = given(strategy)(send)
        settings(
            max_examples=count, deadline=None, database=None, suppress_health_check=checks, phases=[Phase.generate]
        )(test)()
    except Exception as error:
        # Not every operation can be asked wrongly: one that takes nothing cannot.
        if "negative" not in str(error).lower() and "unsatisfiable" not in type(error).__name__.lower():
            raise


if __name__ == "__main__":
    sys.exit(main())
