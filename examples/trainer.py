"""A trainer that hands its weights to a serving engine after each step, over a process group.

python examples/trainer.py CHECKPOINT --engine demo --steps 3

Address and token of the gateway come from CHADBURN_URL and CHADBURN_TOKEN, or from a demo that runs
in this folder. What it does is what an RL loop does between two batches of rollouts: order the
update, meet the engine's ranks in a process group, broadcast every tensor, and go on when the
engine has said that all its ranks serve the new weights. The "training" here is a little noise.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
_TRIES = 10


class UpdateFailed(Exception):
    """The engine serves what it served before."""


def train(weights: Weights, step: int, noise: float) -> None:
    """Stands for an optimizer's step."""
    generator = torch.Generator().manual_seed(step)
    for tensor in weights.values():
        if tensor.dim() == 2:  # norms are left alone
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)


class Publisher:
    """Orders updates at the gateway, and sends what they are about."""

    def __init__(self, gateway: httpx2.Client, engine: str, given: argparse.Namespace) -> None:
        self.gateway = gateway
        self.engine = f"/v1/engines/{engine}"
        self.given = given

    def publish(self, weights: Weights, version: str) -> Any:
        """Returns the result of the operation. Raises UpdateFailed, or what HTTP raises."""
        can = self._checked(self.gateway.get(f"{self.engine}/capabilities"))
        if "distributed" not in can["weight_sources"]:
            raise UpdateFailed("the engine takes no weights from a process group")
        members = 1 + can["world_size"]  # this process sends; each rank of the engine receives
        operation = self._order(weights, version, members)
        # In a thread: if the engine refuses, nobody ever joins, and the order's end says why.
        over = threading.Event()
        sending = threading.Thread(target=self._send, args=(weights, members, over), daemon=True)
        sending.start()
        end = self._follow(operation["id"])
        over.set()
        if end["state"] != "succeeded":
            raise UpdateFailed(f"{end['state']}: {(end['error'] or {}).get('message')}")
        sending.join()
        return end["result"]

    def _order(self, weights: Weights, version: str, members: int) -> Any:
        body = {
            "source": {
                "distributed": {
                    "backend": "gloo",
                    "address": self.given.address,
                    "port": self.given.port,
                    "world_size": members,
                    "rank_offset": 1,
                    "group": "default_pg",  # the one that init_process_group makes
                    "tensors": [
                        {"name": name, "dtype": _dtype(tensor), "shape": list(tensor.shape)}
                        for name, tensor in weights.items()
                    ],
                }
            },
            "weight_version": version,
            "pause": self.given.pause,
            "cache_policy": "flush",
            "deadline_ms": self.given.deadline_s * 1000,
        }
        # The same for every try of this version: a lost answer never becomes a second update.
        key = {"idempotency-key": version}
        for _ in range(_TRIES):
            try:
                answer = self.gateway.post(f"{self.engine}/update-weights", json=body, headers=key)
            except httpx2.TransportError as error:
                print(f"no answer ({error}); the same order again", file=sys.stderr)
                time.sleep(1.0)
            else:
                return self._checked(answer)
        raise UpdateFailed("the gateway does not answer")

    def _send(self, weights: Weights, members: int, over: threading.Event) -> None:
        """As member 0. The group stays until the engine has said what became of it: a sender that
        has sent its last tensor cannot know whether it was received."""
        patience = timedelta(seconds=self.given.deadline_s)
        place = f"tcp://{self.given.address}:{self.given.port}"
        try:
            dist.init_process_group(
                "gloo", init_method=place, rank=0, world_size=members, timeout=patience
            )
            for tensor in weights.values():
                dist.broadcast(tensor.contiguous(), src=0)
            over.wait()
        except RuntimeError as error:
            print(f"the process group broke: {error}", file=sys.stderr)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _follow(self, operation_id: str) -> Any:
        """The operation after its terminal event, which is told like all others."""
        path = f"/v1/operations/{operation_id}"
        headers = {"accept": "text/event-stream"}
        while True:
            try:
                with self.gateway.stream("GET", f"{path}/events", headers=headers) as stream:
                    for number, kind, event in _events(stream.iter_lines()):
                        headers["last-event-id"] = number
                        print(f"  {kind:<11}{json.dumps(event['data'])[:100]}", flush=True)
                operation = self._checked(self.gateway.get(path))
            except httpx2.TransportError:
                continue  # the gateway restarts; the operation goes on without it
            if operation["done"]:
                return operation

    @staticmethod
    def _checked(answer: httpx2.Response) -> Any:
        if answer.is_error:
            problem = answer.json()
            raise UpdateFailed(f"{problem['reason']}: {problem.get('detail') or problem['title']}")
        return answer.json()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str, Any]]:
    """Server-sent events that have a place in the ledger: id, type, data."""
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if line:
            found[name] = value.removeprefix(" ")
        else:
            if "id" in found and "data" in found:
                yield found["id"], found["event"], json.loads(found["data"])
            found = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("checkpoint", type=Path, help="where training starts: a folder with model.safetensors")
    add("--engine", default="demo")
    add("--run", default=f"run-{os.getpid()}", help="begins the name of each version")
    add("--steps", type=int, default=1)
    add("--noise", type=float, default=0.05)
    add("--address", default="127.0.0.1", help="this machine, as the engine reaches it")
    add("--port", type=int, default=29500)
    add("--pause", default="drain", choices=["drain", "abort", "keep"])
    add("--deadline-s", type=int, default=120)
    add("--save-to", type=Path, help="write the last weights there, as model.safetensors")
    given = parser.parse_args()
    url, token = os.environ.get("CHADBURN_URL"), os.environ.get("CHADBURN_TOKEN")
    if not url or not token:
        ready = json.loads(Path(".data/demo/ready.json").read_text())
        url, token = ready["base_url"], ready["tokens"]["operator"]
    weights = load_file(given.checkpoint / "model.safetensors")
    headers = {"authorization": f"Bearer {token}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=60.0) as gateway:
        publisher = Publisher(gateway, given.engine, given)
        for step in range(1, given.steps + 1):
            train(weights, step, given.noise)
            version = f"{given.run}-step-{step}"
            print(f"step {step}: publishing {version}", flush=True)
            try:
                result = publisher.publish(weights, version)
            except UpdateFailed as failed:
                print(f"step {step}: {failed}", file=sys.stderr, flush=True)
                # Not in order: a thread may still wait for an engine that will not come.
                os._exit(1)
            proved = ", ".join(f"rank {e['rank']} {e['sha256'][:12]}" for e in result["evidence"])
            print(f"step {step}: served by {proved}", flush=True)
    if given.save_to:
        save_file(weights, given.save_to / "model.safetensors", {"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
