"""Clients of a Triton server that are not hybridc's: the public package ``tritonclient``.

    python triton_client.py '{"protocol": "grpc", "address": ..., ...}'

runs in a process of its own, whose Python has that package. Several clients, each with its own
input, ask for a model until each has asked so many times, or until a file appears. What came is
printed as JSON: requests, errors, and how the server brought requests together; the different
results of each client go to an npz.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def ask(settings: dict[str, Any], index: int, found: dict[str, Any]) -> None:
    """One client: its results by client and digest, errors as sentences, the count of requests."""
    module = import_module(f"tritonclient.{settings['protocol']}")
    client = module.InferenceServerClient(settings["address"])
    x = np.load(settings["inputs"])[index : index + 1]
    tensor = module.InferInput(settings["input"], list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    stop = Path(settings["stop"]) if "stop" in settings else None
    for number in range(settings["requests"]):
        if stop is not None and stop.exists():
            break
        try:
            result = client.infer(
                settings["model"], [tensor], model_version=settings.get("version", "")
            )
            array = result.as_numpy(settings["output"])
            found[f"{index}/{hashlib.sha256(array.tobytes()).hexdigest()}"] = array
        except Exception as error:  # whatever a client meets is what the test has to see
            found[f"error {index}/{number}"] = str(error)
        found[f"count {index}"] = number + 1
    client.close()


def statistics(settings: dict[str, Any]) -> dict[str, int]:
    """Requests that the model ran, and how often it ran for them."""
    client = import_module("tritonclient.grpc").InferenceServerClient(settings["statistics"])
    (model,) = client.get_inference_statistics(settings["model"], "1", as_json=True)["model_stats"]
    return {key: int(model.get(key, 0)) for key in ("inference_count", "execution_count")}


def main() -> None:
    """Run the clients and print what came."""
    settings = json.loads(sys.argv[1])
    before = statistics(settings)
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=ask, args=(settings, index, found))
        for index in range(settings["clients"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = statistics(settings)
    np.savez(settings["outputs"], **{k: v for k, v in found.items() if "/" in k and k[0] != "e"})
    report = {key: after[key] - before[key] for key in after}
    report["requests"] = sum(own for key, own in found.items() if key.startswith("count"))
    report["errors"] = [own for key, own in found.items() if key.startswith("error")]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
