"""Whether an engine's process can answer, or with a service's name whether that is open."""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

authority = Path(sys.argv[1]).read_bytes()
address, name = sys.argv[2:4]
service = sys.argv[4] if len(sys.argv) > 4 else ""
credentials = grpc.ssl_channel_credentials(authority)
options = [("grpc.ssl_target_name_override", name)]
with grpc.secure_channel(address, credentials, options) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=3)
sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
