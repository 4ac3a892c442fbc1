"""A manifest for KServe: Triton serves the repository behind gRPC."""

from __future__ import annotations

import json

from hybridc.remote.repository import ServerOptions, model_name


def inference_service(options: ServerOptions) -> str:
    """An ``InferenceService`` of KServe as YAML.

    Its ``storageUri`` is where you copied the repository to, with ``packages`` in the folders of
    the models: the stock Triton image has no hybridc.
    """
    return f"""\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {json.dumps(model_name(options.name))}
spec:
  predictor:
    model:
      modelFormat:
        name: triton
      protocolVersion: grpc-v2
      storageUri: {json.dumps(options.storage)}
      ports:
        - containerPort: 9000
          name: h2c
          protocol: TCP
"""
